"""What a worker's tool and reasoning parsers change of a request before it is sent: vLLM's ``adjust_request``.

A parser may want special tokens in the text, constrain a forced tool call by a grammar, and say whether the prompt
leaves the model inside a thought. Only the parsers in the tables are known here; any other name is refused in the
configuration, since a guess would make other answers than the workers' own route. Of tool calls that are forced, strict
or one at a time, only hermes's grammar is.

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

    from coordinator.rendering.fields import ChatFields, Function, Tool
    from envelope.json_codec import Json


@dataclass(frozen=True, slots=True)
class Adjusted:
    """A chat request's constraint and the say that parsers have in special tokens (None: none)."""

    structure: Json | None
    skip_special_tokens: bool | None


# Tool parsers that want special tokens in the text: where there are tools to call, or whenever a parser runs at all.
_SHOWN_WITH_TOOLS = (
    *("apertus", "functiongemma", "gigachat3", "granite4", "hermes", "internlm", "jamba", "kimi_k2", "lfm2"),
    *("longcat", "minicpm5", "qwen3_json", "step3"),
)
_SHOWN = ("gemma4", "granite", "mimo", "minimax_m2", "qwen3_coder", "qwen3_xml", "seed_oss", "step3p5", "step5")
_NOT_SHOWN = (
    *("deepseek_v3", "deepseek_v31", "dots", "ernie45", "granite-20b-fc", "hunyuan_a13b", "llama3_json"),
    *("llama4_json", "llama4_pythonic", "minimax_m3", "olmo3", "phi4_mini_json", "pythonic", "xlam"),
)
# Reasoning parsers that do, and those that do not.
_SHOWN_WITH_THOUGHTS = (
    *("gemma4", "glm45", "glm47", "granite_thinking_parser", "kimi_k2", "mimo", "minicpmv", "minimax_m2"),
    *("nemotron_v3", "qwen3", "seed_oss", "step3p5"),
)
_NOT_SHOWN_WITH_THOUGHTS = (
    *("deepseek_r1", "deepseek_v3", "ernie45", "granite", "holo2", "hunyuan_a13b", "minimax_m2_append_think"),
    *("minimax_m3", "olmo3", "step3", "step5"),
)

TOOL_PARSERS = frozenset((*_SHOWN_WITH_TOOLS, *_SHOWN, *_NOT_SHOWN))
REASONING_PARSERS = frozenset((*_SHOWN_WITH_THOUGHTS, *_NOT_SHOWN_WITH_THOUGHTS))


class Tools:
    """A tool parser, by its name at the workers."""

    def __init__(self, name: str) -> None:
        self._name = name

    def shows_special_tokens(self, fields: ChatFields) -> bool:
        """Asked only where a parser runs."""
        calls = bool(fields.tools) and fields.tool_choice != "none"
        return self._name in _SHOWN or (calls and self._name in _SHOWN_WITH_TOOLS)

    def structure(self, fields: ChatFields, asked: Json | None) -> Json | None:
        """Return what constrains the output; ``asked`` is what the client constrained itself.

        Raises:
            BadRequest: the calls need a grammar that is not known here.
        """
        tools = fields.tools
        if not tools or fields.tool_choice in ("none", None):
            return asked
        auto = fields.tool_choice == "auto"
        strict = any(tool.function.strict is True for tool in tools)
        one = fields.parallel_tool_calls is False
        if auto and not strict and (asked is not None or not one):
            return asked
        if auto and asked is not None:
            raise BadRequest(NEEDS_SERVICE.format("a structured output beside strict tools"), param="response_format")
        if self._name != "hermes":
            raise BadRequest(
                NEEDS_SERVICE.format(f"a tool call that is forced, strict or single, with {self._name},"), param="tools"
            )
        return {"structural_tag": json.dumps({"type": "structural_tag", "format": hermes_format(fields, tools)})}


_BEGIN, _END = "<tool_call>", "</tool_call>"


def hermes_format(fields: ChatFields, tools: Sequence[Tool]) -> Json:
    """Return the grammar of ``<tool_call>{"name": .., "arguments": ..}</tool_call>``."""
    choice, single = fields.tool_choice, fields.parallel_tool_calls is False
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    tags = [_hermes_tag(tool.function, gap) for tool in tools for gap in ("\n", "")]
    if choice == "auto":
        return {
            "type": "triggered_tags",
            "triggers": [_BEGIN],
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


def _hermes_tag(function: Function, gap: str) -> Json:
    schema: Any = function.parameters if function.strict and function.parameters is not None else True
    return {
        "type": "tag",
        "begin": f'{_BEGIN}{gap}{{"name": "{function.name}", "arguments": ',
        "content": {
            "type": "json_schema",
            "json_schema": schema,
            "style": "json",
            "any_order": False,
            "max_whitespace_cnt": None,
            "excludes": [],
        },
        "end": f"}}{gap}{_END}",
    }


class Reasoning:
    """A reasoning parser, by its name at the workers."""

    def __init__(self, name: str, id_of: Callable[[str], int | None]) -> None:
        self.shows_special_tokens = name in _SHOWN_WITH_THOUGHTS
        self._qwen3 = Qwen3(id_of) if name == "qwen3" else None

    def ended(self, token_ids: Sequence[int], template_kwargs: Json) -> bool | None:
        """Say whether the prompt leaves the model outside of a thought; None leaves it to the worker to look."""
        return None if self._qwen3 is None else self._qwen3.ended(token_ids, template_kwargs)


class Qwen3:
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


@dataclass(frozen=True, slots=True)
class Parsers:
    """A deployment's parsers; None where its workers have none of that kind."""

    tools: Tools | None = None
    reasoning: Reasoning | None = None

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
        shown = (self.reasoning is not None and self.reasoning.shows_special_tokens) or (
            self.tools is not None and self.tools.shows_special_tokens(fields)
        )
        structure = asked if self.tools is None else self.tools.structure(fields, asked)
        return Adjusted(structure, False if shown else None)

    def reasoning_ended(self, fields: ChatFields, token_ids: Sequence[int], template_kwargs: Json) -> bool | None:
        """Return whether grammars apply from the first token on; None lets the worker find out."""
        if not fields.include_reasoning:
            return True
        return None if self.reasoning is None else self.reasoning.ended(token_ids, template_kwargs)


def _without_parser(fields: ChatFields) -> str:
    choice = fields.tool_choice
    if choice == "auto":
        return '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
    said = f'function "{choice.function.name}"' if isinstance(choice, NamedTool) else f'"{choice}"'
    return f"tool_choice={said} requires --tool-call-parser to be set"
