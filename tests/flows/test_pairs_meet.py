"""Both legs in flight at once: SGLang's rooms and Mooncake's transfers, over real sockets."""

import pytest

from tests.flows.pairs import HELLO, KINDS, paired, params, room
from tests.flows.setups import CHAT, COMPLETIONS, MESSAGES, RESPONSES, comparable, own, question

APIS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_the_answer_of_a_pair_is_the_one_that_a_single_worker_gives(fleet_of, coordinator, kind, stream, path):
    """Whatever the API; the two legs have met, and nothing is left on either side."""
    fleet, single = await paired(fleet_of, kind), await fleet_of(prefills=0)
    at = await coordinator(fleet, "pair")
    body = question(path, "Say hello.", stream=stream)
    got, alone = await at.post(path, body), await own(single.decode, path, body)
    assert got.status == 200
    assert len(fleet.pairs.met) == 1
    if stream:
        assert comparable(got.events, "kv_transfer_params") == comparable(alone.events, "kv_transfer_params")
    else:
        assert comparable(got.body, "kv_transfer_params") == comparable(alone.body, "kv_transfer_params")


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_in_meets_as_well(fleet_of, coordinator, legs, stream):
    """With render in front and the envelope rebuilt, on Mooncake workers; the params are where every version reads."""
    fleet = await paired(fleet_of, "mooncake")
    at = await coordinator(fleet, "pair-text")
    got = await at.chat(stream=stream)
    assert (got.status, got.text, len(fleet.pairs.met)) == (200, HELLO, 1)
    for worker in (fleet.prefill, fleet.decode):
        [leg] = legs(worker)
        assert leg.path == "/inference/v1/generate"
        assert leg.body["sampling_params"]["extra_args"]["kv_transfer_params"] == params(leg.body)


async def test_sglang_gets_the_client_s_own_request_twice(fleet_of, coordinator, legs, ask):
    """The cap stays, since prefill samples decode's first token; only the stream is decode's alone."""
    fleet = await paired(fleet_of, "sglang")
    at = await coordinator(fleet, "pair")
    body = ask(stream=True, max_tokens=7, seed=3, stop=["x"], stream_options={"include_usage": True})
    assert (await at.post(CHAT, body)).status == 200
    [prefill], [decode] = legs(fleet.prefill), legs(fleet.decode)
    host, port, number = room(prefill.body)
    tie = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": number}
    assert (host, port) == ("127.0.0.1", 8998)
    assert type(number) is int
    assert 0 < number < 2**63
    assert decode.body == body | tie
    whole = {key: value for key, value in body.items() if key != "stream_options"}
    assert prefill.body == whole | {"stream": False} | tie


async def test_every_request_has_a_room_of_its_own(fleet_of, coordinator, legs):
    fleet = await paired(fleet_of, "sglang")
    at = await coordinator(fleet, "pair")
    for _ in range(3):
        await at.chat()
    assert len({room(leg.body) for leg in legs(fleet.decode)}) == 3


async def test_mooncake_s_legs_carry_one_transfer_id_and_decode_where_to_ask(fleet_of, coordinator, legs):
    """L32: prefill returns nothing by design, and that is no failure."""
    fleet = await paired(fleet_of, "mooncake")
    at = await coordinator(fleet, "pair")
    assert (await at.chat()).text == HELLO
    [prefill], [decode] = legs(fleet.prefill), legs(fleet.decode)
    transfer_id = params(prefill.body)["transfer_id"]
    assert params(prefill.body) == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": transfer_id,
    }
    assert params(decode.body) == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "remote_bootstrap_addr": fleet.prefill.bootstrap.url,
        "remote_engine_id": fleet.prefill.core.engine_id,
    }
    assert await at.count("coordinator_handovers_missing_total") == 0


async def test_mooncake_s_prefill_ends_by_its_length(fleet_of, coordinator, legs):
    """L24: its blocks are kept for no other end."""
    fleet = await paired(fleet_of, "mooncake")
    at = await coordinator(fleet, "pair")
    await at.chat(stop=["x"], min_tokens=2, max_tokens=50)
    [prefill] = legs(fleet.prefill)
    assert (prefill.body["max_tokens"], prefill.body["ignore_eos"]) == (1, True)
    assert not {"stop", "min_tokens"} & set(prefill.body)


async def test_a_bootstrap_server_is_asked_once(fleet_of, coordinator):
    fleet = await paired(fleet_of, "mooncake")
    at = await coordinator(fleet, "pair")
    for _ in range(3):
        assert (await at.chat()).status == 200
    assert fleet.prefill.bootstrap.queries == 1


async def test_an_engine_that_was_started_anew_is_asked_for_after_one_failure(fleet_of, coordinator):
    """R11: what was remembered of the old one is forgotten with the pair that failed by it."""
    fleet = await paired(fleet_of, "mooncake")
    at = await coordinator(fleet, "pair")
    assert (await at.chat()).status == 200
    object.__setattr__(fleet.prefill.core.pair, "engine_id", "engine-new")
    fleet.prefill.bootstrap.rename("engine-new")
    assert (await at.chat()).status == 502
    assert (await at.chat()).text == HELLO
    assert fleet.prefill.bootstrap.queries == 2
    fleet.pairs.unsent.clear()  # of the second, whose decode was refused


async def test_ranks_are_ours_to_choose(fleet_of, coordinator, legs):
    """E6, H22: prefill's is set on its leg in turn, decode is told that rank's engine, and a client's goes nowhere."""
    fleet = await paired(fleet_of, "mooncake", dp_size=2)
    at = await coordinator(fleet, "pair")
    for _ in range(4):
        got = await at.chat("Say hello.", ("X-data-parallel-rank", "7"), data_parallel_rank=7, routed_dp_rank=7)
        assert got.text == HELLO
    engine = fleet.prefill.core.engine_id
    assert [leg.header("x-data-parallel-rank") for leg in legs(fleet.prefill)] == ["0", "1", "0", "1"]
    assert [leg.header("x-data-parallel-rank") for leg in legs(fleet.decode)] == [None] * 4
    told = [params(leg.body)["remote_engine_id"] for leg in legs(fleet.decode)]
    assert told == [f"{engine}_dp{rank}" for rank in (0, 1, 0, 1)]
    for leg in (*legs(fleet.prefill), *legs(fleet.decode)):
        assert not {"data_parallel_rank", "routed_dp_rank"} & set(leg.body)


async def test_a_worker_with_one_rank_is_not_told_which(fleet_of, coordinator, legs):
    """Behind an external balancer it may bear another number than its bootstrap server says."""
    fleet = await paired(fleet_of, "mooncake")
    at = await coordinator(fleet, "pair")
    await at.chat()
    [leg] = legs(fleet.prefill)
    assert leg.header("x-data-parallel-rank") is None


async def test_a_client_cannot_send_workers_to_a_room_of_its_own(fleet_of, coordinator, legs):
    """H22: neither by the body nor by the headers that SGLang lets win over it."""
    fleet = await paired(fleet_of, "sglang")
    at = await coordinator(fleet, "pair")
    names = ("rid", "bootstrap-host", "bootstrap-port", "bootstrap-room", "routed-dp-rank", "disagg-prefill-dp-rank")
    headers = [(f"X-Override-{name}", "9") for name in names]
    got = await at.chat("Say hello.", *headers, bootstrap_host="9.9.9.9", bootstrap_room=9, disagg_prefill_dp_rank=9)
    assert got.text == HELLO
    for worker in (fleet.prefill, fleet.decode):
        [leg] = legs(worker)
        assert room(leg.body)[0] == "127.0.0.1"
        assert "disagg_prefill_dp_rank" not in leg.body
        assert not [name for name, _ in leg.headers if name.lower().startswith("x-override")]


async def test_several_answers_to_one_prompt(fleet_of, coordinator, legs):
    """Mooncake's first reader frees the blocks, so decode computes; SGLang's decode cannot, and would mix them up."""
    mooncake, sglang = await paired(fleet_of, "mooncake"), await paired(fleet_of, "sglang")
    got = await (await coordinator(mooncake, "pair")).chat(n=2, temperature=1.0)
    assert (got.status, len(got.body["choices"])) == (200, 2)
    assert (legs(mooncake.prefill), "kv_transfer_params" in legs(mooncake.decode)[0].body) == ([], False)
    refused = await (await coordinator(sglang, "pair")).chat(n=2)
    assert (refused.status, refused.error["param"]) == (400, "n")
    assert legs(sglang.prefill) == legs(sglang.decode) == []


async def test_an_sglang_fleet_has_no_generate_route(fleet_of, coordinator, legs):
    fleet = await paired(fleet_of, "sglang")
    at = await coordinator(fleet, "pair")
    got = await at.post("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {}})
    assert got.status == 501
    assert "have no generate route" in got.error["message"]
    assert legs(fleet.prefill) == []


@pytest.mark.parametrize("kind", KINDS)
async def test_the_router_in_front_may_name_the_prefill_worker(fleet_of, coordinator, kind):
    """Sidecar mode; without a name Mooncake's decode does both, and SGLang's cannot."""
    fleet = await paired(fleet_of, kind)
    port = fleet.prefill.bootstrap.port if fleet.prefill.bootstrap else 8998
    named = {"endpoints": None, "header": "x-prefiller-host-port", "allow": ["127.0.0.1"], "bootstrap_port": port}
    at = await coordinator(fleet, "pair", pools={"prefill": named})
    got = await at.chat("Say hello.", ("x-prefiller-host-port", fleet.prefill.url.removeprefix("http://")))
    assert (got.text, len(fleet.pairs.met)) == (HELLO, 1)
    bare = await at.chat()
    assert bare.status == (400 if kind == "sglang" else 200)
