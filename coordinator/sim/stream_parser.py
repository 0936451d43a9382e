"""The parsers of ``parsers``, on text that comes bit by bit."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from coordinator.sim.parsers import CALL, CALLED, THINK, THOUGHT, tool_call_id

if TYPE_CHECKING:
    from coordinator.sim.parsers import Parsing

_NAME = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"]*)"')
_ARGUMENTS = re.compile(r'\s*,\s*"arguments"\s*:\s*')


@dataclass(slots=True)
class Delta:
    """What a stretch of text adds to a message. ``tools`` are entries of a tool-call delta, in wire form."""

    reasoning: str = ""
    content: str = ""
    tools: list[dict[str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tools)

    def wire(self) -> dict[str, Any]:
        """Return a chat delta: set fields only, and with tool calls always a content."""
        wire: dict[str, Any] = {}
        if self.content or self.tools:
            wire["content"] = self.content or None
        if self.reasoning:
            wire["reasoning"] = self.reasoning
        if self.tools:
            wire["tool_calls"] = self.tools
        return wire


class StreamParser:
    """Text deltas in, message deltas out. Holds back what may be the start of a tag."""

    def __init__(self, parsing: Parsing) -> None:
        self.called = False
        self._parsing = parsing
        self._state = self._think if parsing.thinking else self._content
        self._buffer = ""
        self._calls = -1
        self._call: _Call | None = None

    def feed(self, text: str, *, last: bool = False) -> Delta:
        self._buffer += text
        delta = Delta()
        while self._state(delta, last):
            pass
        if not self._parsing.include_reasoning:
            delta.reasoning = ""
        return delta

    # Each state takes what it can off the buffer and says whether the next state has something to do.

    def _think(self, delta: Delta, last: bool) -> bool:
        if not last and len(self._buffer) < len(THINK) and THINK.startswith(self._buffer):
            return False
        self._buffer = self._buffer.removeprefix(THINK)
        self._state = self._reasoning
        return True

    def _reasoning(self, delta: Delta, last: bool) -> bool:
        taken, found = self._upto(THOUGHT, last)
        delta.reasoning += taken
        if found:
            self._state = self._content
        return found

    def _content(self, delta: Delta, last: bool) -> bool:
        if not self._parsing.tools:
            delta.content += self._buffer
            self._buffer = ""
            return False
        taken, found = self._upto(CALL, last)
        if self._calls < 0:  # text between and after calls is dropped, as in a whole answer
            delta.content += taken
        if found:
            self._calls += 1
            self._call = _Call(self._calls)
            self._state = self._tool_call
        return found

    def _tool_call(self, delta: Delta, last: bool) -> bool:
        taken, found = self._upto(CALLED, last)
        assert self._call is not None
        entries = self._call.feed(taken)
        self.called = self.called or bool(entries)
        delta.tools += entries
        if found:
            self._state = self._content
        return found

    def _upto(self, tag: str, last: bool) -> tuple[str, bool]:
        at = self._buffer.find(tag)
        if at >= 0:
            taken, self._buffer = self._buffer[:at], self._buffer[at + len(tag) :]
            return taken, True
        held = 0 if last else _partial(self._buffer, tag)
        cut = len(self._buffer) - held
        taken, self._buffer = self._buffer[:cut], self._buffer[cut:]
        return taken, False


def _partial(text: str, tag: str) -> int:
    """Return how many characters at the end of ``text`` may be the start of ``tag``."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


class _Call:
    """One hermes call, read as it comes: its name in one entry, then its arguments bit by bit."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._text = ""
        self._named = False
        self._in_arguments = False
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._done = False

    def feed(self, text: str) -> list[dict[str, Any]]:
        self._text += text
        entries: list[dict[str, Any]] = []
        if not self._named and (match := _NAME.match(self._text)):
            self._named = True
            self._text = self._text[match.end() :]
            entries.append(
                {
                    "id": tool_call_id(),
                    "type": "function",
                    "index": self._index,
                    "function": {"name": match[1]},
                }
            )
        if self._named and not self._in_arguments and (match := _ARGUMENTS.match(self._text)):
            self._in_arguments = True
            self._text = self._text[match.end() :]
        if self._in_arguments and (arguments := self._take()):
            if entries:
                entries[0]["function"]["arguments"] = arguments
            else:
                entries.append({"index": self._index, "function": {"arguments": arguments}})
        return entries

    def _take(self) -> str:
        """Take argument text up to the end of its object; the brace that closes the call is not part of it."""
        text, self._text = self._text, ""
        if self._done:
            return ""
        if self._depth == 0:
            text = text.lstrip()
        for at, char in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._done = True
                    return text[: at + 1]
        return text
