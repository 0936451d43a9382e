"""The grammars that a request asks for, as the engine's ``structured_outputs``.

Source: recordings ``render/render_chat_{json,tools}_*``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_NO_STRUCTURE: dict[str, Any] = {
    "json": None,
    "regex": None,
    "choice": None,
    "grammar": None,
    "json_object": None,
    "disable_any_whitespace": False,
    "disable_additional_properties": False,
    "whitespace_pattern": None,
    "structural_tag": None,
    "_backend": None,
    "_backend_was_auto": False,
}


def structured_outputs(body: Mapping[str, Any], tag: str | None) -> dict[str, Any] | None:
    wanted = dict(body.get("structured_outputs") or {})
    form = body.get("response_format") or {}
    if form.get("type") == "json_object":
        wanted["json_object"] = True
    elif form.get("type") == "json_schema":
        wanted["json"] = form["json_schema"].get("schema")
    if tag is not None:
        wanted["structural_tag"] = tag
    return {**_NO_STRUCTURE, **wanted} if wanted else None


def structural_tag(tools: list[Any] | None, choice: Any) -> str | None:
    """Return the grammar of a forced tool call as the hermes parser writes it."""
    named = choice["function"]["name"] if isinstance(choice, dict) else None
    if not tools or (named is None and choice != "required"):
        return None
    tags = []
    for tool in tools:
        function = tool["function"]
        if named not in (None, function["name"]):
            continue
        schema = function.get("parameters", True) if function.get("strict") else True
        for gap in ("\n", ""):
            tags.append(
                {
                    "type": "tag",
                    "begin": f'<tool_call>{gap}{{"name": "{function["name"]}", "arguments": ',
                    "content": {
                        "type": "json_schema",
                        "json_schema": schema,
                        "style": "json",
                        "any_order": False,
                        "max_whitespace_cnt": None,
                        "excludes": [],
                    },
                    "end": f"}}{gap}</tool_call>",
                }
            )
    form = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": "",
        "at_least_one": True,
        "stop_after_first": named is not None,
    }
    return json.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False)
