"""One leg of a pair fails, or the client leaves: what becomes of the other, and what the client is told."""

import asyncio
import json

import pytest

from coordinator.sim import Canned, Fault
from tests.flows.pairs import HELLO, KINDS, leaves_decode_waiting, paired, params, room
from tests.flows.setups import CHAT

FAILED = Fault(path=CHAT, canned=Canned(500, b'{"error": {"message": "secret", "code": 500}}'))
REFUSED = {"error": {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}}
CAUGHT = Fault(path=CHAT, canned=Canned(400, json.dumps(REFUSED)))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_prefill_that_fails_ends_decode_and_decides_the_status(fleet_of, coordinator, eventually, kind, stream):
    """L30: decode would wait for minutes; its connection is closed at once, and its own failure is never heard of."""
    fleet = await paired(fleet_of, kind)
    at = await coordinator(fleet, "pair")
    fleet.prefill.behave.next(FAILED)
    got = await at.chat(stream=stream)
    assert (got.status, got.error["message"].split(" (")[0]) == (502, "prefill: the worker answered 500")
    await eventually(lambda: fleet.decode.aborted)
    assert fleet.pairs.met == []
    await leaves_decode_waiting(fleet)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_prefill_that_answers_nonsense_is_counted_once_and_named(fleet_of, coordinator, unused_tcp_port, kind):
    fleet = await paired(fleet_of, kind)
    at = await coordinator(fleet, "pair", server={"metrics_port": unused_tcp_port})  # which has the status page
    fleet.prefill.behave.next(Fault(path=CHAT, canned=Canned(200, "no JSON")))
    assert (await at.chat()).status == 502
    unusable = at.app.metrics.answers_unusable.collect()[0].samples
    assert {sample.labels["step"]: sample.value for sample in unusable if sample.name.endswith("_total")} == {
        "prefill": 1
    }
    told = {leg["step"]: leg for leg in at.app.recent.shown()[0]["legs"]}
    assert told["prefill"]["outcome"] == told["prefill-decode"]["outcome"] == "LegUnreadable"
    assert told["prefill"]["workers"] == [fleet.prefill.url.removeprefix("http://")]
    await leaves_decode_waiting(fleet)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_prefill_that_refuses_is_told_to_the_client_in_the_worker_s_words(
    fleet_of, coordinator, eventually, kind
):
    """The first leg to say what is wrong with a request is believed; no other pair is tried."""
    fleet = await paired(fleet_of, kind, prefills=2)
    at = await coordinator(fleet, "pair")
    for worker in fleet.prefills:
        worker.behave.next(CAUGHT)
    got = await at.chat()
    assert (got.status, got.body) == (400, REFUSED)
    await eventually(lambda: fleet.decode.aborted)
    assert await at.count("coordinator_retries_total") == 0
    await leaves_decode_waiting(fleet)


async def test_a_decode_that_fails_ends_sglang_s_prefill(fleet_of, coordinator, eventually):
    """Both sides are freed when either request ends."""
    fleet = await paired(fleet_of, "sglang")
    at = await coordinator(fleet, "pair")
    fleet.decode.behave.next(FAILED)
    got = await at.chat()
    assert (got.status, got.error["message"].split(" (")[0]) == (502, "decode: the worker answered 500")
    await eventually(lambda: fleet.prefill.aborted)


async def test_a_decode_that_fails_leaves_mooncake_s_prefill_to_its_end(fleet_of, coordinator, eventually):
    """What it holds is then fetched by a leg of one token, where the decode is known not to have read it."""
    fleet = await paired(fleet_of, "mooncake", decodes=2)
    at = await coordinator(fleet, "pair", steps={"prefill-decode": {"max_attempts": 1}})
    fleet.prefill.behave.next(Fault(path=CHAT, first_byte_s=0.2))
    await fleet.decodes[0].refuse_connections()
    got = await at.chat()
    assert got.status == 503
    await eventually(lambda: fleet.pairs.met and not fleet.pairs.unsent)
    assert fleet.prefill.aborted == []
    assert await at.count("coordinator_handovers_released_total", outcome="delivered") == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_what_begins_again_is_a_whole_new_pair(fleet_of, coordinator, legs, eventually, kind):
    """Another prefill worker, another room or transfer; the decode that waited for the first is let go."""
    fleet = await paired(fleet_of, kind, prefills=2)
    at = await coordinator(fleet, "pair")
    fleet.prefills[0].behave.next(Fault(path=CHAT, first_byte_s=0.2, canned=Canned(503)))
    got = await at.chat()
    assert (got.status, got.text) == (200, HELLO)
    first, second = legs(fleet.decode)
    if kind == "sglang":
        assert room(first.body)[2] != room(second.body)[2]
    else:
        assert params(first.body)["transfer_id"] != params(second.body)["transfer_id"]
    assert first.header("x-request-id") != second.header("x-request-id")
    assert len(fleet.pairs.met) == 1
    await eventually(lambda: len(fleet.decode.aborted) == 1)
    await leaves_decode_waiting(fleet)
    assert await at.count("coordinator_retries_total", step="prefill_again") == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_another_decode_worker_gets_a_new_pair_too(fleet_of, coordinator, eventually, kind):
    fleet = await paired(fleet_of, kind, decodes=2)
    at = await coordinator(fleet, "pair")
    await fleet.decodes[0].refuse_connections()
    got = await at.chat()
    assert (got.status, got.text) == (200, HELLO)  # and what the first prefill holds is fetched


@pytest.mark.parametrize("kind", KINDS)
async def test_a_kept_connection_that_had_died_is_no_second_use_of_a_pair(fleet_of, coordinator, eventually, kind):
    """The worker may have read the request, so it is not sent again as it is; the store would tell of it."""
    fleet = await paired(fleet_of, kind)
    at = await coordinator(fleet, "pair")
    assert (await at.chat()).text == HELLO
    fleet.prefill.behave.next(Fault(path=CHAT, drop=True))
    assert (await at.chat()).text == HELLO
    assert await at.count("coordinator_stale_connections_total") == 1
    await leaves_decode_waiting(fleet)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_both_of_sglang_s_legs(fleet_of, coordinator, ask, eventually, stream):
    """L02: prefill is stopped as well, and its peer hears of it."""
    fleet = await paired(fleet_of, "sglang")
    at = await coordinator(fleet, "pair")
    fleet.prefill.behave.next(Fault(hang=True))
    async with at.open(CHAT, ask(stream=stream)) as live:
        await eventually(lambda: fleet.pairs.rooms)
        live.cut()
    await eventually(lambda: fleet.prefill.aborted and fleet.decode.aborted)
    assert await at.count("coordinator_requests_total", outcome="client_gone") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_does_not_end_mooncake_s_prefill(fleet_of, coordinator, ask, eventually, stream):
    """Decode keeps room until the blocks come, whatever becomes of its request; so they are sent."""
    fleet = await paired(fleet_of, "mooncake")
    at = await coordinator(fleet, "pair")
    fleet.prefill.behave.next(Fault(path=CHAT, first_byte_s=1.0))
    async with at.open(CHAT, ask(stream=stream)) as live:
        await eventually(lambda: fleet.pairs._waiting)
        live.cut()
    await eventually(lambda: fleet.decode.aborted)
    assert fleet.pairs.stranded
    assert await at.count("coordinator_requests_total", outcome="client_gone") == 1
    await eventually(lambda: not fleet.pairs.stranded)
    assert fleet.prefill.aborted == []


@pytest.mark.parametrize("kind", KINDS)
async def test_clients_that_leave_at_any_moment_leave_nothing(fleet_of, coordinator, ask, eventually, kind):
    """R06: no leg, no permit and no room is left of forty of them; that is checked at the end of every test."""
    fleet = await paired(fleet_of, kind, prefills=2, decodes=2)
    at = await coordinator(fleet, "pair")

    async def leave(turns):
        async with at.open(CHAT, ask("Never stop.", stream=turns % 2 == 0, max_tokens=300)) as live:
            for _ in range(turns):
                await asyncio.sleep(0.001)
            live.cut()

    await asyncio.gather(*(leave(turns) for turns in range(40)))
    await eventually(lambda: not at.in_flight())
    assert (await at.chat()).text == HELLO


@pytest.mark.parametrize(("kind", "finish"), [("sglang", "abort"), ("mooncake", "abort"), ("mooncake", "stop")])
async def test_a_prefill_that_did_not_end_well_is_a_failed_prefill(fleet_of, coordinator, kind, finish):
    """L10, L24: status 200 alone says nothing, and Mooncake sends no blocks of a prompt that did not end by length."""
    fleet = await paired(fleet_of, kind)
    at = await coordinator(fleet, "pair")
    answer = json.dumps({"choices": [{"index": 0, "finish_reason": finish}]})
    fleet.prefill.behave.next(Fault(path=CHAT, canned=Canned(200, answer)))
    fleet.decode.behave.next(Fault(path=CHAT, hang=True))
    got = await at.chat()
    assert got.status == 502
    assert f"prefill ended with finish_reason '{finish}'" in got.error["message"]


async def test_mooncake_s_decode_may_go_on_alone(fleet_of, coordinator, legs, eventually):
    """``on_prefill_failure: decode_alone``: the decode that waits is ended, and asked anew without params."""
    fleet = await paired(fleet_of, "mooncake")
    at = await coordinator(fleet, "pair", pipeline={"on_prefill_failure": "decode_alone"})
    fleet.prefill.behave.next(FAILED)
    got = await at.chat()
    assert (got.status, got.text) == (200, HELLO)
    waited, alone = legs(fleet.decode)
    assert "kv_transfer_params" in waited.body
    assert "kv_transfer_params" not in alone.body
    await leaves_decode_waiting(fleet)


@pytest.mark.parametrize("prefills", [1, 2])
async def test_without_its_bootstrap_server_a_worker_is_passed_over(fleet_of, coordinator, legs, prefills):
    """Nothing is sent to anybody who would wait; where it is the only one, the client is told which server is gone."""
    fleet = await paired(fleet_of, "mooncake", prefills=prefills)
    at = await coordinator(fleet, "pair")
    await fleet.prefill.bootstrap.refuse_connections()
    got = await at.chat()
    assert got.status == (200 if prefills == 2 else 503)
    assert legs(fleet.prefill) == []
    if prefills == 1:
        assert legs(fleet.decode) == []


@pytest.mark.parametrize("kind", KINDS)
async def test_a_prefill_that_never_answers_ends_at_its_limit(fleet_of, coordinator, eventually, kind):
    """L18: 504 that names the leg, whichever limit is reached first; decode is let go."""
    fleet = await paired(fleet_of, kind)
    at = await coordinator(fleet, "pair", steps={"prefill-decode": {"first_byte_timeout": "300ms"}})
    fleet.prefill.behave.next(Fault(hang=True))
    got = await at.chat()
    assert got.status == 504
    await eventually(lambda: fleet.decode.aborted)
    await leaves_decode_waiting(fleet)


@pytest.mark.parametrize("known", [False, True])
async def test_with_a_prefill_worker_that_is_gone_decode_may_do_both(fleet_of, coordinator, legs, eventually, known):
    """Its bootstrap server is gone with it. What that had told before is believed once more, and then forgotten."""
    fleet = await paired(fleet_of, "mooncake")
    at = await coordinator(fleet, "pair", pipeline={"on_prefill_failure": "decode_alone"})
    if known:
        assert (await at.chat()).text == HELLO
    await fleet.prefill.refuse_connections()
    await fleet.prefill.bootstrap.refuse_connections()
    for _ in range(2):
        got = await at.chat()
        assert (got.status, got.text) == (200, HELLO)
    assert await at.count("coordinator_prefills_failed_over_total") == 2
    assert len([leg for leg in legs(fleet.decode) if leg.body.get("kv_transfer_params")]) <= 2 * known
    await eventually(lambda: not fleet.decode.core.running)
    fleet.pairs.stranded.clear()  # the decode of the pair that failed keeps its room, if it was asked at all
