"""What prefill keeps for a decode that does not come: it is fetched all the same, so that its blocks are free again."""

import pytest

from coordinator.sim import Fault, Settings
from tests.flows.chaos import pause_before_decode

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("shape", ["openai", "text", "derender"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_between_prefill_and_decode_leaves_nothing_on_prefill(
    coordinator, fleet, legs, ask, eventually, shape, stream
):
    """L01: exactly one decode leg goes out with the hand-over; it asks for one token, and nobody waits for it."""
    at = await coordinator(fleet, shape)
    pause = pause_before_decode(at)
    async with at.open(CHAT, ask(stream=stream, max_tokens=50)) as live:
        await eventually(pause.reached.is_set)
        live.cut()
    await eventually(lambda: fleet.store.read)
    assert len(legs(fleet.decode)) == 1
    body = legs(fleet.decode)[0].body
    assert (body.get("sampling_params") or body)["max_tokens"] == 1
    assert not body.get("stream")
    await eventually(lambda: at.count("coordinator_handovers_released_total", outcome="delivered"))
    assert await at.count("coordinator_requests_total", outcome="client_gone") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_decode_that_refuses_on_the_generate_route_leaves_nothing_on_prefill(
    coordinator, fleet_of, legs, eventually, stream
):
    """L05: the client gets the 400, and what this route does not free is fetched by a leg of its own."""
    fleet = await fleet_of(decode_settings=Settings(max_logprobs=2))
    at = await coordinator(fleet, "text")
    got = await at.chat(stream=stream, logprobs=True, top_logprobs=5)
    assert (got.status, "logprobs" in got.error["message"]) == (400, True)
    await eventually(lambda: fleet.store.read)
    await eventually(lambda: at.count("coordinator_handovers_released_total", outcome="delivered"))


async def test_a_decode_that_refuses_on_an_openai_route_has_told_prefill_itself(coordinator, fleet_of, legs):
    """L05: a second leg with that hand-over would read blocks that are given to another prompt by then."""
    fleet = await fleet_of(decode_settings=Settings(max_logprobs=2))
    at = await coordinator(fleet)
    got = await at.chat(logprobs=True, top_logprobs=5)
    assert got.status == 400
    assert (len(fleet.store.freed), len(legs(fleet.decode))) == (1, 1)


@pytest.mark.parametrize("shape", ["openai", "derender"])
async def test_a_client_that_leaves_just_before_prefill_is_over_leaves_nothing_on_it(
    coordinator, fleet, legs, ask, eventually, shape
):
    """L02, L01: the answer was on its way when the connection would have been closed, so it is waited for a moment."""
    at = await coordinator(fleet, shape)
    fleet.prefill.behave.next(Fault(first_byte_s=0.1))
    async with at.open(CHAT, ask(max_tokens=50)) as live:
        await eventually(lambda: legs(fleet.prefill))
        live.cut()
    await eventually(lambda: fleet.store.read)
    assert len(legs(fleet.decode)) == 1
    assert await at.count("coordinator_requests_total", outcome="client_gone") == 1
    await eventually(lambda: at.count("coordinator_handovers_released_total", outcome="delivered"))
