"""One assistant turn in generate's answers, for the APIs that have no choices: responses and messages.

A whole answer becomes a ``Turn``, whichever output mode it is in; a text-mode stream is read by
``TextChunks``, whose subclasses say what an event of their API looks like.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from envelope import usage
from envelope.errors import LegFailed, LegUnreadable
from envelope.json_codec import JSONDecodeError, loads_lenient
from envelope.passthrough import DONE, error_message
from envelope.rebuild import MISSHAPEN, choices_of, content_of
from envelope.sse import MAX_EVENT_BYTES, Events, EventTooLarge, data_of, split

if TYPE_CHECKING:
    from envelope.errors import ApiError
    from envelope.json_codec import Json
    from envelope.shape import Asked


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model said.

    Attributes:
        parsed: the worker took the text apart (``derender``); else all of it is in ``text``.
        calls: tool calls as chat has them: ``{"id", "function": {"name", "arguments"}}``.
        finish: generate's ``finish_reason``.
        stop: the stop string or stop token id that matched, or None.
        logprobs: one object per token, as chat has them, or None.
    """

    parsed: bool
    reasoning: str
    text: str
    calls: tuple[Json, ...]
    finish: str | None
    stop: str | int | None
    logprobs: list[Json] | None


def turn_of(reply: Json) -> Turn:
    """Return what the (one) choice of a whole generate answer says.

    Raises:
        LegFailed: the answer has no choices, or the choice has neither text nor message.
    """
    choice = choices_of(reply)[0]
    message = choice.get("message")
    parsed = isinstance(message, dict)
    message = message if isinstance(message, dict) else {}
    return Turn(
        parsed=parsed,
        reasoning=message.get("reasoning") or "",
        text=content_of(choice) or "",
        calls=tuple(message.get("tool_calls") or ()),
        finish=choice.get("finish_reason"),
        stop=choice.get("stop_reason"),
        logprobs=(choice.get("logprobs") or {}).get("content"),
    )


class TextChunks(ABC):
    """Reads generate's text chunks; implements ``Shape``.

    The methods that subclasses fill in are called in this order: ``_begin`` before anything else, ``_delta``
    for every piece of text, then ``_end`` once, or ``_broken`` in its place when the stream fails.
    """

    def __init__(self, asked: Asked, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self.usage: Json | None = None
        self.content_seen = False
        self.error: str | None = None
        self._asked = asked
        self._events = Events(max_event_bytes)
        self._begun = False
        self._ended = False
        self._finish: str | None = None
        self._stop: str | int | None = None
        self._output_tokens = 0

    def feed(self, data: bytes) -> bytes:
        try:
            block = self._events.whole(data)
        except EventTooLarge as error:
            raise LegFailed("decode", str(error)) from None
        if block.find(b"\n\n") == len(block) - 2 and block.find(b"\r") < 0:  # one event in one read is the rule
            return self._event(block)
        return b"".join([self._event(event) for event in split(block)]) if block else b""

    def close(self) -> None:
        """End the stream.

        Raises:
            LegFailed: neither the worker's end mark, after a finish, nor its error has come.
        """
        if not self._ended:
            raise LegFailed("decode", "the worker's stream ended early")

    def fail(self, error: ApiError, request_id: str) -> bytes:
        """Give back the events that tell a client, mid-stream, of a failure that the worker did not tell of.

        Open items are closed first, which a plain ``error_event`` cannot do. What is fed later is dropped.
        """
        if self._ended:
            return b""
        self._ended = True
        return self._broken({**error.body(request_id), "code": error.status})

    def _event(self, event: bytes) -> bytes:
        data = data_of(event)
        if data is None:
            # A comment keeps the client's connection alive too; half a line end, cut off by a read, is nothing.
            return event if b":" in event else b""
        if self._ended or not data:
            return b""
        try:
            return self._chunk(_parsed(data)) if data[:1] == b"{" else self._mark(data)
        except MISSHAPEN as error:
            raise LegUnreadable("decode", f"cannot read a chunk of the worker's stream: {error!r}") from None

    def _chunk(self, chunk: Json) -> bytes:
        if chunk.get("error"):
            return self._failed(chunk["error"])
        if chunk.get("usage"):
            self.usage = chunk["usage"]
        choices = chunk.get("choices")
        return self._choice(choices[0]) if choices else b""

    def _choice(self, choice: Json) -> bytes:
        begin = b"" if self._begun else self._start()
        self._output_tokens += len(choice.get("token_ids") or ())
        if choice.get("finish_reason") is not None:
            self._finish, self._stop = choice["finish_reason"], choice.get("stop_reason")
        return begin + self._spoken(choice)

    def _spoken(self, choice: Json) -> bytes:
        text = choice["text"]
        if not text:
            return b""
        if not isinstance(text, str):
            raise TypeError(f"the text is of type {type(text).__name__}")
        self.content_seen = True
        return self._delta(text, choice)

    def _start(self) -> bytes:
        self._begun = True
        return self._begin()

    def _mark(self, data: bytes) -> bytes:
        if data.strip() != DONE:
            raise LegUnreadable("decode", "an event of the worker's stream is no JSON object")
        if self._finish is None:  # the end mark without a finish: close() calls it a cut
            return b""
        end = self._end()
        self._ended = True
        return end

    def _failed(self, error: Any) -> bytes:
        self._ended = True
        self.error = error_message(error)
        return self._broken(error if isinstance(error, dict) else {"message": self.error})

    def _counts(self) -> Json:
        """Return the worker's usage; without it, the tokens that were rendered and those that came."""
        return self.usage or usage.counts(usage.prompt_length(self._asked.rendered), self._output_tokens)

    @abstractmethod
    def _begin(self) -> bytes:
        """Return what opens a stream."""

    @abstractmethod
    def _delta(self, text: str, choice: Json) -> bytes:
        """Return the event for a piece of text, which is not empty."""

    @abstractmethod
    def _end(self) -> bytes:
        """Return what ends a whole stream."""

    @abstractmethod
    def _broken(self, error: Json) -> bytes:
        """Return what ends a stream that fails, for an OpenAI ``error`` object."""


class ParsedTurn(TextChunks):
    """Reads a parsed stream, whose chunks have a ``delta`` in the place of text: any of ``reasoning``, ``content``,
    ``tool_calls``, or null. Beside ``_delta``, for content, there are two methods to fill in.
    """

    def _spoken(self, choice: Json) -> bytes:
        delta = choice["delta"]
        if not delta:
            return b""
        out = []
        if delta.get("reasoning"):
            out.append(self._thought(delta["reasoning"]))
        if delta.get("content"):
            out.append(self._delta(delta["content"], choice))
        out += [self._call(call) for call in delta.get("tool_calls") or ()]
        self.content_seen = self.content_seen or bool(out)
        return b"".join(out)

    @abstractmethod
    def _thought(self, text: str) -> bytes:
        """Return the events for a piece of reasoning, which is not empty."""

    @abstractmethod
    def _call(self, call: Json) -> bytes:
        """Return the events for a piece of a tool call, as chat streams it: its name first, then its arguments."""


def _parsed(data: bytes) -> Json:
    """Parse a chunk; not by json_codec, as no number that is passed on can be beyond 64 bits."""
    try:
        found: Json = orjson.loads(data)
    except JSONDecodeError:
        return _lenient(data)
    return found


def _lenient(data: bytes) -> Json:
    try:
        chunk: Json = loads_lenient(data)
    except JSONDecodeError as error:
        raise LegUnreadable("decode", f"a chunk of the worker's stream is no JSON: {error}") from None
    return chunk
