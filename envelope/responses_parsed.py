"""Parsed streams of ``/v1/responses``: what a parser tells of each chunk, as items that open, grow and close.

An item is open until something of another kind comes, or another call: then it closes, whole. Only the last one can
have been cut short.

Source: vLLM 0.33 ``SimpleStreamingEventProcessor``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from envelope.responses_body import status_of, token_counts
from envelope.responses_events import Writer
from envelope.responses_items import call_item, logprobs, message_item, reasoning_item
from envelope.responses_stream import failed_event, response_at
from envelope.sse import MAX_EVENT_BYTES
from envelope.turn import ParsedTurn

if TYPE_CHECKING:
    from collections.abc import Callable

    from envelope.json_codec import Json
    from envelope.shape import Asked


class ParsedChunks(ParsedTurn):
    """Generate's parsed chunks as reasoning, message and call items, in the order in which they came.

    The text of an item is kept, because its last events repeat it; its pieces are joined once, at its end.
    """

    def __init__(self, asked: Asked, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        super().__init__(asked, max_event_bytes)
        self._writer = Writer()
        self._closed: list[Json] = []
        self._calls = 0
        self._kind: str | int = ""  # of the open item, an int for a call: chat's index of it
        self._item: Json = {}  # the open item as it began
        self._make: Callable[[str, str], Json] | None = None  # the open item of its text and status
        self._pieces: list[str] = []
        self._logprobs: list[Json] = []

    def _begin(self) -> bytes:
        return self._writer.begin(self._response("in_progress", [], None))

    def _thought(self, text: str) -> bytes:
        opening = self._open("reasoning", lambda text, status: reasoning_item(self._asked, text, status))
        return opening + self._grow(text)

    def _delta(self, text: str, choice: Json) -> bytes:
        opening = self._open("message", self._message)
        found = logprobs((choice.get("logprobs") or {}).get("content"), self._asked.body)
        self._logprobs += found or ()
        return opening + self._grow(text, found)

    def _call(self, call: Json) -> bytes:
        function, opening = call.get("function") or {}, b""
        if function.get("name") and call["index"] != self._kind:
            number = self._calls
            self._calls += 1

            def make(arguments: str, status: str) -> Json:
                whole = {"id": call.get("id"), "function": {"name": function["name"], "arguments": arguments}}
                return call_item(whole, number, self._asked, status)

            opening = self._open(call["index"], make)
        if call["index"] != self._kind:  # a piece of a call that has no name, or is closed
            return opening
        return opening + self._grow(function.get("arguments") or "")

    def _end(self) -> bytes:
        status = status_of(self._finish)
        closing = self._close(status)
        return closing + self._writer.end(self._response(status, self._closed, token_counts(self._counts())))

    def _broken(self, error: Json) -> bytes:
        told = failed_event(error, self._writer.number())
        if not self._begun:
            return told
        output = [*self._closed, *([] if self._make is None else [self._whole("incomplete")])]
        response = self._response("failed", output, None)
        response["error"] = {"code": "server_error", "message": str(error.get("message") or "")}
        return told + self._writer.end(response)

    def _message(self, text: str, status: str) -> Json:
        return message_item(self._asked, text, status, self._logprobs or None)

    def _open(self, kind: str | int, make: Callable[[str, str], Json]) -> bytes:
        """Open an item, unless it is open; what was open before is closed."""
        if kind == self._kind:
            return b""
        closing = self._close("completed")
        self._kind, self._make, self._item = kind, make, make("", "in_progress")
        if any(item["id"] == self._item["id"] for item in self._closed):
            self._item["id"] += f"_{len(self._closed)}"
        return closing + self._writer.open(self._item, len(self._closed))

    def _grow(self, piece: str, scores: list[Json] | None = None) -> bytes:
        self._pieces.append(piece)
        if self._item["type"] == "custom_tool_call":
            return b""  # its input is inside a JSON string until the call is whole
        return self._writer.delta(self._item, len(self._closed), piece, scores)

    def _close(self, status: str) -> bytes:
        if self._make is None:
            return b""
        item, index, closing = self._whole(status), len(self._closed), b""
        if item["type"] == "custom_tool_call":
            closing = self._writer.delta(item, index, item["input"])
        closing += self._writer.close(item, index)
        self._closed.append(item)
        self._kind, self._make, self._pieces, self._logprobs = "", None, [], []
        return closing

    def _whole(self, status: str) -> Json:
        """Return the open item as it stands."""
        assert self._make is not None
        return {**self._make("".join(self._pieces), status), "id": self._item["id"]}

    def _response(self, status: str, output: list[Json], counts: Json | None) -> Json:
        return response_at(self._asked, {}, status, output, counts)
