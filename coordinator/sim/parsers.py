"""The qwen3 reasoning parser and the hermes tool parser, on the text that was generated.

Whole and streamed (``stream_parser``) are two readings of one text, as in vLLM, and differ where it was cut: a tool
call that ``max_tokens`` cuts stays markup in a whole answer's content, while a stream has already sent its name.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

THINK, THOUGHT, CALL, CALLED = "<think>", "</think>", "<tool_call>", "</tool_call>"
_CALLS = re.compile(f"{CALL}(.*?){CALLED}|{CALL}(.*)", re.DOTALL)


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


def reasoning_tokens(token_ids: Sequence[int], id_of: Callable[[str], int], parsing: Parsing) -> int:
    """Count the tokens of the thought, without its tags."""
    if not parsing.thinking:
        return 0
    count = 0
    for token in token_ids:
        if token == id_of(THOUGHT):
            break
        count += token != id_of(THINK)
    return count
