"""A stream put together is the whole answer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from coordinator.sim import SimFleet

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASKED = {
    "emoji": {"messages": [{"role": "user", "content": "Send me some emoji."}]},
    "japanese": {"messages": [{"role": "user", "content": "Say hello in Japanese."}]},
    "call": {"messages": [{"role": "user", "content": "What is the weather in 東京?"}], "tools": [WEATHER]},
    "two_calls": {
        "messages": [{"role": "user", "content": "Compare the weather in Quito and Lagos."}],
        "tools": [WEATHER],
    },
    "required": {
        "messages": [{"role": "user", "content": "Say hello."}],
        "tools": [WEATHER],
        "tool_choice": "required",
    },
    "named": {
        "messages": [{"role": "user", "content": "Say hello."}],
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
    },
    "unused_tools": {
        "messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
        "tools": [WEATHER],
        "tool_choice": "none",
    },
    "escapes": {"messages": [{"role": "user", "content": "Escape test."}]},
    "nothing": {"messages": [{"role": "user", "content": "Say nothing."}]},
}
OPTIONS = {
    "plain": {},
    "no_thinking": {"chat_template_kwargs": {"enable_thinking": False}},
    "hidden": {"include_reasoning": False},
    "cut": {"max_tokens": 9},
    "stop": {"stop": ["o", "は世"]},
    "stop_shown": {"stop": ["lo", "</tool"], "include_stop_str_in_output": True},
    "n2": {"n": 2, "temperature": 0.8},
    "logprobs": {"logprobs": True, "top_logprobs": 2, "temperature": 0.8},
    "ids": {"return_token_ids": True},
    "min_tokens": {"min_tokens": 60, "max_tokens": 90},
    "past_the_end": {"ignore_eos": True, "max_tokens": 50},
    "coarse": {"stream_interval": 5},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("asked", ASKED)
async def test_a_chat_stream_put_together_is_the_whole_answer(
    asked: str, option: str, fleet: SimFleet, client: Any
) -> None:
    request = {"temperature": 0, **ASKED[asked], **OPTIONS[option], "request_id": "same"}
    whole = (await client.post(fleet.decode, "/v1/chat/completions", request)).body
    streamed = {**request, "stream": True, "stream_options": {"include_usage": True}}
    got = await client.post(fleet.decode, "/v1/chat/completions", streamed)
    assert got.events[-1] == "[DONE]"
    choices, usage = together(got.events[:-1])
    assert usage == {key: value for key, value in whole["usage"].items() if value is not None}
    for choice, made in zip(whole["choices"], choices, strict=True):
        message = choice["message"]
        if asked in ("call", "two_calls", "required", "named") and choice["finish_reason"] == "length":
            continue  # a cut call is read differently: test_parsers.py
        if option.startswith("stop") and "<tool_call>" in str(message["content"]):
            continue
        assert made["reasoning"] == (message["reasoning"] or "")
        assert made["content"] == (message["content"] or "")
        assert made["calls"] == [call["function"] for call in message.get("tool_calls", [])]
        assert made["finish_reason"] == choice["finish_reason"]
        assert made["stop_reason"] == choice["stop_reason"]
        if option == "logprobs":
            assert made["logprobs"] == choice["logprobs"]["content"]
        if option == "ids":
            assert made["token_ids"] == choice["token_ids"]


def together(events: list[Any]) -> tuple[list[dict[str, Any]], Any]:
    """Put a chat stream together by index."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for event in events:
        usage = event.get("usage", usage)
        for choice in event["choices"]:
            made = choices.setdefault(
                choice["index"],
                {"role": "", "reasoning": "", "content": "", "calls": [], "logprobs": [], "token_ids": []},
            )
            delta = choice["delta"]
            for key in ("role", "reasoning", "content"):
                made[key] += delta.get(key) or ""
            for entry in delta.get("tool_calls", []):
                function = entry["function"]
                if "id" in entry:
                    made["calls"].append({"name": function["name"], "arguments": ""})
                made["calls"][entry["index"]]["arguments"] += function.get("arguments", "")
            made["logprobs"] += (choice["logprobs"] or {}).get("content", [])
            made["token_ids"] += choice.get("token_ids") or []
            for key in ("finish_reason", "stop_reason"):
                made[key] = choice.get(key)
    assert all(made["role"] == "assistant" for made in choices.values())
    return [choices[index] for index in sorted(choices)], usage


@pytest.mark.parametrize("mode", ["tokens", "text"])
@pytest.mark.parametrize("option", [name for name in OPTIONS if name != "hidden"])
async def test_a_generate_stream_put_together_is_the_whole_answer(
    option: str, mode: str, fleet: SimFleet, client: Any
) -> None:
    request = {"temperature": 0, "request_id": "same", **ASKED["emoji"], **OPTIONS[option]}
    rendered = (await client.post(fleet.render, "/v1/chat/completions/render", request)).body
    body = {**rendered, "output_mode": mode}
    whole = (await client.post(fleet.decode, "/inference/v1/generate", body)).body
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    got = await client.post(fleet.decode, "/inference/v1/generate", body)
    assert got.events[-1] == "[DONE]"
    *chunks, usage = got.events[:-1]
    assert usage["usage"] == {key: value for key, value in whole["usage"].items() if value is not None}
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert [id for part in parts for id in part["token_ids"]] == choice["token_ids"]
        assert "".join(part.get("text", "") for part in parts) == choice.get("text", "")
        last = parts[-1]
        for key in ("finish_reason", "stop_reason", "weight_versions"):
            assert last[key] == choice[key]
        if choice["logprobs"] is not None:
            content = [entry for part in parts for entry in part["logprobs"]["content"]]
            assert content == choice["logprobs"]["content"]


async def test_text_lags_the_tokens_while_a_stop_string_may_be_coming(fleet: SimFleet, client: Any) -> None:
    rendered = await client.post(
        fleet.render,
        "/v1/chat/completions/render",
        {**ASKED["emoji"], "stop": ["never said, and long"], "chat_template_kwargs": {"enable_thinking": False}},
    )
    body = {**rendered.body, "output_mode": "text", "stream": True}
    got = await client.post(fleet.decode, "/inference/v1/generate", body)
    parts = [chunk["choices"][0] for chunk in got.events[:-1]]
    assert parts[0]["text"] == ""
    assert parts[0]["token_ids"]
    assert len(parts[-1]["text"]) >= len("never said, and long") - 1
    assert "".join(part["text"] for part in parts) == "Here you go: 🙂 🚀 🎉 👩\u200d💻 🇫🇷 done."


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", ["Repeat: é 🙂 x", ["Say hello.", "Just say OK."], [1, 2, 3]])
async def test_a_completion_stream_put_together_is_the_whole_answer(
    prompt: Any, echo: bool, fleet: SimFleet, client: Any
) -> None:
    request = {"prompt": prompt, "max_tokens": 12, "logprobs": 2, "n": 2, "echo": echo, "request_id": "same"}
    whole = (await client.post(fleet.decode, "/v1/completions", request)).body
    got = await client.post(fleet.decode, "/v1/completions", {**request, "stream": True})
    for choice in whole["choices"]:
        parts = [part for event in got.events[:-1] for part in event["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        for key in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
            assert [item for part in parts for item in part["logprobs"][key]] == choice["logprobs"][key]


@pytest.mark.parametrize("asked", ["emoji", "call", "two_calls", "named", "nothing"])
@pytest.mark.parametrize("option", ["plain", "no_thinking"])
async def test_a_messages_stream_put_together_is_the_whole_answer(
    asked: str, option: str, fleet: SimFleet, client: Any
) -> None:
    request = {"max_tokens": 100, "temperature": 0, **OPTIONS[option], "messages": ASKED[asked]["messages"]}
    if "tools" in ASKED[asked]:
        function: Any = WEATHER["function"]
        request["tools"] = [{"name": function["name"], "input_schema": function["parameters"]}]
    if asked == "named":
        request["tool_choice"] = {"type": "tool", "name": "get_weather"}
    whole = (await client.post(fleet.decode, "/v1/messages", request)).body
    got = await client.post(fleet.decode, "/v1/messages", {**request, "stream": True})
    assert got.names == [event["type"] for event in got.events]
    blocks: list[dict[str, Any]] = []
    for event in got.events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            for key in ("thinking", "text", "signature"):
                if key in delta:
                    block[key] = block.get(key, "") + delta[key]
            block["json"] += delta.get("partial_json", "")
    for block in blocks:
        if encoded := block.pop("json"):
            block["input"] = json.loads(encoded)
    assert unsigned(blocks) == unsigned([block for block in whole["content"] if block.get("text") != ""])
    ending = got.events[-2]
    assert ending["delta"]["stop_reason"] == whole["stop_reason"]
    assert ending["usage"] == whole["usage"]


def unsigned(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in block.items() if key not in ("signature", "id")} for block in blocks]


@pytest.mark.parametrize("asked", ["emoji", "call", "two_calls", "nothing"])
@pytest.mark.parametrize("option", ["plain", "no_thinking", "cut"])
async def test_a_responses_stream_ends_with_the_whole_answer(
    asked: str, option: str, fleet: SimFleet, client: Any
) -> None:
    options = {"max_output_tokens": 9} if option == "cut" else OPTIONS[option]
    request: dict[str, Any] = {"temperature": 0, **options, "input": ASKED[asked]["messages"], "request_id": "resp_1"}
    if "tools" in ASKED[asked]:
        function: Any = WEATHER["function"]
        request["tools"] = [{"type": "function", **function}]
    whole = (await client.post(fleet.decode, "/v1/responses", request)).body
    got = await client.post(fleet.decode, "/v1/responses", {**request, "stream": True})
    assert got.names == [event["type"] for event in got.events]
    assert [event["sequence_number"] for event in got.events] == list(range(len(got.events)))
    last = got.events[-1]["response"]
    assert [unmarked(item) for item in last["output"]] == [unmarked(item) for item in whole["output"]]
    assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert last["status"] == whole["status"]
    done = [event["item"] for event in got.events if event["type"] == "response.output_item.done"]
    assert done == last["output"]
    for item in done:
        deltas = [e["delta"] for e in got.events if e.get("item_id") == item["id"] and "delta" in e]
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(deltas) == text


def unmarked(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in ("id", "call_id", "status")}
