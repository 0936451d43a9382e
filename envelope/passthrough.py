"""A stream that is relayed as the worker sent it, and watched on the way.

The bytes of the worker go out unchanged, cut only at the ends of events. To watch costs a few searches for
byte strings; an event is parsed only where one of them hits, or while no content has been seen yet.
"""

from __future__ import annotations

import re
from typing import Any

from envelope.errors import LegFailed
from envelope.formats import Format
from envelope.json_codec import Json, JSONDecodeError, dumps, loads_lenient
from envelope.sse import MAX_EVENT_BYTES, Events, EventTooLarge, data_of, event_name, split, with_data

DONE = b"[DONE]"

_LAST_EVENTS: dict[Format, tuple[str, ...]] = {
    Format.RESPONSES: ("response.completed", "response.incomplete", "response.failed"),
    Format.MESSAGES: ("message_stop",),
}
_TRANSFER_PARAMS = ("kv_transfer_params", "ec_transfer_params")
_USAGE_KEY = b'"usage"'
_TRANSFER_KEY = b'_transfer_params"'
_ESCAPED_LETTER = b"\\u00"  # a name may be spelled with it

# What an event says: chat's content, completions' and messages' text, the delta of responses.
_TEXT = re.compile(rb'"(?:content|text|delta)": ?"([^"\\]+)"')
_QUOTE, _BACKSLASH = ord('"'), ord("\\")
# Reasoning, content, and some that were not the rule: where events differ by more, this does not pay.
_LESSONS = 8


class PassThrough:
    """Relays a stream of any format; implements ``Shape``.

    Args:
        format: what the worker sends; it decides what ends the stream and what counts as content.
        strip_transfer_params: take the hand-over out of events, which would tell a client of hosts and ports.
        max_event_bytes: the largest event that is taken.
    """

    def __init__(
        self, format: Format, *, strip_transfer_params: bool = False, max_event_bytes: int = MAX_EVENT_BYTES
    ) -> None:
        self.usage: Json | None = None
        self.content_seen = False
        self.error: str | None = None
        self._events = Events(max_event_bytes)
        self._last_events = _LAST_EVENTS.get(format, ())
        self._end_marks = tuple(name.encode() for name in self._last_events) or (DONE,)
        self._strip = strip_transfer_params
        self._generating = False  # some event had content
        self._before = self._after = b""  # what stood around the text of an event in which nothing else was
        self._lessons = _LESSONS
        self._choice_seen = False
        self._ended = False

    def feed(self, data: bytes) -> bytes:
        # Most events differ from the one before by their text alone. Where that has no quote in it, it is all text.
        rest = data.removeprefix(self._before)
        text = rest.removesuffix(self._after)
        if 0 < len(text) < len(rest) < len(data) and _QUOTE not in text and not self._events.held:
            self.content_seen = True
            return data
        try:
            block = self._events.whole(data)
        except EventTooLarge as error:
            raise LegFailed("decode", str(error)) from None
        if not block:
            return block
        if self._generating and not self._worth_a_look(block):
            if block[:1] != b":":  # what is no comment goes on with the answer
                self.content_seen = True
                if self._lessons:
                    self._learn(block)
            return block
        return b"".join([self._watch(event) for event in split(block)])

    def close(self) -> None:
        """End the stream.

        Raises:
            LegFailed: the end mark never came, half an event is left, or nothing was generated. A stream that
                the worker itself has failed with an error event is not failed a second time.
        """
        if self.error is not None:
            return
        if not self._ended or self._events.unfinished:
            raise LegFailed("decode", "the worker's stream ended early")
        if not self._choice_seen:
            raise LegFailed("decode", "the worker's stream ended without any output")

    def _learn(self, block: bytes) -> None:
        """Remember what stands around the text of an event, if that is all of a block."""
        found = _TEXT.search(block)
        if found and block.find(b"\n\n") == len(block) - 2:
            self._lessons -= 1
            self._before, self._after = block[: found.start(1)], block[found.end(1) :]

    def _worth_a_look(self, block: bytes) -> bool:
        # Quotes in a model's text have backslashes in JSON, so of these only an end mark and the word itself can hit
        # there, and _watch tells them apart. The name of an event has no quotes.
        find = block.find  # `in` raises and catches a TypeError first
        for mark in self._end_marks:
            if find(mark) >= 0:
                return True
        return (
            find(b"error") >= 0
            or ((at := find(_BACKSLASH)) >= 0 and find(_ESCAPED_LETTER, at) >= 0)  # one byte is found in no time
            or (find(_USAGE_KEY) >= 0 and _is_set(block, _USAGE_KEY))
            or (self._strip and find(_TRANSFER_KEY) >= 0 and _is_set(block, _TRANSFER_KEY))
        )

    def _watch(self, event: bytes) -> bytes:
        """Look at one event; return what of it is sent on."""
        if self._generating and not self._worth_a_look(event):  # it came with one that is, or with the first text
            self.content_seen = self.content_seen or event[:1] != b":"
            return event
        data = data_of(event)
        if data is None:
            return event
        if data.strip() == DONE:
            self._ended = self._ended or not self._last_events
            return event
        try:
            body = loads_lenient(data)
        except JSONDecodeError:
            return event  # not ours to judge: the client asked this route and gets its words
        if not isinstance(body, dict):
            return event
        self._note(body, event)
        may_tell = self._strip and (_is_set(event, _TRANSFER_KEY) or _BACKSLASH in event)
        if may_tell and (told := without_transfer_params(body)) != body:
            return with_data(event, dumps(told))
        return event

    def _note(self, body: Json, event: bytes) -> None:
        kind = body.get("type")
        kind = kind if isinstance(kind, str) and kind else event_name(event)
        response = body.get("response")
        part = response if isinstance(response, dict) else body
        usage = _usage_of(part)
        if usage:
            self.usage = usage
        error = part.get("error") or (body if kind == "error" else None)
        if error:
            self.error = error_message(error)
        if kind in self._last_events:
            self._ended = self._choice_seen = True
        if body.get("choices"):
            self._choice_seen = True
        if _has_content(body, kind):
            self.content_seen = self._generating = True


def without_transfer_params(body: Json) -> Json:
    """Return a copy of an answer or a chunk whose transfer params are null.

    They hold block ids, hosts and ports of workers. A key that is absent stays absent.
    """
    copy = {key: None if key in _TRANSFER_PARAMS else value for key, value in body.items()}
    for outer in ("response", "message"):
        part = copy.get(outer)
        if isinstance(part, dict):
            copy[outer] = without_transfer_params(part)
    return copy


def error_message(error: Any) -> str:
    """Return what an ``error`` member says; any truthy member is an error, whatever its shape."""
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)


def _is_set(block: bytes, key: bytes) -> bool:
    """Say whether a key may stand somewhere with a value other than null: also with blanks, or as a value itself."""
    return block.count(key) != block.count(key + b":null")


def _usage_of(part: Json) -> Json | None:
    message = part.get("message")  # message_start holds it one level down
    usage = part.get("usage") or (message.get("usage") if isinstance(message, dict) else None)
    return usage if isinstance(usage, dict) else None


def _has_content(body: Json, kind: str | None) -> bool:
    """Say whether an event carries something generated: text, a token, reasoning, a tool call."""
    if kind is not None:
        return kind.endswith(".delta") or kind == "content_block_delta"
    choices = body.get("choices")
    return isinstance(choices, list) and any(_generated(choice) for choice in choices)


def _generated(choice: Any) -> bool:
    if not isinstance(choice, dict):
        return False
    if choice.get("text") or choice.get("token_ids"):
        return True
    delta = choice.get("delta")
    return isinstance(delta, dict) and any(value for key, value in delta.items() if key != "role")
