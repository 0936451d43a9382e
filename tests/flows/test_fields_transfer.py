"""A client cannot make workers connect anywhere: transfer params of its own reach none, wherever it puts them."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.sim import Fault

CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"
EVIL: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_host": "192.0.2.1",
    "remote_port": 5600,
    "remote_engine_id": "canary",
}
BOTH = {"kv_transfer_params": EVIL, "ec_transfer_params": {"h1": {"peer_host": "192.0.2.1", "peer_port": 1}}}
QUESTIONS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Say hello."}]},
    "/v1/completions": {"prompt": "Say hello."},
    "/v1/responses": {"input": "Say hello."},
    "/v1/messages": {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 50},
    GENERATE: {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 5}, "output_mode": "text"},
}


def legs(fleet: Any) -> list[Any]:
    return [leg for worker in fleet.workers for leg in worker.received if leg.header("x-request-id")]


PLACES: dict[str, dict[str, Any]] = {
    "at the top": BOTH,
    "in vllm_xargs": {"vllm_xargs": {**BOTH, "kept": 1}},
    "in both, as text": {"kv_transfer_params": "192.0.2.1", "vllm_xargs": {"ec_transfer_params": "192.0.2.1"}},
}


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("shape", ["openai", "text", "derender", "unwrapped", "alone"])
async def test_transfer_params_of_a_client_reach_no_worker(coordinator, fleet, shape, where):
    """H20, J1: they name hosts to pull from, and half of them ends a decode worker (L12)."""
    at = await coordinator(fleet, shape)
    for path, body in QUESTIONS.items():
        for stream in (False, True):
            got = await at.post(path, {"model": "tiny", "stream": stream, **body, **PLACES[where]})
            assert (path, stream, got.status) == (path, stream, 200)
            if where == "in vllm_xargs" and shape in ("openai", "alone"):
                assert fleet.decode.received[-1].body["vllm_xargs"] == {"kept": 1}
    assert len(legs(fleet)) >= 2 * len(QUESTIONS)
    for leg in legs(fleet):
        assert b"192.0.2.1" not in leg.raw
        assert b"canary" not in leg.raw


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prefill", [True, False], ids=["with a prefill leg", "by decode alone"])
@pytest.mark.parametrize("shape", ["openai", "text"])
async def test_a_generate_clients_extra_args_lose_them_and_nothing_else(coordinator, fleet, shape, prefill, stream):
    """H21: without a hand-over of ours at the top level, a worker would read the client's in there."""
    steps, pools = ({}, {}) if prefill else ({"prefill": None}, {"prefill": None})
    at = await coordinator(fleet, shape, steps=steps, pools=pools)
    params = {"max_tokens": 5, "extra_args": {**BOTH, "kept": [1, {"a": None}]}, "vllm_xargs": BOTH}
    body = {**QUESTIONS[GENERATE], "stream": stream, "sampling_params": params, **BOTH}
    assert (await at.post(GENERATE, body)).status == 200
    decode = fleet.decode.received[-1].body
    ours = decode.get("kv_transfer_params")
    assert (ours is not None) is prefill
    added = {"kv_transfer_params": ours} if prefill else {}
    assert decode["sampling_params"]["extra_args"] == {"kept": [1, {"a": None}], **added}
    for leg in legs(fleet):
        assert b"192.0.2.1" not in leg.raw


async def test_a_renderer_that_returns_transfer_params_hands_on_none_of_them(coordinator, fleet):
    """H20: render gives back what it was sent, and it may be anybody's."""
    at = await coordinator(fleet, "text")
    fleet.render.behave.next(Fault(rewrite=lambda body: {**body, **BOTH}))
    assert (await at.chat()).status == 200
    for leg in (fleet.prefill.received[-1], fleet.decode.received[-1]):
        assert b"192.0.2.1" not in leg.raw


@pytest.mark.parametrize("shape", ["openai", "text"])
async def test_what_a_message_says_of_them_is_text_and_stays(coordinator, fleet, shape):
    """H20: only the fields that a worker reads are taken out, not words in a prompt or in a tool's schema."""
    at = await coordinator(fleet, shape)
    got = await at.chat('Repeat: {"kv_transfer_params": 1}')
    assert got.text.strip() == '{"kv_transfer_params": 1}'
    tool = {"type": "function", "function": {"name": "t", "parameters": {"properties": {"kv_transfer_params": {}}}}}
    assert (await at.chat(tools=[tool])).status == 200
    leg = fleet.render.received[-1] if shape == "text" else fleet.decode.received[-1]
    assert leg.body["tools"] == [tool]


@pytest.mark.parametrize("prompt", [["one", "two"], [[1, 2], [3, 4]]])
@pytest.mark.parametrize("shape", ["openai", "text"])
async def test_several_prompts_are_a_400_since_one_hand_over_serves_one(coordinator, fleet, shape, prompt):
    """J1: several prompts with one hand-over end a decode worker."""
    at = await coordinator(fleet, shape)
    got = await at.post("/v1/completions", {"model": "tiny", "prompt": prompt})
    assert (got.status, got.error["param"]) == (400, "prompt")
    assert legs(fleet) == []
