"""The ``parse_context`` that a worker with parsers needs for ``derender``, where render gave none.

vLLM 0.33's render makes one for chat and messages. An older renderer, the Rust one, and the responses route make none;
without one such a worker answers 400.

Source: vLLM 0.33 ``ParseContext``; every field is optional, and an unknown one is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from envelope import responses
from envelope.formats import Format

if TYPE_CHECKING:
    from envelope.json_codec import Json


def with_parse_context(rendered: Json, api: Format, body: Json) -> Json:
    """Return the generate request with a parse context; render's own is never touched."""
    if rendered.get("parse_context") is not None or api is Format.COMPLETIONS:
        return rendered
    made = responses.parse_context(body, rendered) if api is Format.RESPONSES else _from_chat(body, rendered)
    return {**rendered, "parse_context": made}


def _from_chat(body: Json, rendered: Json) -> Json:
    tools = body.get("tools") or None
    template = (rendered.get("reasoning_parser_kwargs") or {}).get("chat_template_kwargs")
    return {
        "tools": tools,
        "tool_choice": body.get("tool_choice") or ("auto" if tools else "none"),
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "include_reasoning": body.get("include_reasoning") is not False,
        "chat_template_kwargs": template or body.get("chat_template_kwargs") or {},
        "history_tool_call_cnt": 0,
    }
