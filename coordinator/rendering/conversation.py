"""A client's messages as a chat template is given them.

Content becomes one string, or a list of text parts, as the template wants it; the arguments of tool calls become
objects; a developer's message becomes a system message for templates that know no developers.

Source: vLLM 0.33 ``renderers/chat_utils/chat_message.py`` (``parse_chat_message_content``, ``_postprocess_messages``),
``renderers/hf.py`` (``_convert_developer_to_system``, ``_consolidate_system_messages``).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from envelope.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from envelope.json_codec import Json

NEEDS_SERVICE = "this deployment renders text in the coordinator; {} needs a render service (render.address)"

# The key of each kind of text part that holds its text.
_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
# An attribution header that Claude Code changes with every request: kept, it would spoil every prefix cache.
BILLING = "x-anthropic-billing-header"


def conversation(messages: list[Json], *, parts: bool, developers: bool) -> list[Json]:
    """Return the messages for a template.

    Args:
        parts: content is given as a list of parts.
        developers: the template knows developer messages.

    Raises:
        BadRequest: a message holds media, or has no shape that vLLM takes.
    """
    shown = [_message(message, f"messages[{at}]", parts=parts) for at, message in enumerate(messages)]
    if not developers and any(message["role"] == "developer" for message in shown):
        shown = _one_system([_as_system(message) for message in shown])
    return shown


def count_tool_calls(messages: list[Json]) -> int:
    """Return how many calls the conversation holds: some models' parsers number on from there."""
    calls = (message.get("tool_calls") for message in messages if message.get("role") == "assistant")
    return sum(len(some) for some in calls if isinstance(some, list))


def _message(message: Json, path: str, *, parts: bool) -> Json:
    role, content = message["role"], message.get("content")
    items: list[Any] = [content] if isinstance(content, str) else content or []
    if not isinstance(items, list):
        raise BadRequest(f"{path}.content must be a string or a list of parts", param=f"{path}.content")
    if role == "system":
        items = list(_without_billing(items))
    texts = [text for at, item in enumerate(items) if (text := _text(item, f"{path}.content[{at}]")) is not None]
    listed = [{"type": "text", "text": text} for text in texts]
    shown: Json = {"role": role, "content": listed if parts and role != "tool" else "\n".join(texts)}
    if role == "assistant":
        shown |= _assistant(message, path)
    elif role == "tool" and "tool_call_id" in message:
        shown["tool_call_id"] = message["tool_call_id"]
    shown |= {key: message[key] for key in ("name", "task") if isinstance(message.get(key), str)}
    if role == "developer":
        shown["tools"] = message.get("tools")
    return shown


def _text(item: Any, path: str) -> str | None:
    """Return a part's text; None for one that says nothing."""
    if isinstance(item, str):
        return item
    if not isinstance(item, dict):
        raise BadRequest(f"{path} must be a string or an object", param=path)
    kind = item.get("type")
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise BadRequest(f"{path}: " + NEEDS_SERVICE.format(f"a part of type {kind!r}"), param=path)
    text = item.get(_TEXT_PARTS[kind])
    if text is None and kind in ("text", "refusal"):
        return None
    if not isinstance(text, str):
        raise BadRequest(f"{path}.{_TEXT_PARTS[kind]} must be a string", param=f"{path}.{_TEXT_PARTS[kind]}")
    return text


def _without_billing(items: list[Any]) -> Iterator[Any]:
    for item in items:
        is_text = isinstance(item, dict) and item.get("type") == "text"
        text = item.get("text") if is_text else item
        if not isinstance(text, str) or not text.startswith(BILLING):
            yield item
        elif rest := text.partition("\n")[2]:
            yield {**item, "text": rest} if is_text else rest


def _assistant(message: Json, path: str) -> Json:
    shown: Json = {}
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise BadRequest(f"{path}.tool_calls must be a list", param=f"{path}.tool_calls")
    if calls:
        shown["tool_calls"] = [_tool_call(call) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None and not isinstance(reasoning, str):
        raise BadRequest(f"{path}.reasoning must be a string", param=f"{path}.reasoning")
    if reasoning is not None:
        shown |= {"reasoning": reasoning, "reasoning_content": reasoning}
    return shown


def _tool_call(call: Any) -> Json:
    if not isinstance(call, dict):
        raise BadRequest("assistant tool_calls entries must be objects.", param="tool_calls")
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, dict):
        raise BadRequest(
            "chat completions only support assistant tool_calls of type 'function'.", param="tool_calls"
        )
    shown = {key: function[key] for key in ("arguments", "name") if key in function}
    shown["arguments"] = _arguments(function.get("arguments"))
    return {key: {**call, "function": shown}[key] for key in ("id", "function", "type") if key in call}


def _arguments(given: Any) -> Json:
    """Return a call's arguments as an object: text that is none lies in the past, and must not end the conversation."""
    if isinstance(given, str) and given:
        try:
            given = json.loads(given)
        except ValueError:
            return {}
    return given if isinstance(given, dict) else {}


def _as_system(message: Json) -> Json:
    if message["role"] != "developer":
        return message
    return {key: value for key, value in message.items() if key != "tools"} | {"role": "system"}


def _one_system(messages: list[Json]) -> list[Json]:
    """Merge system messages into the first place, where some templates insist on the only one."""
    system = [message for message in messages if message["role"] == "system"]
    if len(system) == 1 and messages[0] is system[0]:
        return messages
    texts = [text for message in system if (text := _joined(message["content"]))]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _joined(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
