"""What a worker's tool and reasoning parsers change of a request before it is sent: vLLM's ``adjust_request``.

A parser may want special tokens in the text, constrain a forced tool call by a grammar, and say whether the prompt
leaves the model inside a thought. Only the parsers in the tables are known here; any other name is refused in the
configuration, since a guess would make other answers than the workers' own route.

Source: vLLM 0.33 ``parser/abstract_parser.py`` (``_apply_structural_tag``), ``tool_parsers/``, ``parser/qwen3.py``,
``parser/engine/parser_engine.py`` (``is_reasoning_end``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coordinator.rendering.conversation import NEEDS_SERVICE
from coordinator.rendering.fields import NamedTool
from envelope.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from coordinator.rendering.fields import ChatFields, Tool
    from envelope.json_codec import Json


@dataclass(frozen=True, slots=True)
class Adjusted:
    """A chat request's constraint and the say that parsers have in special tokens (None: none)."""

    structure: Json | None
    skip_special_tokens: bool | None


class HermesTools:
    """``<tool_call>{"name": .., "arguments": ..}</tool_call>``."""

    BEGIN, END = "<tool_call>", "</tool_call>"

    def shows_special_tokens(self, fields: ChatFields) -> bool:
        return bool(fields.tools) and fields.tool_choice != "none"

    def structure(self, fields: ChatFields, asked: Json | None) -> Json | None:
        """Return the grammar of calls, where there must be one; ``asked`` is what the client constrained itself.

        Raises:
            BadRequest: only the engine's own library can write that grammar.
        """
        tools = fields.tools
        if not tools or fields.tool_choice in ("none", None):
            return asked
        auto = fields.tool_choice == "auto"
        strict = any(tool.function.strict is True for tool in tools)
        one = fields.parallel_tool_calls is False
        if auto and asked is not None:
            if strict:
                raise BadRequest(
                    NEEDS_SERVICE.format("a structured output beside strict tools"), param="response_format"
                )
            return asked
        if auto and not strict and not one:
            return None
        return {"structural_tag": json.dumps({"type": "structural_tag", "format": self._format(fields, tools)})}

    def _format(self, fields: ChatFields, tools: Sequence[Tool]) -> Json:
        choice = fields.tool_choice
        if isinstance(choice, NamedTool):
            tools = [tool for tool in tools if tool.function.name == choice.function.name]
        tags = [self._tag(tool, gap) for tool in tools for gap in ("\n", "")]
        single = fields.parallel_tool_calls is False
        if choice == "auto":
            return {
                "type": "triggered_tags",
                "triggers": [self.BEGIN],
                "tags": tags,
                "at_least_one": False,
                "stop_after_first": single,
                "excludes": [],
            }
        return {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": "",
            "at_least_one": True,
            "stop_after_first": single or isinstance(choice, NamedTool),
        }

    def _tag(self, tool: Tool, gap: str) -> Json:
        function = tool.function
        schema: Any = True
        if function.strict and function.parameters is not None:
            schema = function.parameters
        return {
            "type": "tag",
            "begin": f'{self.BEGIN}{gap}{{"name": "{function.name}", "arguments": ',
            "content": {
                "type": "json_schema",
                "json_schema": schema,
                "style": "json",
                "any_order": False,
                "max_whitespace_cnt": None,
                "excludes": [],
            },
            "end": f"}}{gap}{self.END}",
        }


class Qwen3Reasoning:
    """``<think>`` .. ``</think>``, from the first token on unless the template was told to leave thinking out.

    A tool call ends a thought too, and what stands before the last turn's begin is past.
    """

    START, ENDS, TURNS = "<think>", ("</think>", "<tool_call>"), ("<|im_start|>", "<|im_end|>")

    def __init__(self, id_of: Callable[[str], int | None]) -> None:
        self._start = id_of(self.START)
        self._ends = frozenset(map(id_of, self.ENDS)) - {None}
        self._turns = frozenset(map(id_of, self.TURNS)) - {None}
        if self._start is None or id_of(self.ENDS[0]) is None:
            raise ValueError(f"qwen3 needs the tokens {self.START} and {self.ENDS[0]}, and the tokenizer has none such")

    def ended(self, token_ids: Sequence[int], template_kwargs: Json) -> bool:
        """Say whether the prompt leaves the model outside of a thought."""
        thinks = bool(template_kwargs.get("enable_thinking", True))
        for token in reversed(token_ids):
            if token in self._ends:
                return True
            if token == self._start:
                return not thinks
            if token in self._turns:
                break
        return not thinks


TOOL_PARSERS: dict[str, Callable[[], HermesTools]] = {"hermes": HermesTools}
REASONING_PARSERS: dict[str, Callable[[Callable[[str], int | None]], Qwen3Reasoning]] = {"qwen3": Qwen3Reasoning}


@dataclass(frozen=True, slots=True)
class Parsers:
    """A deployment's parsers; None where its workers have none of that kind."""

    tools: HermesTools | None = None
    reasoning: Qwen3Reasoning | None = None

    def adjust(self, fields: ChatFields) -> Adjusted:
        """
        Raises:
            BadRequest: the tool choice needs a parser that the deployment has not, or a grammar that is not known here.
        """
        if self.tools is None and fields.tool_choice not in ("none", None):
            raise BadRequest(_without_parser(fields), param="tool_choice")
        asked = fields.constraint()
        if self.reasoning is None and fields.tool_choice == "none":
            return Adjusted(asked, None)
        shown = self.reasoning is not None or (self.tools is not None and self.tools.shows_special_tokens(fields))
        structure = asked if self.tools is None else self.tools.structure(fields, asked)
        return Adjusted(structure, False if shown else None)

    def reasoning_ended(self, fields: ChatFields, token_ids: Sequence[int], template_kwargs: Json) -> bool | None:
        """Return whether grammars apply from the first token on; None lets the worker find out."""
        if not fields.include_reasoning:
            return True
        return None if self.reasoning is None else self.reasoning.ended(token_ids, template_kwargs)


def _without_parser(fields: ChatFields) -> str:
    if fields.tool_choice == "auto":
        return '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
    named = isinstance(fields.tool_choice, NamedTool)
    said = f'function "{fields.tool_choice.function.name}"' if named else f'"{fields.tool_choice}"'  # type: ignore[union-attr]
    return f"tool_choice={said} requires --tool-call-parser to be set"
