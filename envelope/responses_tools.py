"""Tools of a ``/v1/responses`` request: as vLLM echoes them, as its parsers take them, as calls name them.

The model is shown plain functions: a tool of a namespace as ``<namespace>__<name>``, a custom tool as a
function of one string. What it calls is named back before a client sees it. Tools of other types (web search,
...) are never shown.

Source: vLLM 0.33 ``tool_parsers/utils.py``; the order of keys is that of the OpenAI SDK's models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from envelope.json_codec import JSONDecodeError, loads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from envelope.json_codec import Json

CUSTOM_INPUT = "input"

_SEPARATOR = "__"

_KEYS: dict[str, tuple[str, ...]] = {
    "function": (
        *("name", "parameters", "strict", "type", "allowed_callers", "async", "defer_loading"),
        *("description", "output_schema"),
    ),
    "custom": ("name", "type", "allowed_callers", "async", "defer_loading", "description", "format"),
    "namespace": ("description", "name", "tools", "type"),
}
_KEYS_IN_NAMESPACE = {
    **_KEYS,
    "function": (
        *("name", "type", "allowed_callers", "async", "defer_loading"),
        *("description", "output_schema", "parameters", "strict"),
    ),
}

_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}


def filled(value: Json, keys: tuple[str, ...]) -> Json:
    """Return a copy with these keys first and in this order, null where absent; other keys follow."""
    return {key: value.get(key) for key in keys} | value


def echoed_tools(body: Json) -> list[Any]:
    """Return the client's tools as the response shows them: unset keys are null.

    Tools of a type that the model is never shown are echoed as they were sent, without their null keys.
    """
    return [_echoed(tool, _KEYS) for tool in body.get("tools") or ()]


def echoed_choice(body: Json) -> Any:
    """Return the client's tool_choice as the response shows it; ``none`` when there is nothing to choose."""
    choice = body.get("tool_choice") or "auto"
    if not body.get("tools"):
        return "none" if choice == "auto" else choice
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
        return {"name": _flat_name(body, choice.get("name")), "type": choice["type"]}
    return choice


def chat_tools(body: Json) -> list[Json] | None:
    """Return the functions that the model is shown, as chat's ``tools``; None when there are none."""
    return [{"type": "function", "function": function} for _, function in _functions(body)] or None


def chat_choice(body: Json) -> Any:
    """Return tool_choice as chat has it."""
    choice = echoed_choice(body)
    if not isinstance(choice, dict):
        return choice
    if "name" in choice and choice.get("type") in ("function", "custom"):
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice.get("mode") or "auto"  # allowed_tools


def called(body: Json, name: str) -> tuple[str, str, str | None]:
    """Return (type, name, namespace) of the tool behind the function name that the model called."""
    for tool in _tools(body):
        if tool.get("type") == "custom" and tool.get("name") == name:
            return "custom", name, None
        if tool.get("type") == "namespace":
            for inner in _inner(tool):
                if name == f"{tool.get('name')}{_SEPARATOR}{inner['name']}":
                    return "function", inner["name"], tool["name"]
    return "function", name, None


def custom_input(arguments: str) -> str:
    """Return the text that a custom tool is called with; arguments that do not hold it are that text."""
    try:
        value = loads(arguments)
    except JSONDecodeError:
        return arguments
    text = value.get(CUSTOM_INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _echoed(tool: Any, keys: dict[str, tuple[str, ...]]) -> Any:
    if not isinstance(tool, dict) or str(tool.get("type")) not in keys:
        return tool
    full = filled(tool, keys[tool["type"]])
    if isinstance(full.get("tools"), list):
        full["tools"] = [_echoed(inner, _KEYS_IN_NAMESPACE) for inner in full["tools"]]
    return full


def _functions(body: Json) -> Iterator[tuple[str, Json]]:
    """Yield (own name, chat function) of every tool that the model is shown, in the client's order."""
    for tool in _tools(body):
        name = str(tool.get("name"))
        if tool.get("type") == "function":
            yield name, _function(name, tool)
        elif tool.get("type") == "custom":
            yield name, _function(name, {**tool, "parameters": _CUSTOM_PARAMETERS})
        elif tool.get("type") == "namespace":
            for inner in _inner(tool):
                yield inner["name"], _function(f"{name}{_SEPARATOR}{inner['name']}", inner)


def _function(name: str, tool: Json) -> Json:
    keys = ("description", "parameters", "strict")
    return {"name": name, **{key: tool[key] for key in keys if tool.get(key) is not None}}


def _flat_name(body: Json, name: Any) -> Any:
    """Return the name under which the model knows a tool that a client chose by its own name."""
    flat = [function["name"] for own, function in _functions(body) if name in (own, function["name"])]
    return name if name in flat or not flat else flat[0]


def _tools(body: Json) -> list[Json]:
    return [tool for tool in body.get("tools") or () if isinstance(tool, dict)]


def _inner(namespace: Json) -> list[Json]:
    """Return the functions of a namespace; its custom tools are not shown to the model."""
    tools = namespace.get("tools") or ()
    return [tool for tool in tools if isinstance(tool, dict) and tool.get("type") == "function" and tool.get("name")]
