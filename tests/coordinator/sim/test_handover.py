"""A prefill leaves its blocks once, for one decode with the same prompt; everything else is a recorded breach."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from coordinator.sim import HandoverStore, Settings, SimFleet
from coordinator.sim.handover import BadHandover

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

GENERATE = "/inference/v1/generate"
PROMPT = list(range(3, 80))
CHAT = {"messages": [{"role": "user", "content": "Say hello."}], "temperature": 0, "max_tokens": 30}
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def prefill_body(**more: Any) -> dict[str, Any]:
    sampling = {"max_tokens": 1, "temperature": 0, "ignore_eos": True}
    return {"token_ids": PROMPT, "sampling_params": sampling, "kv_transfer_params": PREFILL, **more}


def decode_body(params: Any, **more: Any) -> dict[str, Any]:
    return {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4}, "kv_transfer_params": params, **more}


async def handed_over(fleet: SimFleet, client: Any) -> dict[str, Any]:
    got = await client.post(fleet.prefill, GENERATE, prefill_body())
    params: dict[str, Any] = got.body["kv_transfer_params"]
    return params


async def test_the_descriptor_has_the_recorded_keys(fleet: SimFleet, client: Any, recorded: Any) -> None:
    want = recorded("nixl_prefill_server/prefill_generate_top_level")["response"]["body"]
    got = await client.post(fleet.prefill, GENERATE, prefill_body(request_id="p1"))
    assert list(got.body) == list(want)
    assert list(got.body["kv_transfer_params"]) == list(want["kv_transfer_params"])
    params = got.body["kv_transfer_params"]
    assert params["remote_request_id"].startswith("generate-tokens-p1-")
    assert params["remote_num_tokens"] == len(PROMPT)
    assert len(params["remote_block_ids"][0]) == 3


async def test_a_hand_over_is_read_once(fleet: SimFleet, client: Any) -> None:
    params = await handed_over(fleet, client)
    assert list(fleet.store.unread) == [params["remote_request_id"]]
    assert (await client.post(fleet.decode, GENERATE, decode_body(params))).status == 200
    assert fleet.store.unread == {}
    again = await client.post(fleet.decode, GENERATE, decode_body(params))
    assert again.status == 500
    assert again.body["error"]["type"] == "InternalServerError"
    assert [violation.reason for violation in fleet.store.violations] == ["read_twice"]


async def test_params_may_come_in_extra_args_and_top_level_wins(fleet: SimFleet, client: Any) -> None:
    nested = {"max_tokens": 1, "extra_args": {"kv_transfer_params": PREFILL}}
    body = {"token_ids": PROMPT, "sampling_params": nested}
    assert (await client.post(fleet.prefill, GENERATE, body)).body["kv_transfer_params"] is not None
    body["kv_transfer_params"] = {"do_remote_decode": False}
    assert (await client.post(fleet.prefill, GENERATE, body)).body["kv_transfer_params"] is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"remote_request_id": "generate-tokens-nobody-0"}, "unknown"),
        ({"remote_block_ids": [[7]]}, "altered"),
        ({"a_new_key": 1}, "altered"),
    ],
)
async def test_a_changed_descriptor_is_a_breach(
    change: dict[str, Any], reason: str, fleet: SimFleet, client: Any
) -> None:
    params = await handed_over(fleet, client)
    assert (await client.post(fleet.decode, GENERATE, decode_body(params | change))).status == 500
    assert [violation.reason for violation in fleet.store.violations] == [reason]


async def test_another_prompts_tokens_are_a_breach(fleet: SimFleet, client: Any) -> None:
    params = await handed_over(fleet, client)
    body = decode_body(params, token_ids=[*PROMPT[:-1], 5])
    assert (await client.post(fleet.decode, GENERATE, body)).status == 500
    assert [violation.reason for violation in fleet.store.violations] == ["other_tokens"]


async def test_a_worker_cannot_pull_from_itself(fleet: SimFleet, client: Any) -> None:
    params = await handed_over(fleet, client)
    assert (await client.post(fleet.prefill, GENERATE, decode_body(params))).status == 500
    assert [violation.reason for violation in fleet.store.violations] == ["own_engine"]


def test_a_lease_ends() -> None:
    now = 0.0
    store = HandoverStore(lease_s=30, clock=lambda: now)
    params = store.register(engine_id="p", request_id="r", token_ids=[1], host="h", port=1, cached=0)
    now = 31.0
    with pytest.raises(BadHandover, match="expired"):
        store.fetch(params, [1], engine_id="d")


async def test_without_strictness_wrong_kv_is_answered_with_wrong_text(client: Any) -> None:
    async with SimFleet(decode_settings=Settings(strict_kv=False)) as fleet:
        params = await handed_over(fleet, client)
        body = decode_body(params, token_ids=[*PROMPT, 5], output_mode="text")
        body["sampling_params"] = {"max_tokens": 40, "temperature": 0}
        got = await client.post(fleet.decode, GENERATE, body)
        assert got.status == 200
        assert got.body["choices"][0]["text"].startswith("WRONG KV")
        assert [violation.reason for violation in fleet.store.violations] == ["other_tokens"]


@pytest.fixture
async def incomplete(fleet: SimFleet) -> AsyncIterator[list[dict[str, Any]]]:
    yield [{"do_remote_prefill": True}, {"do_remote_prefill": True, "remote_host": "127.0.0.1"}]


async def test_an_incomplete_descriptor_kills_the_engine(
    fleet: SimFleet, client: Any, recorded: Any, incomplete: list[dict[str, Any]]
) -> None:
    want = recorded("nixl_prefill_server/decode_bad_params_missing_fields")["response"]
    got = await client.post(fleet.decode, GENERATE, decode_body(incomplete[0]))
    assert (got.status, got.body) == (want["status"], want["body"])
    assert fleet.decode.dead
    assert [violation.reason for violation in fleet.store.violations] == ["incomplete"]
    with pytest.raises(OSError):
        await client.get(fleet.decode, "/health")


async def test_the_engine_may_be_told_to_survive(client: Any, incomplete: list[dict[str, Any]]) -> None:
    async with SimFleet(settings=Settings(die_of_bad_kv=False)) as fleet:
        for params in incomplete:
            assert (await client.post(fleet.decode, GENERATE, decode_body(params))).status == 500
        assert (await client.get(fleet.decode, "/health")).status == 200


async def test_a_generate_stream_holds_blocks_that_nobody_hears_of(fleet: SimFleet, client: Any) -> None:
    got = await client.post(fleet.prefill, GENERATE, prefill_body(stream=True))
    assert "kv_transfer_params" not in got.text
    assert len(fleet.store.unread) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "Say hello."}),
        ("/v1/responses", {"input": "Say hello."}),
        ("/v1/messages", {"messages": CHAT["messages"], "max_tokens": 4}),
    ],
)
async def test_every_openai_route_hands_over_and_reads(
    path: str, body: dict[str, Any], fleet: SimFleet, client: Any
) -> None:
    prefill = {**body, "max_tokens": 1, "kv_transfer_params": PREFILL}
    params = (await client.post(fleet.prefill, path, prefill)).body["kv_transfer_params"]
    got = await client.post(fleet.decode, path, {**body, "kv_transfer_params": params})
    assert got.status == 200
    assert fleet.store.violations == []
    assert fleet.store.unread == {}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_openai_streams_hand_over_on_the_finish_chunk(path: str, fleet: SimFleet, client: Any) -> None:
    body = {**CHAT, "prompt": "Say hello.", "max_tokens": 2, "stream": True, "kv_transfer_params": PREFILL}
    got = await client.post(fleet.prefill, path, body)
    params = [event["kv_transfer_params"] for event in got.events[:-1] if "kv_transfer_params" in event]
    assert params[-1]["remote_request_id"] in fleet.store.unread
    assert params[:-1] == [None] * (len(params) - 1)


@pytest.mark.parametrize(
    ("path", "body", "freed"),
    [
        ("/v1/chat/completions", {**CHAT, "temperature": 3}, True),
        ("/v1/completions", {"prompt": "a", "temperature": 3}, True),
        ("/v1/responses", {"input": "a", "temperature": 3}, True),
        ("/v1/messages", {"messages": CHAT["messages"], "max_tokens": 3, "temperature": 3}, True),
        ("/v1/chat/completions", {}, False),
        (GENERATE, decode_body(None, cache_salt=""), False),
    ],
)
async def test_a_native_route_that_refuses_what_it_has_read_frees_the_blocks(
    path: str, body: dict[str, Any], freed: bool, fleet: SimFleet, client: Any
) -> None:
    params = await handed_over(fleet, client)
    assert (await client.post(fleet.decode, path, {**body, "kv_transfer_params": params})).status == 400
    assert (fleet.store.freed == [params["remote_request_id"]]) is freed
    assert (fleet.store.unread == {}) is freed


@pytest.mark.parametrize(
    ("name", "path", "body"),
    [
        ("chat", "/v1/chat/completions", CHAT),
        ("chat_stream", "/v1/chat/completions", {**CHAT, "stream": True}),
        ("completion", "/v1/completions", {"prompt": "a"}),
        ("completion_stream", "/v1/completions", {"prompt": "a", "stream": True}),
        ("generate_tokens", GENERATE, decode_body(None)),
        ("generate_text_stream", GENERATE, decode_body(None, stream=True, output_mode="text")),
        ("responses", "/v1/responses", {"input": "a"}),
        ("messages", "/v1/messages", {"messages": CHAT["messages"], "max_tokens": 3}),
        ("messages_stream", "/v1/messages", {"messages": CHAT["messages"], "max_tokens": 3, "stream": True}),
    ],
)
async def test_a_failed_load_is_answered_as_recorded(
    name: str, path: str, body: dict[str, Any], fleet: SimFleet, client: Any, recorded: Any
) -> None:
    params = await handed_over(fleet, client) | {"remote_request_id": "gone"}
    want = recorded(f"kv_load_failure/{name}")["response"]
    got = await client.post(fleet.decode, path, {**body, "kv_transfer_params": params})
    assert got.status == want["status"]
    if "events" in want:
        assert [list(event) for event in got.events] == [list(event) for event in want["events"]]
        assert [event for event in got.events if "error" in event] == [e for e in want["events"] if "error" in e]
    else:
        assert got.body == want["body"]


async def test_an_aborted_prefill_hands_nothing_over(fleet: SimFleet, client: Any) -> None:
    fleet.prefill.behave.itl_s = 0.02
    body = prefill_body(request_id="x", sampling_params={"max_tokens": 500, "ignore_eos": True})

    async def abort() -> None:
        while not fleet.prefill.core.running_count:
            await asyncio.sleep(0.005)
        await client.post(fleet.prefill, "/inference/v1/abort_requests", {"request_ids": ["generate-tokens-x"]})

    got, _ = await asyncio.gather(client.post(fleet.prefill, GENERATE, body), abort())
    assert got.body["choices"][0]["finish_reason"] == "abort"
    assert got.body["kv_transfer_params"] is None
    assert fleet.store.unread == {}


async def test_metrics_tell_where_prompt_tokens_came_from(fleet: SimFleet, client: Any) -> None:
    params = await handed_over(fleet, client)
    await client.post(fleet.decode, GENERATE, decode_body(params))
    text = (await client.get(fleet.decode, "/metrics")).text
    label = 'engine="0",model_name="tiny",source='
    assert f'vllm:prompt_tokens_by_source_total{{{label}"external_kv_transfer"}} {len(PROMPT)}.0' in text
    assert f'vllm:prompt_tokens_by_source_total{{{label}"local_compute"}} 0.0' in text
    text = (await client.get(fleet.prefill, "/metrics")).text
    assert f'vllm:prompt_tokens_by_source_total{{{label}"local_compute"}} {len(PROMPT)}.0' in text


async def test_reused_prompt_ids_take_the_place_of_the_messages(fleet: SimFleet, client: Any) -> None:
    rendered = await client.post(fleet.render, "/v1/chat/completions/render", CHAT)
    ignored = {**CHAT, "messages": [{"role": "user", "content": "Never stop."}]}
    ignored["kv_transfer_params"] = {"prompt_token_ids": rendered.body["token_ids"]}
    got = await client.post(fleet.decode, "/v1/chat/completions", ignored)
    assert got.body["usage"]["prompt_tokens"] == len(rendered.body["token_ids"])
    assert "Hello! How can I help you today?" in got.body["choices"][0]["message"]["content"]
