"""Kept connections: a worker may close one at any moment, and no client hears of it."""

import asyncio

import pytest

from coordinator.sim import Fault

HELLO = "Hello! How can I help you today?"


@pytest.mark.parametrize("shape", ["openai", "text"])
async def test_a_prefill_that_met_a_dead_connection_is_sent_once_more(coordinator, fleet, legs, shape):
    """L08: the worker had closed it before any byte of the answer; the client sees nothing, the metric counts it."""
    at = await coordinator(fleet, shape)
    await at.chat()
    fleet.prefill.behave.next(Fault(drop=True))
    got = await at.chat()
    assert (got.status, got.text) == (200, HELLO)
    assert len(legs(fleet.prefill)) == 3
    assert await at.count("coordinator_stale_connections_total", role="prefill") == 1


async def test_a_decode_without_a_handover_is_sent_once_more_too(coordinator, fleet, legs):
    """L08: there is nothing that it could have read."""
    at = await coordinator(fleet, "alone")
    await at.chat()
    fleet.decode.behave.next(Fault(drop=True))
    assert (await at.chat(stream=True)).text == HELLO
    assert len(legs(fleet.decode)) == 3
    assert await at.count("coordinator_stale_connections_total", role="decode") == 1


async def test_a_second_connection_that_dies_is_the_workers_fault(coordinator, fleet, legs):
    """L08: once, and not for ever."""
    at = await coordinator(fleet)
    await at.chat()
    fleet.prefill.behave.next(Fault(drop=True), times=2)
    assert (await at.chat()).status == 502
    assert len(legs(fleet.prefill)) == 3


async def test_a_leg_that_breaks_on_a_fresh_connection_is_not_sent_to_that_worker_again(coordinator, fleet, scripted):
    """L08: the worker was there, took the request, and died of it or over it."""
    prefill = await scripted([scripted.CUT])
    at = await coordinator(fleet, pools={"prefill": {"endpoints": [prefill.url]}}, ready=False)
    # Readiness keeps a connection; this many requests at once cannot all have it.
    answers = await asyncio.gather(*(at.chat() for _ in range(5)))
    assert {got.status for got in answers} == {502}
    assert len(prefill.received) - await at.count("coordinator_stale_connections_total") == 5


async def test_a_worker_that_closes_after_every_answer_costs_no_client_an_error(coordinator, fleet, scripted):
    """L08: without telling so in a header, as a server does whose idle time is over."""
    answer = scripted.json({"error": {"message": "bad"}}, 400)
    decode = await scripted([*answer, scripted.END])
    at = await coordinator(fleet, "alone", pools={"decode": {"endpoints": [decode.url]}})
    for _ in range(50):
        assert (await at.chat()).status == 400
    # It answered each request once; those that it never saw were sent again.
    assert len(decode.received) == 50


async def test_a_connection_is_kept_between_requests(coordinator, fleet):
    """One after the other, they need one connection to each worker (and readiness one more at most)."""
    at = await coordinator(fleet)
    for _ in range(5):
        await at.chat()
        await at.chat(stream=True)
    assert fleet.prefill.connections <= 2
    assert fleet.decode.connections <= 2


async def test_a_handover_is_never_sent_twice_not_even_over_a_dead_connection(coordinator, fleet, legs, wanted, excuse):
    """L07: the request begins again at prefill, under another id, since the first decode may have read the blocks."""
    at = await coordinator(fleet)
    await at.chat()
    fleet.decode.behave.next(Fault(drop=True))
    got = await at.chat()
    assert (got.status, got.text) == (200, HELLO)
    sent = [leg.body["kv_transfer_params"]["remote_request_id"] for leg in wanted(fleet.decode)]
    assert (len(sent), len(set(sent))) == (3, 3)
    assert len({leg.header("x-request-id") for leg in legs(fleet.prefill)}) == 3
