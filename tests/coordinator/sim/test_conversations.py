"""The simulated model says what the tiny real model of the end-to-end tests was trained to say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from coordinator.sim import SimFleet

DATA = Path(__file__).parents[2] / "data" / "tiny-model" / "conversations.json"
UNKNOWN_PROMPT = "I am a tiny test model and I only know a few prompts."
CONVERSATIONS = [
    pytest.param(conversation, id=f"{number}-{conversation['request']['messages'][-1]['content'][:20]}")
    for number, conversation in enumerate(json.loads(DATA.read_text()))
    if conversation["expect"]["content"] != UNKNOWN_PROMPT
]


def stripped(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls") or []
    return {
        "reasoning": (message.get("reasoning") or "").strip(),
        "content": (message.get("content") or "").strip("\n"),
        "tool_calls": [
            {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])} for call in calls
        ],
    }


@pytest.mark.parametrize("conversation", CONVERSATIONS)
async def test_render_prefill_and_decode_give_the_known_answer(
    conversation: dict[str, Any], fleet: SimFleet, client: Any
) -> None:
    expect, ends = conversation["expect"], conversation["ends"]
    request = {**conversation["request"], "temperature": 0, **({} if ends else {"max_tokens": 60})}
    rendered = (await client.post(fleet.render, "/v1/chat/completions/render", request)).body
    prefill = {
        **rendered,
        "sampling_params": {"max_tokens": 1, "temperature": 0, "ignore_eos": True},
        "kv_transfer_params": {"do_remote_decode": True},
    }
    handed = (await client.post(fleet.prefill, "/inference/v1/generate", prefill)).body["kv_transfer_params"]
    decode = {**rendered, "output_mode": "derender", "kv_transfer_params": handed}
    got = (await client.post(fleet.decode, "/inference/v1/generate", decode)).body["choices"][0]
    want = stripped(expect | {"tool_calls": []}) | {"tool_calls": expect["tool_calls"]}
    if ends:
        assert stripped(got["message"]) == want
        assert got["finish_reason"] == ("tool_calls" if expect["tool_calls"] else "stop")
    else:
        assert want["content"].startswith(stripped(got["message"])["content"])
        assert got["finish_reason"] == "length"
    assert fleet.store.violations == []
    assert fleet.store.unread == {}


@pytest.mark.parametrize("thinking", [True, False])
async def test_an_unknown_prompt_is_given_back(thinking: bool, fleet: SimFleet, client: Any) -> None:
    request = {
        "messages": [{"role": "user", "content": "Is there a ñandú in Oslo?"}],
        "chat_template_kwargs": {"enable_thinking": thinking},
    }
    got = await client.post(fleet.decode, "/v1/chat/completions", request)
    message = got.body["choices"][0]["message"]
    assert "simulated model" in message["content"]
    assert "Is there a ñandú in Oslo?" in message["content"]
    assert (message["reasoning"] is not None) is thinking
