"""The qwen3 reasoning parser and the hermes tool parser, on the text that was generated.

Whole and streamed are two readings of one text, as in vLLM, and differ where it was cut: a tool call that
``max_tokens`` cuts stays markup in a whole answer's content, while a stream has already sent its name.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

THINK, THOUGHT, CALL, CALLED = "<think>", "</think>", "<tool_call>", "</tool_call>"
_CALLS = re.compile(f"{CALL}(.*?){CALLED}|{CALL}(.*)", re.DOTALL)
_NAME = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"]*)"')
_ARGUMENTS = re.compile(r'\s*,\s*"arguments"\s*:\s*')


@dataclass(frozen=True, slots=True)
class Parsing:
    """What a parse depends on beside the text: the request as the ``parse_context`` of a render says it.

    Attributes:
        thinking: text up to ``</think>`` is a thought.
        tools: tool markup is read; otherwise it stays in the content.
        tool_choice: as in the request; ``forced`` makes an absent content ``""`` rather than null.
    """

    thinking: bool = False
    tools: bool = False
    tool_choice: Any = None
    include_reasoning: bool = True

    @property
    def forced(self) -> bool:
        return self.tool_choice == "required" or self.named

    @property
    def named(self) -> bool:
        return isinstance(self.tool_choice, dict)

    @classmethod
    def of(cls, context: Mapping[str, Any] | None, *, parsers: bool) -> Parsing:
        if context is None or not parsers:
            return cls()
        kwargs = context.get("chat_template_kwargs") or {}
        choice = context.get("tool_choice")
        return cls(
            thinking=kwargs.get("enable_thinking") is not False,
            tools=bool(context.get("tools")) and choice != "none",
            tool_choice=choice,
            include_reasoning=context.get("include_reasoning") is not False,
        )


@dataclass(slots=True)
class Parsed:
    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    def finish_reason(self, engine: str | None, parsing: Parsing) -> str | None:
        return rewritten(engine, called=bool(self.tool_calls), parsing=parsing)

    def message(self) -> dict[str, Any]:
        """Return vLLM's ChatMessage; ``tool_calls`` is there only if there are any."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": self.content,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
        }
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return {**message, "reasoning": self.reasoning}


def rewritten(engine: str | None, *, called: bool, parsing: Parsing) -> str | None:
    return "tool_calls" if engine == "stop" and called and not parsing.named else engine


def parse(text: str, parsing: Parsing) -> Parsed:
    """Read a whole answer."""
    reasoning: str | None = None
    content: str | None = text
    if parsing.thinking:
        reasoning, _found, rest = text.removeprefix(THINK).partition(THOUGHT)
        content = rest or None
    if not parsing.include_reasoning:
        reasoning = None
    calls = _calls_in(content) if parsing.tools and content else []
    if calls and content is not None:
        content = content[: content.index(CALL)] or ("" if parsing.forced else None)
    return Parsed(reasoning or None, content, calls)


def _calls_in(content: str) -> list[dict[str, Any]]:
    calls = []
    for whole, cut in _CALLS.findall(content):
        try:
            call = json.loads(whole or cut)
            name, arguments = call["name"], call["arguments"]
        except (ValueError, KeyError, TypeError):
            return []
        calls.append(
            {
                "id": tool_call_id(),
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
        )
    return calls


def tool_call_id() -> str:
    return f"chatcmpl-tool-{secrets.token_hex(8)}"


def reasoning_tokens(token_ids: Sequence[int], text_of: Mapping[str, int], parsing: Parsing) -> int:
    """Count the tokens of the thought, without its tags."""
    if not parsing.thinking:
        return 0
    count = 0
    for token in token_ids:
        if token == text_of[THOUGHT]:
            break
        count += token != text_of[THINK]
    return count


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
