"""A request that is given up at any moment whatever gives back all that it holds."""

import pytest

from coordinator.sim import Fault
from tests.flows.chaos import Cancelling, answer_or_nothing, hang_up

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("shape", ["openai", "text", "derender", "unwrapped"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kept", [True, False], ids=["kept connections", "fresh connections"])
async def test_a_request_that_is_cancelled_at_any_moment_gives_everything_back(
    coordinator, fleet_of, excuse, ask, eventually, shape, stream, kept
):
    """R06, A8: cancelled after one turn of the event loop, after two, .. until it is answered before.

    No permit, connection or gauge is lost, and no hand-over read twice: not by a leg that goes on when its client has
    left, either.
    """
    excuse("unread", "prefill may have answered already when its connection is closed")
    fleet = await fleet_of(prefills=2, decodes=2)
    at = await coordinator(fleet, shape)
    cancelling = Cancelling(at)
    while True:
        cancelling.turns += 1
        async with at.open(CHAT, ask(stream=stream)) as live:
            got = await answer_or_nothing(live)
        await eventually(lambda: not at.in_flight())
        await eventually(lambda: not any(worker.in_flight for worker in fleet.workers))
        assert fleet.store.violations == []
        if not cancelling.reached:
            break
        if not kept:
            await hang_up(*fleet.workers)
    assert (got.status, cancelling.turns > 10) == (200, True)
    assert await at.count("coordinator_requests_total") == cancelling.turns
    assert await at.count("coordinator_requests_total", outcome="ok") >= 1


@pytest.mark.parametrize("shape", ["openai", "text", "unwrapped"])
async def test_a_stream_that_decode_opens_behind_a_client_who_has_left_is_closed(
    coordinator, fleet, legs, ask, eventually, shape
):
    """L03, A3: the leg is held for a moment, so that the worker may fetch the hand-over, its stream for no longer."""
    at = await coordinator(fleet, shape)
    fleet.decode.behave.next(Fault(first_byte_s=0.03, itl_s=0.05))
    async with at.open(CHAT, ask("Never stop.", stream=True, max_tokens=400)) as live:
        await eventually(lambda: legs(fleet.decode))
        live.cut()
    await eventually(lambda: fleet.decode.aborted)
    await eventually(lambda: not at.in_flight())
    assert fleet.decode.core.running == {}
