"""Parsed streams of Anthropic's ``/v1/messages``: thinking, text and tool_use blocks, as the parser tells of them.

Text that comes while a tool_use block is open waits until that block ends, so that a call's input is never cut in two.

Source: vLLM 0.33 ``message_stream_converter``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from envelope import usage
from envelope.json_codec import dumps
from envelope.messages_blocks import call_id, parsed_input, signature, stop_reason_of
from envelope.messages_stream import error_frame, event, message_end, message_start
from envelope.rebuild import model_name
from envelope.sse import MAX_EVENT_BYTES
from envelope.turn import ParsedTurn

if TYPE_CHECKING:
    from envelope.json_codec import Json
    from envelope.shape import Asked

_HEAD = b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":'
_TAIL = b'},"index":%d}\n\n'

_TEXT = b'"text_delta","text":'
_THINKING = b'"thinking_delta","thinking":'
_SIGNATURE = b'"signature_delta","signature":'
_INPUT = b'"input_json_delta","partial_json":'


class ParsedChunks(ParsedTurn):
    """Generate's parsed chunks as content blocks."""

    def __init__(self, asked: Asked, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        super().__init__(asked, max_event_bytes)
        self._block = ""  # the type of the open block
        self._index = 0  # of the open block, or of the next one
        self._waiting: list[str] = []  # text that came inside a tool_use block
        self._call_index: int | None = None  # chat's index of the latest call
        self._calls = 0
        self._input: list[str] = []  # of the latest call, which alone can have been cut short

    def _begin(self) -> bytes:
        # The prompt is counted before what came from the cache is known; message_delta tells that.
        prompt = (self.usage or {}).get("prompt_tokens") or usage.prompt_length(self._asked.rendered)
        return message_start(self._asked, model_name({}, self._asked), prompt)

    def _thought(self, text: str) -> bytes:
        opening = self._open("thinking", {"type": "thinking", "thinking": ""})
        return opening + self._piece(_THINKING, text)

    def _delta(self, text: str, choice: Json) -> bytes:
        if self._block == "tool_use":
            self._waiting.append(text)
            return b""
        return self._open("text", {"type": "text", "text": ""}) + self._piece(_TEXT, text)

    def _call(self, call: Json) -> bytes:
        function, opening = call.get("function") or {}, b""
        if function.get("name") and call["index"] != self._call_index:
            opening = self._close()
            block = {
                "type": "tool_use",
                "id": call_id(call, self._calls, self._asked),
                "name": function["name"],
                "input": {},
            }
            self._call_index, self._calls, self._input = call["index"], self._calls + 1, []
            opening += self._open("tool_use", block)
        piece = function.get("arguments")
        if not piece or self._block != "tool_use" or call["index"] != self._call_index:
            return opening
        self._input.append(piece)
        return opening + self._piece(_INPUT, piece)

    def _end(self) -> bytes:
        called = self._calls > 0
        complete = called and parsed_input({"function": {"arguments": "".join(self._input)}}) is not None
        stop = stop_reason_of(self._finish, self._stop, called=called, complete=complete)
        return self._close() + message_end(stop, self._counts())

    def _broken(self, error: Json) -> bytes:
        return self._close() + error_frame(error)

    def _open(self, kind: str, block: Json) -> bytes:
        """Start a block, unless one of its type is open; what was open before is stopped."""
        if kind == self._block and kind != "tool_use":
            return b""
        closing = self._close()
        self._block = kind
        return closing + event("content_block_start", {"content_block": block, "index": self._index})

    def _close(self) -> bytes:
        """Stop the open block, and give out the text that waited for its end."""
        if not self._block:
            return b""
        closing = self._piece(_SIGNATURE, signature(self._asked)) if self._block == "thinking" else b""
        closing += event("content_block_stop", {"index": self._index})
        self._block, self._index = "", self._index + 1
        waiting, self._waiting = "".join(self._waiting), []
        return closing + (self._delta(waiting, {}) + self._close() if waiting else b"")

    def _piece(self, kind: bytes, piece: str) -> bytes:
        return _HEAD + kind + dumps(piece) + _TAIL % self._index
