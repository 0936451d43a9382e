"""A leg that fails on the worker's side: who is asked next, and what must not be sent again."""

import json

import pytest

from coordinator.sim import Canned, Fault

HELLO = "Hello! How can I help you today?"
REFUSED = {"error": {"message": "too long", "type": "BadRequestError", "param": "messages", "code": 400}}

PASSING = {
    "503": Fault(canned=Canned(503, "busy")),
    "502": Fault(canned=Canned(502, "busy")),
    "504": Fault(canned=Canned(504, "busy")),
    "no bytes": Fault(drop=True),
}


@pytest.mark.parametrize("shape", ["openai", "text"])
@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
async def test_another_prefill_worker_is_asked_when_one_is_of_no_use(coordinator, fleet_of, legs, shape, fault):
    """L15: two attempts on different workers, whose ids differ; one decode; the client gets a 200."""
    fleet = await fleet_of(prefills=2)
    fleet.prefills[0].behave.fault = fault
    at = await coordinator(fleet, shape)
    got = await at.chat()
    assert (got.status, got.text) == (200, HELLO)
    attempts = [leg for worker in fleet.prefills for leg in legs(worker)]
    assert len({leg.header("x-request-id") for leg in attempts}) == len(attempts) == 2
    assert (len(legs(fleet.decode)), len(fleet.store.read)) == (1, 1)


async def test_a_prefill_worker_that_is_gone_is_gone_round(coordinator, fleet_of):
    """L15: nothing was sent to it."""
    fleet = await fleet_of(prefills=2)
    at = await coordinator(fleet)
    await fleet.prefills[0].refuse_connections()
    assert [(await at.chat()).status for _ in range(6)] == [200] * 6


@pytest.mark.parametrize("shape", ["openai", "text"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_decode_that_dies_over_a_handover_makes_the_request_begin_again(
    coordinator, fleet_of, legs, wanted, excuse, shape, stream
):
    """L07: the hand-over may have been read, so it is never sent twice: another prefill, another decode worker."""
    excuse("unread", "whether the decode that died had read the blocks, nobody can tell")
    fleet = await fleet_of(decodes=2)
    fleet.decodes[0].behave.fault = Fault(drop=True)
    at = await coordinator(fleet, shape)
    got = await at.chat(stream=stream)
    assert (got.status, got.whole, got.text) == (200, True, HELLO)
    assert len(legs(fleet.prefill)) == 2
    sent = [leg.body["kv_transfer_params"]["remote_request_id"] for worker in fleet.decodes for leg in wanted(worker)]
    assert len(sent) == len(set(sent)) == 2


@pytest.mark.parametrize("shape", ["openai", "text"])
async def test_a_decode_that_is_busy_makes_another_one_answer(coordinator, fleet_of, excuse, shape):
    """R08: whichever way the hand-over takes, the client is answered and nothing is read twice."""
    if shape == "openai":
        excuse("unread", "vLLM tells prefill to let go when it refuses on this route, and a canned refusal does not")
    fleet = await fleet_of(decodes=2)
    fleet.decodes[0].behave.next(Fault(canned=Canned(503, "busy")))
    at = await coordinator(fleet, shape)
    got = await at.chat()
    assert (got.status, got.text) == (200, HELLO)


@pytest.mark.parametrize("shape", ["openai", "text"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_refusal_is_final(coordinator, fleet_of, legs, excuse, shape, role):
    """L14: no worker would take it, and the client must see its own mistake."""
    excuse("unread", "a canned refusal frees nothing")
    fleet = await fleet_of(prefills=2, decodes=2)
    at = await coordinator(fleet, shape)
    for worker in {"prefill": fleet.prefills, "decode": fleet.decodes}[role]:
        worker.behave.next(Fault(canned=Canned(400, json.dumps(REFUSED))))
    got = await at.chat()
    assert (got.status, got.body) == (400, REFUSED)
    assert sum(len(legs(worker)) for worker in fleet.prefills) == 1


@pytest.mark.parametrize("shape", ["openai", "text"])
async def test_a_stream_that_has_begun_is_never_begun_again(coordinator, fleet_of, legs, shape):
    """S09: the client has read half an answer, and another worker's would not go on with it."""
    fleet = await fleet_of(decodes=2)
    fleet.decodes[0].behave.fault = Fault(die_after=4)
    at = await coordinator(fleet, shape)
    got = await at.chat("Count to 20.", stream=True)
    assert (got.status, got.whole) == (200, False)
    assert (len(legs(fleet.decodes[0])), len(legs(fleet.decodes[1]))) == (1, 0)
