"""How often is enough: retries are bounded for each leg, and together they are a share of all legs."""

import pytest

from coordinator.sim import Canned, Fault

HELLO = "Hello! How can I help you today?"
BUSY = Fault(canned=Canned(503, "busy"))
REQUESTS = 40
MOST = 10 + 0.2 * 3 * REQUESTS  # what is there at first, and what three legs of a request pay


def count(legs, workers):
    return sum(len(legs(worker)) for worker in workers)


@pytest.mark.parametrize("shape", ["openai", "text"])
async def test_an_outage_is_not_made_twice_as_bad_by_asking_everybody_twice(coordinator, fleet_of, legs, shape):
    """D5: while all prefill workers are busy, only a share of the legs is sent twice; nobody gets another answer."""
    fleet = await fleet_of(prefills=3)
    at = await coordinator(fleet, shape)
    for worker in fleet.prefills:
        worker.behave.fault = BUSY
    assert {(await at.chat()).status for _ in range(REQUESTS)} == {503}
    assert REQUESTS + 10 <= count(legs, fleet.prefills) <= REQUESTS + MOST
    assert await at.count("coordinator_retries_total", step="prefill") == count(legs, fleet.prefills) - REQUESTS


async def test_beginning_again_is_a_retry_too(coordinator, fleet_of, legs, excuse):
    """D5, D1: a decode outage does not double the load of prefill."""
    excuse("unread", "whether a decode that died had read the blocks, nobody can tell")
    fleet = await fleet_of(decodes=3)
    at = await coordinator(fleet)
    for worker in fleet.decodes:
        worker.behave.fault = Fault(truncate="cut")
    assert {(await at.chat()).status for _ in range(REQUESTS)} == {502}
    assert REQUESTS + 8 <= len(legs(fleet.prefill)) <= REQUESTS + MOST


async def test_the_budget_fills_up_again(coordinator, fleet_of, legs):
    """A spent budget is no state that stays: every leg pays a little in."""
    fleet = await fleet_of(prefills=2)
    at = await coordinator(fleet)
    at.upstream._budget._left = 0.0
    fleet.prefills[0].behave.fault = BUSY
    statuses = [(await at.chat()).status for _ in range(12)]
    assert 503 in statuses
    fleet.prefills[0].behave.clear()
    assert {(await at.chat()).status for _ in range(10)} == {200}
    fleet.prefills[0].behave.fault = BUSY
    assert [(await at.chat()).status for _ in range(2)] == [200, 200]


@pytest.mark.parametrize("attempts", [1, 2, 3])
async def test_a_leg_is_sent_to_so_many_workers_and_no_more(coordinator, fleet_of, legs, attempts):
    """``max_attempts``: 1 is no retry."""
    fleet = await fleet_of(prefills=4)
    at = await coordinator(fleet, steps={"prefill": {"max_attempts": attempts}})
    for worker in fleet.prefills:
        worker.behave.fault = BUSY
    assert (await at.chat()).status == 503
    asked = [len(legs(worker)) for worker in fleet.prefills]
    assert sorted(asked) == [0] * (4 - attempts) + [1] * attempts
    ids = [leg.header("x-request-id") for worker in fleet.prefills for leg in legs(worker)]
    assert len(set(ids)) == attempts


@pytest.mark.parametrize("shape", ["openai", "text"])
async def test_no_retry_is_no_beginning_again_either(coordinator, fleet_of, legs, excuse, shape):
    """``max_attempts: 1`` on decode: the client is told at once."""
    excuse("unread", "nobody looked at the blocks")
    fleet = await fleet_of(decodes=2)
    at = await coordinator(fleet, shape, steps={"decode": {"max_attempts": 1}})
    for worker in fleet.decodes:
        worker.behave.next(BUSY)
    assert (await at.chat()).status == 503
    assert (len(legs(fleet.prefill)), count(legs, fleet.decodes)) == (1, 1)


@pytest.mark.parametrize("shape", ["openai", "text"])
async def test_a_request_begins_again_once(coordinator, fleet_of, legs, excuse, shape):
    """L07: the second time, what decode says is final."""
    excuse("unread", "whether a decode that died had read the blocks, nobody can tell")
    fleet = await fleet_of(decodes=4)
    at = await coordinator(fleet, shape)
    for worker in fleet.decodes:
        worker.behave.fault = Fault(truncate="cut")
    got = await at.chat()
    assert (got.status, got.error["message"].partition(":")[0]) == (502, "decode")
    assert (len(legs(fleet.prefill)), count(legs, fleet.decodes)) == (2, 2)
    assert await at.count("coordinator_retries_total", step="prefill_again") == 1


async def test_a_worker_that_has_failed_a_request_is_not_asked_by_it_again(coordinator, fleet_of, legs, excuse):
    """L15: not by the prefill of its second beginning, either, while there is another."""
    excuse("unread", "whether a decode that died had read the blocks, nobody can tell")
    fleet = await fleet_of(prefills=2, decodes=2)
    at = await coordinator(fleet)
    fleet.prefills[0].behave.fault = BUSY
    fleet.decodes[0].behave.fault = Fault(truncate="cut")
    for name in "abcd":
        assert (await at.chat("Say hello.", ("X-Request-Id", name))).text == HELLO
        own = [leg for leg in legs(fleet.prefills[0]) if leg.header("x-request-id").startswith(name)]
        assert len(own) <= 1
    assert await at.count("coordinator_retries_total", step="prefill_again") > 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_fifty_refusals_take_no_worker_out(coordinator, fleet, legs, role):
    """R01: a 4xx is the client's; the next request is sent to the same worker."""
    at = await coordinator(fleet, "alone" if role == "decode" else "openai")
    worker = {"prefill": fleet.prefill, "decode": fleet.decode}[role]
    worker.behave.next(Fault(canned=Canned(400, '{"error": {"message": "no"}}')), times=50)
    assert {(await at.chat()).status for _ in range(50)} == {400}
    assert ((await at.chat()).status, len(legs(worker))) == (200, 51)
    assert await at.count("coordinator_retries_total") == 0
