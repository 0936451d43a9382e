"""Reading a streamed text-mode generate answer, for the shapes that rebuild an envelope from it.

A chunk holds one choice: its index, the text and the tokens that are new, and at last a finish reason. Text
may lag its tokens, since it is held back while a stop string could still match, so either may come without
the other. A chunk without choices holds the usage, and ``[DONE]`` ends the stream.

This is the hottest path of the product. A plain chunk costs one parse and one join of bytes: what does not
change between the chunks of a choice is made once and kept in ``_before`` and ``_after``. One that is like a plain
chunk before it is not even parsed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from envelope import usage
from envelope.errors import LegFailed, LegUnreadable
from envelope.json_codec import Json, JSONDecodeError, dumps, loads_lenient
from envelope.likeness import Likeness
from envelope.passthrough import DONE, error_message
from envelope.rebuild import MISSHAPEN, answer_id, choice_count, model_name
from envelope.sse import MAX_EVENT_BYTES, Events, EventTooLarge, data_of, frame, split

if TYPE_CHECKING:
    from envelope.shape import Asked


class TextStream(ABC):
    """Takes a generate stream apart; a subclass writes the frames. Implements ``Shape``.

    Attributes:
        id_prefix: of the rebuilt answer's id.
        object: the type that the rebuilt chunks name.
    """

    id_prefix: ClassVar[str]
    object: ClassVar[str]
    _after: ClassVar[bytes]  # what follows the text in a plain frame

    def __init__(self, asked: Asked, *, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self.usage: Json | None = None
        self.content_seen = False
        self.error: str | None = None
        options = asked.body.get("stream_options") or {}
        self._asked = asked
        self._include_usage = bool(options.get("include_usage"))
        self._continuous = self._include_usage and bool(options.get("continuous_usage_stats"))
        self._token_ids = bool(asked.body.get("return_token_ids"))
        self._weights = bool(asked.body.get("return_weight_versions"))
        self._count = choice_count(asked)
        self._events = Events(max_event_bytes)
        self._head: Json = {}  # the keys that every frame begins with; empty until the first chunk
        self._started: set[int] = set()
        self._finished: set[int] = set()
        self._ended = False
        self._likeness = Likeness()
        self._until_text = self._from_text = b""  # the frame of an event that is like the one that was learned
        self._before: dict[int, bytes] = {}  # what precedes the text; holds only choices with plain frames

    def feed(self, data: bytes) -> bytes:
        if (text := self._likeness.text(data)) and not self._events.held:
            self.content_seen = True
            return self._until_text + text + self._from_text
        try:
            block = self._events.whole(data)
        except EventTooLarge as error:
            raise LegFailed("decode", str(error)) from None
        if block.find(b"\n") == len(block) - 2 and block[:6] == b"data: " and block.find(b"\r") < 0:
            return self._data(block, block[6:-2])  # the rule: one event of one line in one read
        return b"".join([self._event(event) for event in split(block)]) if block else b""

    def close(self) -> None:
        """End the stream.

        Raises:
            LegFailed: the end mark or a choice's finish never came. A stream that the worker itself has
                failed with an error event is not failed a second time.
        """
        if self.error is None and (not self._ended or self._events.unfinished):
            raise LegFailed("decode", "the worker's stream ended early")

    def _event(self, event: bytes) -> bytes:
        data = data_of(event)
        if data is None:
            # A comment keeps the client's connection alive too; half a line end, cut off by a read, is nothing.
            return event if b":" in event else b""
        return self._data(event, data)

    def _data(self, event: bytes, data: bytes) -> bytes:
        if data[:1] != b"{":
            return self._end(data) if data else b""
        try:
            chunk = orjson.loads(data)  # not by json_codec: no number that we pass on can be beyond 64 bits
        except JSONDecodeError:
            chunk = _lenient(data)
        try:
            choices = chunk.get("choices")
            if not choices:
                return self._no_choices(event, chunk)
            if len(choices) == 1:
                return self._choice(chunk, choices[0], event)
            return b"".join([self._choice(chunk, choice) for choice in choices])
        except MISSHAPEN as error:
            raise LegUnreadable("decode", f"cannot read a chunk of the worker's stream: {error!r}") from None

    def _choice(self, chunk: Json, choice: Json, event: bytes = b"") -> bytes:
        before, said = self._before.get(choice["index"]), choice["text"]
        if before is not None and said and type(said) is str and choice["finish_reason"] is None:
            self.content_seen = True
            text = dumps(said)
            if self._likeness.learn(event, text):
                self._until_text, self._from_text = before + b'"', b'"' + self._after
            return before + text + self._after
        return self._special(chunk, choice)

    def _special(self, chunk: Json, choice: Json) -> bytes:
        """Return the frames of a chunk that is the first, the last, without text, or shows more than text."""
        out = self._open(chunk)
        index, said = choice["index"], self._said(choice)
        finished = choice.get("finish_reason") is not None
        if index in self._finished:
            return out
        self.usage = chunk.get("usage") or self.usage
        if said or choice.get("token_ids"):
            self._started.add(index)
        elif index not in self._started and not finished:
            return out
        out += self._frame(chunk, choice)
        self.content_seen = self.content_seen or bool(said)
        if finished:
            self._finished.add(index)
            self._before.pop(index, None)
            self._likeness.forget()
        elif said and index not in self._before and self._plain():
            self._before[index] = self._prefix(index)
        return out

    def _said(self, choice: Json) -> Any:
        """Return what is new of the answer itself; empty where nothing is."""
        text = choice["text"]
        if not isinstance(text, str):
            raise TypeError(f"the text is of type {type(text).__name__}")
        return text

    def _open(self, chunk: Json) -> bytes:
        """Return the frames that precede all others, once."""
        if self._head:
            return b""
        self._head = {
            "id": answer_id(chunk.get("request_id"), self._asked, self.id_prefix),
            "object": self.object,
            "created": self._asked.created,
            "model": model_name({}, self._asked),
        }
        return self._opening(chunk)

    def _no_choices(self, event: bytes, chunk: Json) -> bytes:
        error = chunk.get("error")
        if error:
            self.error = error_message(error)
            return event
        counted = chunk.get("usage")
        if not counted:
            return b""
        self.usage = counted
        if not self._include_usage:
            return b""
        metrics = {"metrics": chunk["metrics"]} if chunk.get("metrics") else {}
        return self._open(chunk) + self._write([], usage.without_nulls(counted), metrics)

    def _end(self, data: bytes) -> bytes:
        if data.strip() != DONE:
            raise LegUnreadable("decode", "an event of the worker's stream is no JSON object")
        if self._ended or (self.error is None and len(self._finished) < self._count):
            return b""  # close() tells of the choice that never finished
        self._ended = True
        return frame(DONE)

    def _write(self, choices: list[Json], counted: Json | None, rest: Json) -> bytes:
        between = {} if counted is None else {"usage": counted}
        return frame(dumps({**self._head, "choices": choices, **between, **rest}))

    def _opening(self, chunk: Json) -> bytes:
        return b""

    @abstractmethod
    def _plain(self) -> bool:
        """Say whether the client wants nothing but text in the chunks between the first and the last."""

    @abstractmethod
    def _prefix(self, index: int) -> bytes:
        """Return what precedes the text in a plain frame of that choice."""

    @abstractmethod
    def _frame(self, chunk: Json, choice: Json) -> bytes:
        """Return the frame of a chunk, maybe none."""


def _lenient(data: bytes) -> Json:
    try:
        chunk: Json = loads_lenient(data)
    except JSONDecodeError as error:
        raise LegUnreadable("decode", f"a chunk of the worker's stream is no JSON: {error}") from None
    return chunk
