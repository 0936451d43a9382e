"""Responses and messages requests, read as the chat requests that they become inside vLLM.

Source: recordings ``render/render_{responses,messages}_*``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from coordinator.sim.prompts import Prepared, check_common, prepare_conversation
from coordinator.sim.refusals import Refusal, value_error
from coordinator.sim.schema import Schema

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from coordinator.sim.settings import Settings


def prepare_responses(body: Mapping[str, Any], settings: Settings) -> Prepared:
    """
    Raises:
        Refusal: vLLM's responses route would refuse the request.
    """
    schema = Schema(body)
    schema.required("input")
    schema.integers("max_output_tokens", "top_logprobs")
    schema.text_or_objects("input")
    schema.objects_in("tools")
    schema.objects("text", "reasoning")
    schema.done()
    check_common(body, settings)
    instructions = body.get("instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    tools = [_chat_tool(tool) for tool in body.get("tools") or ()] or None
    prepared = prepare_conversation(
        _with_format(body),
        settings,
        messages=[*system, *_items(body["input"])],
        tools=tools,
        choice=_responses_choice(body, tools),
        max_tokens=_clamped(body.get("max_output_tokens"), settings),
        logprobs=body.get("top_logprobs"),
        effort=(body.get("reasoning") or {}).get("effort"),
    )
    prepared.sampling.extra_args = prepared.sampling.extra_args or {}
    return prepared


def _clamped(max_tokens: int | None, settings: Settings) -> int | None:
    return None if max_tokens is None else min(max_tokens, settings.max_model_len)


def _with_format(body: Mapping[str, Any]) -> dict[str, Any]:
    form = (body.get("text") or {}).get("format") or {}
    if form.get("type") != "json_schema":
        return {**body, "response_format": form}
    return {**body, "response_format": {"type": "json_schema", "json_schema": form}}


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {key: tool[key] for key in ("name", "description", "strict", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _responses_choice(body: Mapping[str, Any], tools: list[Any] | None) -> Any:
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice or ("auto" if tools else "none")


def _items(given: Any) -> Iterator[dict[str, Any]]:
    """Turn responses input items into chat messages; thoughts of earlier turns are left out."""
    if isinstance(given, str):
        yield {"role": "user", "content": given}
        return
    for item in given:
        kind = item.get("type", "message")
        if kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            yield {"role": "assistant", "content": "", "tool_calls": [call]}
        elif kind == "function_call_output":
            yield {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
        elif kind == "message":
            yield {"role": item["role"], "content": item["content"]}


def prepare_messages(body: Mapping[str, Any], settings: Settings) -> Prepared:
    """
    Raises:
        Refusal: vLLM's messages route would refuse the request.
    """
    schema = Schema(body)
    schema.required("messages", "max_tokens")
    schema.objects_in("messages", "tools")
    schema.text_or_objects("system")
    schema.lists("stop_sequences")
    schema.objects("thinking", "tool_choice")
    schema.integers("max_tokens")
    schema.done()
    for at, message in enumerate(body["messages"]):
        for name in ("role", "content"):
            if name not in message:
                schema.wrong(f"body.messages.{at}.{name}", "missing", "Field required", message)
    schema.done()
    as_chat = {key: value for key, value in body.items() if key not in ("stream_options", "tool_choice")}
    as_chat["stop"] = body.get("stop_sequences")
    check_common(as_chat, settings)
    _check_thinking(body)
    system = [{"role": "system", "content": _text(body["system"])}] if body.get("system") else []
    tools = [_anthropic_tool(tool) for tool in body.get("tools") or ()] or None
    turns = [turn for message in body["messages"] for turn in _turns(message)]
    return prepare_conversation(
        as_chat,
        settings,
        messages=[*system, *turns],
        tools=tools,
        choice=_messages_choice(body.get("tool_choice"), tools),
        max_tokens=_clamped(body["max_tokens"], settings),
        logprobs=None,
    )


def _check_thinking(body: Mapping[str, Any]) -> None:
    thinking = body.get("thinking") or {}
    if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
        return
    if thinking.get("type") == "enabled" and thinking.get("budget_tokens", 0) >= body["max_tokens"]:
        raise value_error("`max_tokens` must be greater than `thinking.budget_tokens`.", param="max_tokens")


def _anthropic_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {key: tool[key] for key in ("name", "description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema")}}


def _messages_choice(choice: Mapping[str, Any] | None, tools: list[Any] | None) -> Any:
    if choice is None:
        return "auto" if tools else None
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return {"any": "required", "none": "none"}.get(str(kind), "auto")


def _turns(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Turn one Anthropic message into chat messages.

    Tool results come first, each as its own, and behind each its pictures as a message of the user. Blocks that
    vLLM does not know, documents among them, are left out without a word, as there.
    """
    content = message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    calls = []
    for block in blocks:
        if block["type"] == "tool_result":
            inside = block.get("content", "")
            parts = [] if isinstance(inside, str) else inside
            said = inside if isinstance(inside, str) else _text([part for part in parts if part["type"] == "text"])
            yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": said}
            if pictures := [_picture(part) for part in parts if part["type"] == "image"]:
                yield {"role": "user", "content": pictures}
        elif block["type"] == "tool_use":
            arguments = json.dumps(block["input"], ensure_ascii=False)
            function = {"name": block["name"], "arguments": arguments}
            calls.append({"id": block["id"], "type": "function", "function": function})
    parts = [block if block["type"] == "text" else _picture(block) for block in blocks if block["type"] in _SHOWN]
    if parts or calls:
        turn: dict[str, Any] = {"role": message["role"], "content": parts}
        yield {**turn, "tool_calls": calls} if calls else turn


_SHOWN = ("text", "image")


def _picture(block: Mapping[str, Any]) -> dict[str, Any]:
    source = block["source"]
    url = source.get("url") or f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _text(content: Any) -> str:
    """
    Raises:
        Refusal: there is something other than text, which the simulated model cannot read.
    """
    if isinstance(content, str):
        return content
    if not all("text" in part for part in content):
        raise Refusal("the simulated model reads text only")
    return "\n".join(part["text"] for part in content)
