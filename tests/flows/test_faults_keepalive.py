"""Workers that close idle connections on their own clock: no client hears of it, however often and whichever leg."""

import asyncio

import pytest

from tests.flows.chaos import answer_once_per_connection

HELLO = "Hello! How can I help you today?"


@pytest.mark.parametrize("shape", ["openai", "text", "derender"])
async def test_a_thousand_requests_over_connections_that_have_died_are_all_answered(
    coordinator, fleet, wanted, excuse, ask, shape
):
    """L08: every kept connection is dead when it is used, on every leg; eight clients at a time, 340 requests a shape.

    A leg is sent once more on a new connection, or, with a hand-over, the request begins again at prefill; it must not
    be entrusted to another connection of the same age then.
    """
    at = await coordinator(fleet, shape)
    answer_once_per_connection(*fleet.workers)

    async def client(stream):
        return [await at.chat("Just say OK.", stream=stream) for _ in range(42)]

    answers = await asyncio.gather(*(client(number % 2 == 0) for number in range(8)))
    assert [got for some in answers for got in some if (got.status, got.whole, got.text) != (200, True, "OK")] == []
    assert await at.count("coordinator_stale_connections_total", role="prefill") > 100
    assert await at.count("coordinator_stale_connections_total", role="decode") > 100
    sent = [leg.body["kv_transfer_params"]["remote_request_id"] for leg in wanted(fleet.decode)]
    assert len(sent) == len(set(sent))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_began_again_takes_a_new_connection(coordinator, fleet, legs, excuse, ask, stream):
    """L07, L08: two kept connections have died; the first costs a prefill, the second nothing."""
    at = await coordinator(fleet)
    await asyncio.gather(at.chat(), at.chat())
    before = len(legs(fleet.decode))
    answer_once_per_connection(fleet.decode)
    await asyncio.gather(at.chat(), at.chat())  # each kept connection has served one more
    got = await at.chat(stream=stream)
    assert (got.status, got.text) == (200, HELLO)
    assert len(legs(fleet.decode)) - before == 4
