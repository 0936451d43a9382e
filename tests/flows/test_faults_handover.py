"""A hand-over is delivered once, whatever goes wrong: a client between two legs, a worker in the middle of one."""

import asyncio
import json

import pytest

from coordinator.sim import Canned, Fault
from tests.flows.chaos import answer_or_nothing, pause_before_decode

CHAT = "/v1/chat/completions"
HELLO = "Hello! How can I help you today?"
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "Say hello."}]},
    "/v1/completions": {"prompt": "Say hello."},
    "/v1/responses": {"input": "Say hello."},
    "/v1/messages": {"max_tokens": 50, "messages": [{"role": "user", "content": "Say hello."}]},
    "/inference/v1/generate": {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 50}},
}
REFUSED = Fault(canned=Canned(400, json.dumps({"error": {"message": "no", "type": "BadRequestError", "code": 400}})))


def handovers(received):
    return [leg.body["kv_transfer_params"]["remote_request_id"] for leg in received]


@pytest.fixture
def leaves_between(ask, eventually):
    """``await leaves_between(at)``: a client who goes when prefill has answered and decode has not been asked."""

    async def leave(at, path=CHAT, body=None, **fields):
        pipeline = at.front.plan.pipeline
        steps, pause = pipeline.steps, pause_before_decode(at)
        async with at.open(path, body or ask(**fields)) as live:
            await eventually(pause.reached.is_set)
            live.cut()
        await eventually(lambda: not at.front.in_flight)
        pipeline.steps = steps

    return leave


EVERY_SHAPE = [(shape, CHAT) for shape in ("openai", "text", "derender", "unwrapped")]
EVERY_API = [(shape, path) for shape in ("openai", "text") for path in BODIES if path != CHAT]


@pytest.mark.parametrize(("shape", "path"), EVERY_SHAPE + EVERY_API)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_prefill_left_for_a_client_who_has_gone_is_delivered_all_the_same(
    coordinator, fleet, legs, leaves_between, eventually, shape, path, stream
):
    """L01, A1: one decode leg of one token, unstreamed, with the hand-over; prefill is free before its lease ends."""
    at = await coordinator(fleet, shape)
    await leaves_between(at, path, {"model": "tiny", "stream": stream, **BODIES[path]})
    await eventually(lambda: not fleet.store.unread)
    [leg] = legs(fleet.decode)
    asked = leg.body.get("sampling_params", leg.body)
    assert (asked.get("max_tokens", asked.get("max_output_tokens")), leg.body["stream"]) == (1, False)
    assert handovers([leg]) == fleet.store.read
    await eventually(lambda: not at.in_flight())
    assert await at.count("coordinator_requests_total", outcome="client_gone") == 1
    await eventually(lambda: at.front.plan.releaser._tasks == set())
    assert await at.count("coordinator_handovers_released_total", outcome="delivered") == 1


async def test_what_it_fetches_is_nobody_elses_prefix(coordinator, fleet, legs, leaves_between, eventually):
    """The blocks may be gone or another's by then, so the leg has a cache salt of its own."""
    at = await coordinator(fleet)
    await leaves_between(at, cache_salt="mine")
    [leg] = await eventually(lambda: legs(fleet.decode))
    assert leg.body["cache_salt"] not in (None, "", "mine")


@pytest.mark.parametrize("shape", ["openai", "text"])
async def test_a_decode_worker_that_is_gone_does_not_keep_the_handover_from_being_delivered(
    coordinator, fleet_of, leaves_between, eventually, shape
):
    """L01: no connection was had, so another worker may fetch it."""
    fleet = await fleet_of(decodes=2)
    at = await coordinator(fleet, shape)
    await fleet.decodes[0].refuse_connections()
    await leaves_between(at)
    await eventually(lambda: not fleet.store.unread)
    await leaves_between(at)
    await eventually(lambda: not fleet.store.unread)


@pytest.mark.parametrize("shape", ["openai", "text"])
async def test_a_delivery_whose_answer_breaks_off_is_not_made_again(
    coordinator, fleet_of, legs, leaves_between, eventually, shape
):
    """L07: the worker has read the blocks; a second reader would find another prompt's."""
    fleet = await fleet_of(decodes=2)
    at = await coordinator(fleet, shape)
    for worker in fleet.decodes:
        worker.behave.fault = Fault(truncate="cut")
    await leaves_between(at)
    await eventually(lambda: not at.front.plan.releaser._tasks)
    assert len([leg for worker in fleet.decodes for leg in legs(worker)]) == 1
    assert await at.count("coordinator_handovers_released_total", outcome="LegFailed") == 1


async def test_a_delivery_over_a_connection_that_had_died_is_made_again(
    coordinator, fleet, legs, leaves_between, eventually
):
    """L08: the worker has seen nothing of it."""
    at = await coordinator(fleet)
    await at.chat()
    fleet.decode.behave.next(Fault(drop=True))
    await leaves_between(at)
    await eventually(lambda: not fleet.store.unread)
    assert len(legs(fleet.decode)) == 3


async def test_a_storm_of_clients_who_leave_makes_no_storm_of_deliveries(coordinator, fleet, ask, legs, eventually):
    """A5: a bounded number at a time, and the others after them."""
    at = await coordinator(fleet)
    pause, passed = pause_before_decode(at), []
    fleet.decode.behave.fault = Fault(first_byte_s=0.3)

    async def leave():
        async with at.open(CHAT, ask()) as live:
            await eventually(lambda: len(fleet.store.unread) == 50)
            live.cut()
            passed.append(live)

    await asyncio.gather(*(leave() for _ in range(50)))
    await eventually(lambda: not at.front.in_flight)
    assert fleet.decode.in_flight <= 32
    await eventually(lambda: not at.in_flight())
    await eventually(lambda: at.count("coordinator_handovers_released_total", outcome="delivered"))
    await eventually(lambda: not fleet.store.unread)
    assert len(legs(fleet.decode)) == 50
    assert pause.reached.is_set()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shape", ["text", "derender", "unwrapped"])
async def test_a_decode_that_refuses_on_the_generate_route_strands_nothing(
    coordinator, fleet, legs, eventually, shape, stream
):
    """L05: the client gets the 400; prefill would keep its blocks, so a leg of one token fetches them."""
    at = await coordinator(fleet, shape)
    fleet.decode.behave.next(REFUSED)
    got = await at.chat(stream=stream)
    assert (got.status, got.error["message"]) == (400, "no")
    await eventually(lambda: not fleet.store.unread)
    assert len(set(handovers(legs(fleet.decode)))) == 1
    await eventually(lambda: not at.front.plan.releaser._tasks)
    assert await at.count("coordinator_handovers_released_total", outcome="delivered") == 1


@pytest.mark.parametrize("shape", ["openai", "text"])
async def test_a_handover_that_reached_nobody_goes_to_the_next_decode_worker(coordinator, fleet_of, legs, shape):
    """R08, L07: no connection was had, so it is still good; prefill runs once."""
    fleet = await fleet_of(decodes=2)
    at = await coordinator(fleet, shape)
    await fleet.decodes[0].refuse_connections()
    answers = [await at.chat() for _ in range(4)]
    assert [got.text for got in answers] == [HELLO] * 4
    assert len(legs(fleet.prefill)) == len(fleet.store.read) == 4


@pytest.mark.parametrize("shape", ["openai", "text"])
async def test_a_handover_that_no_decode_worker_could_be_asked_about_is_still_delivered_when_one_is_back(
    coordinator, fleet_of, legs, excuse, shape
):
    """R04: 503 with Retry-After; nothing was sent, and the attempt to deliver is counted."""
    excuse("unread", "no decode worker is there to fetch it")
    fleet = await fleet_of(decodes=2)
    at = await coordinator(fleet, shape)
    for worker in fleet.decodes:
        await worker.refuse_connections()
    got = await at.chat()
    assert (got.status, got.headers["Retry-After"]) == (503, "1")
    assert len(legs(fleet.prefill)) == 1
    for worker in fleet.decodes:
        await worker.accept_connections()
    assert (await at.chat()).text == HELLO


@pytest.mark.parametrize("shape", ["openai", "text"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_handover_that_has_grown_old_is_not_sent(
    coordinator, fleet, legs, wanted, excuse, ask, eventually, shape, stream
):
    """D1: prefill may have given the blocks away; the request begins again, under another id, with a fresh one."""
    excuse("unread", "too old to be fetched")
    at = await coordinator(fleet, shape, pipeline={"max_handover_age": "20ms"})
    pause = pause_before_decode(at)
    async with at.open(CHAT, ask(stream=stream)) as live:
        await eventually(pause.reached.is_set)
        await asyncio.sleep(0.03)
        pause.go.set()
        await live.head()
        got = await live.rest()
    assert (got.status, got.text) == (200, HELLO)
    [first, second] = legs(fleet.prefill)
    assert first.header("x-request-id") != second.header("x-request-id")
    [leg] = wanted(fleet.decode)
    assert handovers([leg])[0] in fleet.store.read
    assert await at.count("coordinator_handovers_missing_total", reason="too_old") == 1
    assert await at.count("coordinator_retries_total", step="prefill_again") == 1


@pytest.mark.parametrize("shape", ["openai", "text"])
async def test_a_prefill_worker_that_was_restarted_is_not_asked_for_what_it_had(
    coordinator, fleet_of, legs, excuse, shape
):
    """R11: decode cannot load from it and says 500; that hand-over goes to nobody else."""
    excuse("violations", "the blocks went with the prefill worker")
    fleet = await fleet_of(decodes=2)
    at = await coordinator(fleet, shape)
    pause = pause_before_decode(at)
    asking = asyncio.create_task(at.chat())
    await pause.reached.wait()
    fleet.store.unread.clear()
    pause.go.set()
    got = await asking
    assert (got.status, got.error["message"].partition(":")[0]) == (502, "decode")
    sent = handovers([leg for worker in fleet.decodes for leg in legs(worker)])
    assert len(sent) == 1


DOWN = {
    "refuses connections": None,
    "500": Fault(canned=Canned(500, "secret")),
    "503": Fault(canned=Canned(503, "secret")),
    "drops": Fault(drop=True),
    "never answers": Fault(hang=True),
    "no JSON": Fault(canned=Canned(200, "<html>")),
}


@pytest.mark.parametrize("shape", ["openai", "text", "derender"])
@pytest.mark.parametrize("policy", ["fail", "decode_alone"])
@pytest.mark.parametrize("what", DOWN)
async def test_a_prefill_that_is_down_fails_the_request_or_leaves_it_to_decode_as_the_file_says(
    coordinator, fleet, legs, shape, policy, what
):
    """D6, R04: decode alone is asked without transfer params and counted; nobody gets it without having said so."""
    at = await coordinator(
        fleet, shape, pipeline={"on_prefill_failure": policy}, steps={"prefill": {"first_byte_timeout": "100ms"}}
    )
    fleet.prefill.behave.fault = DOWN[what]
    if DOWN[what] is None:
        await fleet.prefill.refuse_connections()
    got = await at.chat()
    failed_over = await at.count("coordinator_prefills_failed_over_total")
    if policy == "fail":
        assert (got.status // 100, got.error["message"].partition(":")[0], failed_over) == (5, "prefill", 0)
        assert legs(fleet.decode) == []
        return
    assert (got.status, got.text, failed_over) == (200, HELLO, 1)
    [leg] = legs(fleet.decode)
    assert "kv_transfer_params" not in json.dumps(leg.body)


@pytest.mark.parametrize("shape", ["openai", "text"])
async def test_a_prompt_that_prefill_refuses_is_not_left_to_decode(coordinator, fleet, legs, shape):
    """D6: the client's own mistake is no failure of prefill."""
    at = await coordinator(fleet, shape, pipeline={"on_prefill_failure": "decode_alone"})
    fleet.prefill.behave.next(REFUSED)
    assert (await at.chat()).status == 400
    assert legs(fleet.decode) == []


async def test_a_client_who_leaves_while_decode_computes_alone_stops_it(coordinator, fleet, ask, eventually):
    """There is no hand-over, so nothing is delivered, and nothing lingers."""
    fleet.prefill.behave.fault = DOWN["500"]
    at = await coordinator(fleet, pipeline={"on_prefill_failure": "decode_alone"})
    fleet.decode.behave.itl_s = 0.05
    async with at.open(CHAT, ask("Never stop.", max_tokens=400)) as live:
        await eventually(lambda: fleet.decode.core.running)
        live.cut()
        assert await answer_or_nothing(live) is None
    await eventually(lambda: fleet.decode.aborted)
    assert await at.count("coordinator_handovers_released_total") == 0
