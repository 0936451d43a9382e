"""Workers that fail are left out for a while, and what is no fault of theirs costs them nothing."""

import asyncio

import pytest

from coordinator.sim import Canned, Fault

CHAT = "/v1/chat/completions"
BROKEN = Fault(path=CHAT, canned=Canned(500, '{"error": {"message": "CUDA error", "code": 500}}'))
FULL = Fault(
    path=CHAT, canned=Canned(503, '{"error": {"message": "full", "type": "Service Unavailable", "code": 503}}')
)
REFUSED = Fault(path=CHAT, canned=Canned(400, '{"error": {"message": "bad", "type": "BadRequestError", "code": 400}}'))


def pool(failures=2, **keys):
    return {"decode": {"health": {"failures": failures, "ejection_time": "50ms", **keys}}}


@pytest.fixture
def states():
    """``await states(at)`` is how many decode workers there are in each state, without those in none."""

    async def of(at):
        found = await at.metrics("coordinator_workers{")
        named = {state: f'coordinator_workers{{role="decode",state="{state}"}}' for state in STATES}
        return {state: found[name] for state, name in named.items() if found[name]}

    return of


STATES = ("well", "trial", "ejected", "down", "leaving")


async def test_a_worker_whose_engine_fails_is_left_out_and_comes_back_when_a_leg_goes_well(
    coordinator, fleet_of, legs, states, eventually
):
    """Its server answers /health all the while; only its legs tell."""
    fleet = await fleet_of(decodes=2)
    at = await coordinator(fleet, "alone", pools=pool(ejection_time="1m"))
    ill, _ = fleet.decodes
    ill.behave.fault = BROKEN
    statuses = [(await at.chat()).status for _ in range(12)]
    assert (statuses.count(502), statuses.count(200), len(legs(ill))) == (2, 10, 2)
    assert await states(at) == {"well": 1, "ejected": 1}
    assert await at.count("coordinator_ejections_total", role="decode") == 1


async def test_on_trial_a_worker_that_still_fails_is_out_again_and_one_that_is_well_is_used(
    coordinator, fleet_of, legs, states, eventually
):
    fleet = await fleet_of(decodes=2)
    at = await coordinator(fleet, "alone", pools=pool())
    ill, _ = fleet.decodes
    ill.behave.fault = BROKEN

    async def another_leg(before):
        await at.chat()
        return len(legs(ill)) > before

    await eventually(lambda: another_leg(1))
    await eventually(lambda: another_leg(2))
    assert await at.count("coordinator_ejections_total", role="decode") == 2
    ill.behave.fault = None
    await eventually(lambda: another_leg(3))
    assert await states(at) == {"well": 2}
    before = len(legs(ill))
    for _ in range(6):
        assert (await at.chat()).status == 200
    assert len(legs(ill)) == before + 3


async def test_answers_that_break_off_count_also_behind_the_first_event(coordinator, fleet_of, legs, states):
    fleet = await fleet_of(decodes=2)
    at = await coordinator(fleet, "alone", pools=pool(ejection_time="1m"))
    ill, _ = fleet.decodes
    for fault in (Fault(path=CHAT, die_after=2), Fault(path=CHAT, end_after=2), Fault(path=CHAT, error_after=2)):
        ill.behave.next(fault)
    wholes = [(await at.chat(stream=True)).whole for _ in range(6)]
    assert (wholes.count(False), len(legs(ill))) == (2, 2)
    assert await states(at) == {"well": 1, "ejected": 1}


@pytest.mark.parametrize("fault", [REFUSED, FULL], ids=["400", "queue full"])
async def test_a_refusal_is_no_failure(coordinator, fleet_of, legs, states, fault):
    """R01, E1: 4xx are the clients'; a worker whose queue is full is a busy worker, and a retry goes elsewhere."""
    fleet = await fleet_of(decodes=2)
    at = await coordinator(fleet, "alone", pools=pool(failures=1, ejection_time="1m"))
    first, second = fleet.decodes
    first.behave.fault = fault
    for _ in range(50):
        await at.chat()
    assert await states(at) == {"well": 2}
    assert len(legs(first)) == 25 and len(legs(second)) >= 25


async def test_clients_that_leave_are_nobody_s_fault(coordinator, fleet_of, ask, states, eventually):
    """R02: fifty that leave in mid-stream put nobody out, though one failure would."""
    fleet = await fleet_of(decodes=2, itl_s=0.05)
    at = await coordinator(fleet, "alone", pools=pool(failures=1, ejection_time="1m"))

    async def leave():
        async with at.open(CHAT, ask("Never stop.", stream=True, max_tokens=100)) as live:
            await live.head()
            await live.event()
            live.cut()

    await asyncio.gather(*(leave() for _ in range(50)))
    await eventually(lambda: not at.in_flight())
    assert await states(at) == {"well": 2}


async def test_a_kept_connection_that_had_died_is_no_failure(coordinator, fleet, states):
    """The worker closed it on its own clock; the request begins again over a new one."""
    at = await coordinator(fleet, "alone", pools=pool(failures=1, ejection_time="1m"))
    assert (await at.chat()).status == 200
    await fleet.decode.refuse_connections()
    await fleet.decode.accept_connections()
    assert (await at.chat()).status == 200
    assert await states(at) == {"well": 1}


async def test_a_worker_that_is_gone_is_found_out_without_a_request(coordinator, fleet_of, states, eventually):
    """/health is asked anyway: no request has to fail first, and none is retried afterwards."""
    fleet = await fleet_of(decodes=2)
    at = await coordinator(fleet, "alone", pools=pool(), server={"readiness_interval": "20ms"})
    gone, _ = fleet.decodes
    await gone.refuse_connections()

    async def is_told(*wanted):
        return await states(at) == dict(wanted)

    await eventually(lambda: is_told(("well", 1), ("down", 1)))
    assert {(await at.chat()).status for _ in range(6)} == {200}
    assert await at.count("coordinator_retries_total") == 0
    await gone.accept_connections()
    await eventually(lambda: is_told(("well", 2)))


async def test_a_pool_of_which_all_fail_goes_on_trying(coordinator, fleet_of, states):
    """R04: the threshold lets all be used, so the client is told at once and the first that recovers is found."""
    fleet = await fleet_of(decodes=2)
    at = await coordinator(fleet, "alone", pools=pool(failures=1, ejection_time="1m"))
    for worker in fleet.decodes:
        await worker.refuse_connections()
    for _ in range(4):
        got = await at.chat()
        assert (got.status, got.headers["Retry-After"]) == (503, "1")
        assert "no decode worker could be reached" in got.error["message"]
    assert await states(at) == {"ejected": 2}
    for worker in fleet.decodes:
        await worker.accept_connections()
    assert (await at.chat()).status == 200
    assert await states(at) == {"well": 1, "ejected": 1}


async def test_without_workers_a_request_is_told_when_to_come_back(coordinator, fleet, eventually):
    """Workers may be found later; until then 503 with Retry-After, and not ready."""
    at = await coordinator(fleet, "alone", server={"readiness_interval": "20ms"})
    members = at.upstream.links["decode"].router.members
    urls = [worker.url for worker in members.workers]
    members.replace([])
    got = await at.chat()
    assert (got.status, got.headers["Retry-After"]) == (503, "1")
    assert "there is no decode worker" in got.error["message"]

    async def readyz():
        return (await at.get("/readyz")).raw.decode()

    async def says(text):
        return await readyz() == text

    await eventually(lambda: says("decode: there are no workers\n"))
    members.replace(urls)
    assert (await at.chat()).status == 200
    await eventually(lambda: says("ok\n"))


async def test_a_worker_that_leaves_ends_its_streams_and_gets_no_more(
    coordinator, fleet_of, legs, ask, states, eventually
):
    fleet = await fleet_of(decodes=2, itl_s=0.02)
    at = await coordinator(fleet, "alone")
    members = at.upstream.links["decode"].router.members
    async with at.open(CHAT, ask("Never stop.", stream=True, max_tokens=60)) as live:
        await live.head()
        await live.event()
        [leaving] = [worker for worker in fleet.decodes if worker.in_flight]
        [other] = [worker for worker in fleet.decodes if worker is not leaving]
        members.replace([other.url])
        assert await states(at) == {"well": 1, "leaving": 1}
        for _ in range(4):
            assert (await at.chat()).status == 200
        got = await live.rest()
    assert got.whole and got.events[-1] == "[DONE]"
    assert (len(legs(leaving)), len(legs(other))) == (1, 4)
    await eventually(lambda: not members.leaving)
