"""What prefill leaves for decode: passed on whole, or not at all."""

import json
from dataclasses import replace

import pytest

from coordinator.sim import ABSENT, Canned, Fault, Settings
from coordinator.sim.faults import aborted, handover

REGISTERED = "the simulated prefill had kept its blocks before its answer was changed"
HELLO = "Hello! How can I help you today?"

# A complete hand-over, with number types and fields that nobody here knows.
WHOLE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "e1",
    "remote_block_ids": [[1, 2]],
    "remote_request_id": "r1",
    "remote_host": "10.9.9.9",
    "remote_port": 5600,
    "tp_size": 1,
}


def sent_params(received):
    """Return every place in a decode leg from which a worker would read transfer params."""
    body = received.body
    extra = (body.get("sampling_params") or {}).get("extra_args") or {}
    return [params for params in (body.get("kv_transfer_params"), extra.get("kv_transfer_params")) if params]


def without(*names):
    def rewrite(body):
        params = {key: value for key, value in body["kv_transfer_params"].items() if key not in names}
        return {**body, "kv_transfer_params": params}

    return rewrite


def with_blocks(blocks):
    def rewrite(body):
        return {**body, "kv_transfer_params": {**body["kv_transfer_params"], "remote_block_ids": blocks}}

    return rewrite


NOT_THERE = {
    "no such key": handover(ABSENT),
    "null": handover(None),
    "empty object": handover({}),
    "list": handover([]),
    "text": handover("x"),
}
HALF = {
    "no block ids": without("remote_block_ids"),
    "no host": without("remote_host"),
    "no engine": without("remote_engine_id"),
    "empty block ids": with_blocks([]),
    "empty group of block ids": with_blocks([[]]),
    "null block ids": with_blocks(None),
}


@pytest.mark.parametrize("shape", ["openai", "text"])
@pytest.mark.parametrize("rewrite", [*NOT_THERE.values(), *HALF.values()], ids=[*NOT_THERE, *HALF])
async def test_a_handover_that_is_not_whole_fails_the_request_and_is_counted(
    coordinator, fleet, legs, excuse, shape, rewrite
):
    """L11, L12: decode that would silently compute everything again is no success; the metric says what was missing."""
    excuse("unread", REGISTERED)
    at = await coordinator(fleet, shape)
    fleet.prefill.behave.next(Fault(rewrite=rewrite))
    got = await at.chat()
    assert (got.status, got.error["type"], got.error["code"]) == (502, "BadGatewayError", 502)
    assert got.error["message"].startswith("prefill: the worker left nothing for decode to fetch")
    assert "kv-nixl" in got.error["message"]
    assert legs(fleet.decode) == []
    reason = "absent" if rewrite in NOT_THERE.values() else "incomplete"
    assert await at.count("coordinator_handovers_missing_total", reason=reason, policy="fail") == 1


@pytest.mark.parametrize("shape", ["openai", "text", "derender"])
@pytest.mark.parametrize("rewrite", [*NOT_THERE.values(), *HALF.values()], ids=[*NOT_THERE, *HALF])
async def test_decode_alone_gets_no_transfer_params_at_all(coordinator, fleet, legs, excuse, shape, rewrite):
    """L11, L12: with ``decode_alone`` the client is answered, and not one field of the hand-over leaves with decode."""
    excuse("unread", REGISTERED)
    at = await coordinator(fleet, shape, pipeline={"on_missing_handover": "decode_alone"})
    fleet.prefill.behave.next(Fault(rewrite=rewrite))
    got = await at.chat()
    assert (got.status, got.text) == (200, HELLO)
    [leg] = legs(fleet.decode)
    assert sent_params(leg) == []
    assert await at.count("coordinator_handovers_missing_total", policy="decode_alone") == 1
    assert fleet.decode.core.prompt_tokens["local_compute"] > 0


@pytest.mark.parametrize("shape", ["openai", "text"])
@pytest.mark.parametrize("policy", ["fail", "decode_alone"])
async def test_an_aborted_prefill_is_no_handover_although_it_says_200(coordinator, fleet, legs, excuse, shape, policy):
    """L10: ``finish_reason: abort`` is a failed prefill."""
    excuse("unread", REGISTERED)
    at = await coordinator(fleet, shape, pipeline={"on_missing_handover": policy})
    fleet.prefill.behave.next(Fault(rewrite=aborted))
    got = await at.chat()
    assert got.status == (502 if policy == "fail" else 200)
    assert [sent_params(leg) for leg in legs(fleet.decode)] == ([] if policy == "fail" else [[]])
    assert await at.count("coordinator_handovers_missing_total", reason="bad_finish", policy=policy) == 1


@pytest.mark.parametrize("finish", ["abort", "error"])
async def test_a_finish_reason_that_is_bad_outweighs_a_whole_handover(coordinator, fleet, legs, excuse, finish):
    """L10: blocks of a request that did not end well are not to be trusted."""
    excuse("unread", REGISTERED)
    at = await coordinator(fleet)
    fleet.prefill.behave.next(Fault(rewrite=lambda body: {**body, "choices": [{"index": 0, "finish_reason": finish}]}))
    got = await at.chat()
    assert (got.status, finish in got.error["message"]) == (502, True)
    assert legs(fleet.decode) == []


@pytest.mark.parametrize("shape", ["openai", "text"])
async def test_a_handover_reaches_decode_with_equal_values_and_number_types(coordinator, fleet, scripted, shape):
    """L13: unknown fields, whole numbers beyond 2**53, floats and nulls arrive as they left."""
    params = {**WHOLE, "pp_size": 1, "x": 1.5, "whole": 2.0, "y": [[3], [4, 5]], "z": None, "big": 9007199254740993}
    prefill = await scripted(scripted.json({"choices": [], "output_mode": "tokens", "kv_transfer_params": params}))
    decode = await scripted(
        scripted.json({"error": {"message": "enough", "type": "BadRequestError", "code": 400}}, 400)
    )
    pools = {"prefill": {"endpoints": [prefill.url]}, "decode": {"endpoints": [decode.url]}}
    at = await coordinator(fleet, shape, pools=pools)
    assert (await at.chat()).status == 400
    (_, sent), *_ = decode.received  # on the generate route, a leg that releases the blocks follows
    assert json.dumps(sent["kv_transfer_params"], sort_keys=True) == json.dumps(params, sort_keys=True)


async def test_only_the_two_flags_of_a_handover_may_change(coordinator, fleet, scripted):
    """L13: older workers return the flags of the prefill leg, and decode must have its own."""
    returned = {**WHOLE, "do_remote_prefill": False, "do_remote_decode": True}
    prefill = await scripted(scripted.json({"choices": [], "kv_transfer_params": returned}))
    decode = await scripted(scripted.json({"error": {"message": "enough"}}, 400))
    at = await coordinator(
        fleet, pools={"prefill": {"endpoints": [prefill.url]}, "decode": {"endpoints": [decode.url]}}
    )
    await at.chat()
    [(_, sent)] = decode.received
    assert sent["kv_transfer_params"] == WHOLE


async def test_an_error_under_a_200_is_no_prefill_where_nothing_is_handed_over_either(coordinator, fleet_of, legs):
    """L10: with shared storage the answer itself is all there is to look at."""
    fleet = await fleet_of(settings=Settings(connector=False))
    at = await coordinator(fleet, pipeline={"kv_connector": "kv-shared-storage"})
    fleet.prefill.behave.next(Fault(canned=Canned(200, '{"error": {"message": "secret"}}')))
    got = await at.chat()
    assert (got.status, b"secret" in got.raw, legs(fleet.decode)) == (502, False, [])


@pytest.mark.parametrize("shape", ["openai", "text", "derender"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_is_answered_with_an_end_token_still_hands_over(coordinator, fleet, legs, shape, stream):
    """L24: prefill is told to ignore the end of text and gets no stop fields, so that it ends by length."""
    at = await coordinator(fleet, shape)
    got = await at.chat("Say nothing.", stream=stream, stop=["###"])
    assert (got.status, got.text) == (200, "")
    [leg] = legs(fleet.prefill)
    asked = leg.body["sampling_params"] if shape != "openai" else leg.body
    assert (asked["max_tokens"], asked["ignore_eos"]) == (1, True)
    assert not {"stop", "stop_token_ids", "min_tokens"} & set(asked)
    assert len(fleet.store.read) == 1


async def test_a_prefill_that_ended_by_stop_goes_on_to_decode_with_nixl(coordinator, fleet):
    """L24: this connector keeps the blocks of both finishes."""
    at = await coordinator(fleet)

    def stopped(body):
        return {**body, "choices": [{**choice, "finish_reason": "stop"} for choice in body["choices"]]}

    fleet.prefill.behave.next(Fault(rewrite=stopped))
    assert (await at.chat()).text == HELLO
    assert len(fleet.store.read) == 1


@pytest.mark.parametrize("shape", ["openai", "text", "derender", "alone"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_a_client_that_asks_for_one_token_gets_exactly_one(coordinator, fleet, shape, stream, field):
    """L25: prefill's own cap of one is neither lost nor applied to decode twice."""
    at = await coordinator(fleet, shape)
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    got = await at.chat("Count to 20.", **{field: 1}, **options)
    assert (got.status, got.text) == (200, "1")
    usage = (
        next(chunk["usage"] for chunk in reversed(got.chunks) if chunk.get("usage")) if stream else got.body["usage"]
    )
    assert usage["completion_tokens"] == 1


@pytest.mark.parametrize("shape", ["openai", "text", "derender"])
@pytest.mark.parametrize("stream", [False, True])
async def test_several_choices_are_decoded_alone_with_nixl(coordinator, fleet, legs, shape, stream):
    """L27: the children of one request would all read blocks that the first of them frees."""
    at = await coordinator(fleet, shape)
    got = await at.chat("Just say OK.", n=2, temperature=1.0, stream=stream)
    assert got.status == 200
    choices = [choice for chunk in got.chunks for choice in chunk["choices"]] if stream else got.body["choices"]
    assert {choice["index"] for choice in choices} == {0, 1}
    assert legs(fleet.prefill) == []
    [leg] = legs(fleet.decode)
    assert leg.body.get("n") == 2 or leg.body["sampling_params"]["n"] == 2
    assert sent_params(leg) == []
    assert await at.count("coordinator_prefills_skipped_total", reason="n") == 1


async def test_several_choices_share_a_prefill_where_blocks_may_be_read_again(coordinator, fleet_of, legs):
    """L27: with shared storage prefill runs, and asks for one choice only."""
    fleet = await fleet_of(settings=Settings(connector=False))
    at = await coordinator(fleet, pipeline={"kv_connector": "kv-shared-storage"})
    got = await at.chat("Just say OK.", n=2, temperature=1.0)
    assert len(got.body["choices"]) == 2
    [leg] = legs(fleet.prefill)
    assert leg.body.get("n", 1) == 1


@pytest.mark.parametrize("shape", ["text", "derender"])
async def test_stop_strings_never_reach_a_prefill_pool_without_a_tokenizer(coordinator, fleet_of, legs, shape):
    """S41: vLLM 0.33 with ``--tokens-only`` refuses them; decode must have them."""
    fleet = await fleet_of(prefill_settings=replace(Settings(), tokens_only=True))
    at = await coordinator(fleet, shape)
    got = await at.chat("Say stop in the middle.", stop=["STOP"], include_stop_str_in_output=True)
    assert (got.status, got.text) == (200, "This is before STOP")
    [leg] = legs(fleet.prefill)
    assert set(leg.body["sampling_params"]) == {"max_tokens", "temperature", "ignore_eos", "extra_args"}
    assert legs(fleet.decode)[0].body["sampling_params"]["stop"] == ["STOP"]


REFUSED = {"error": {"message": "too long", "type": "BadRequestError", "param": "messages", "code": 400}}


@pytest.mark.parametrize("shape", ["openai", "text"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_by_prefill_reaches_the_client_unchanged_and_ends_the_request(
    coordinator, fleet_of, legs, shape, stream
):
    """L14: same message, type, param and code; decode is never asked, and no other prefill worker either."""
    fleet = await fleet_of(prefills=2)
    at = await coordinator(fleet, shape)
    for worker in fleet.prefills:
        worker.behave.next(Fault(canned=Canned(400, json.dumps(REFUSED))))
    got = await at.chat(stream=stream)
    assert (got.status, got.body) == (400, REFUSED)
    assert got.headers["Content-Type"] == "application/json"
    assert len([leg for worker in fleet.prefills for leg in legs(worker)]) == 1
    assert legs(fleet.decode) == []
