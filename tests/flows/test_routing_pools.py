"""Pools: which worker is picked, what counts against one, and how readiness is told."""

import asyncio

import pytest

from coordinator.sim import Canned, Fault, Settings


async def test_round_robin_takes_each_worker_in_its_turn(coordinator, fleet_of, legs):
    """Of both roles, whatever the requests cost."""
    fleet = await fleet_of(prefills=3, decodes=3)
    at = await coordinator(fleet)
    for _ in range(6):
        assert (await at.chat()).status == 200
    assert [len(legs(worker)) for worker in (*fleet.prefills, *fleet.decodes)] == [2] * 6


async def test_least_inflight_goes_round_the_busy_worker(coordinator, fleet_of, legs, ask, eventually):
    """A worker with a stream under way gets nothing while another has none."""
    fleet = await fleet_of(decodes=2, itl_s=0.05)
    at = await coordinator(fleet, pools={"decode": {"policy": "least_inflight"}})
    async with at.open("/v1/chat/completions", ask("Never stop.", stream=True, max_tokens=500)) as live:
        await live.head()
        [busy] = [worker for worker in fleet.decodes if legs(worker)]
        for worker in fleet.decodes:
            worker.behave.itl_s = 0.0
        for _ in range(5):
            await at.chat()
        assert len(legs(busy)) == 1
        live.cut()
    await eventually(lambda: not at.in_flight())
    for _ in range(4):
        await at.chat()
    assert len(legs(busy)) == 3


async def test_least_inflight_spreads_a_burst_evenly(coordinator, fleet, scripted, eventually):
    """Twelve at once on four workers are three each, as nobody ends before all have begun."""
    gate = asyncio.Event()
    workers = [await scripted([gate, *scripted.json({"choices": []})]) for _ in range(4)]
    pool = {"endpoints": [worker.url for worker in workers], "policy": "least_inflight"}
    at = await coordinator(fleet, "alone", pools={"decode": pool})
    asked = asyncio.gather(*(at.chat() for _ in range(12)))
    await eventually(lambda: sum(len(worker.received) for worker in workers) == 12)
    assert [len(worker.received) for worker in workers] == [3] * 4
    gate.set()
    await asked


@pytest.mark.parametrize("policy", ["round_robin", "least_inflight"])
async def test_fifty_refused_requests_do_not_cost_a_worker_its_place(coordinator, fleet, legs, policy):
    """R01: a 4xx is the client's; the 51st request reaches the worker."""
    at = await coordinator(fleet, "alone", pools={"decode": {"policy": policy}})
    fleet.decode.behave.next(Fault(canned=Canned(400, '{"error": {"message": "bad"}}')), times=50)
    assert {(await at.chat()).status for _ in range(50)} == {400}
    assert (await at.chat()).status == 200
    assert len(legs(fleet.decode)) == 51


async def test_readiness_is_told_from_memory(coordinator, fleet_of):
    """R05: a storm of probes makes no call to any worker."""
    fleet = await fleet_of(prefills=3, decodes=3)
    at = await coordinator(fleet)
    asked = [len(worker.received) for worker in fleet.workers]
    answers = await asyncio.gather(*(at.get("/readyz") for _ in range(200)))
    assert {(got.status, got.raw) for got in answers} == {(200, b"ok\n")}
    assert [len(worker.received) for worker in fleet.workers] == asked


@pytest.mark.parametrize("role", ["prefill", "decode", "render"])
async def test_readiness_names_the_role_that_cannot_be_reached(coordinator, fleet, eventually, role):
    """503 while all workers of a role are gone, 200 once one is back; the process itself is alive throughout."""
    at = await coordinator(fleet, "text", server={"readiness_interval": "20ms"})
    worker = getattr(fleet, role)
    await worker.refuse_connections()

    async def answers(status):
        got = await at.get("/readyz")
        return got if got.status == status else None

    got = await eventually(lambda: answers(503))
    assert got.raw.decode() == f"{role}: {worker.url} cannot be reached\n"
    assert (await at.get("/healthz")).status == 200
    await worker.accept_connections()
    await eventually(lambda: answers(200))


async def test_one_worker_of_a_role_suffices(coordinator, fleet_of, eventually):
    """A fleet that lost one of two decode workers is degraded and still of use."""
    fleet = await fleet_of(decodes=2)
    at = await coordinator(fleet, server={"readiness_interval": "20ms"})
    await fleet.decodes[0].refuse_connections()
    asked = len(fleet.decodes[1].received)
    await eventually(lambda: len(fleet.decodes[1].received) > asked + 2)
    assert (await at.get("/readyz")).status == 200


async def test_a_missing_flag_is_named_before_the_first_request_fails(coordinator, fleet_of, eventually):
    """H26: the tokens-in routes answer 403 without it."""
    fleet = await fleet_of(prefill_settings=Settings(scale_out=False))
    at = await coordinator(fleet, "text", server={"readiness_interval": "20ms"}, ready=False)

    async def told():
        return b"--enable-scale-out" in (await at.get("/readyz")).raw

    await eventually(told)
    got = await at.chat()
    assert (got.status, "--enable-scale-out" in got.error["message"]) == (502, True)
