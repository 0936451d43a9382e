"""The ``parse_context`` that a worker with parsers needs for ``derender``, where render gave none.

vLLM 0.33's render makes one for chat and messages. An older renderer, the Rust one, and the responses route make none;
without one such a worker answers 400.

Source: vLLM 0.33 ``ParseContext``; every field is optional, and an unknown one is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from envelope import responses
from envelope.formats import Format

if TYPE_CHECKING:
    from envelope.json_codec import Json

_ANTHROPIC_CHOICES = {"any": "required"}


def with_parse_context(rendered: Json, api: Format, body: Json) -> Json:
    """Return the generate request with a parse context; render's own is never touched."""
    if rendered.get("parse_context") is not None or api is Format.COMPLETIONS:
        return rendered
    make = {Format.RESPONSES: responses.parse_context, Format.MESSAGES: _from_messages}.get(api, _from_chat)
    return {**rendered, "parse_context": make(body, rendered)}


def _from_chat(body: Json, rendered: Json) -> Json:
    tools = body.get("tools") or None
    return _context(
        body,
        rendered,
        tools=tools,
        choice=body.get("tool_choice") or ("auto" if tools else "none"),
        parallel=body.get("parallel_tool_calls") is not False,
        calls=sum(len(_objects(message.get("tool_calls"))) for message in _objects(body.get("messages"))),
    )


def _from_messages(body: Json, rendered: Json) -> Json:
    """Anthropic's tools have their schema in ``input_schema``, and its tool_choice is always an object."""
    tools = [{"type": "function", "function": _function(tool)} for tool in _objects(body.get("tools"))] or None
    given = body.get("tool_choice")
    choice: Json = given if isinstance(given, dict) else {}
    kind = choice.get("type") or ("auto" if tools else None)
    named = {"type": "function", "function": {"name": choice.get("name")}}
    blocks = [block for message in _objects(body.get("messages")) for block in _objects(message.get("content"))]
    return _context(
        body,
        rendered,
        tools=tools,
        choice=named if kind == "tool" else _ANTHROPIC_CHOICES.get(str(kind), kind),
        parallel=not choice.get("disable_parallel_tool_use"),
        calls=sum(block.get("type") == "tool_use" for block in blocks),
    )


def _function(tool: Json) -> Json:
    names = {"name": "name", "description": "description", "parameters": "input_schema", "strict": "strict"}
    return {ours: tool[theirs] for ours, theirs in names.items() if tool.get(theirs) is not None}


def _context(body: Json, rendered: Json, *, tools: Any, choice: Any, parallel: bool, calls: int) -> Json:
    """Return a context; ``calls`` is how many the conversation holds: some models' parsers number on from there."""
    template = (rendered.get("reasoning_parser_kwargs") or {}).get("chat_template_kwargs")
    return {
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
        "include_reasoning": body.get("include_reasoning") is not False,
        "chat_template_kwargs": template or body.get("chat_template_kwargs") or {},
        "history_tool_call_cnt": calls,
    }


def _objects(items: Any) -> list[Json]:
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
