"""A client that leaves: its legs are cut, so that no worker computes for nobody."""

import asyncio

import pytest

from coordinator.sim import Fault
from tests.flows.line import Line

CHAT = "/v1/chat/completions"


@pytest.fixture
def cut_when(eventually):
    async def cut(live, true):
        await eventually(true)
        live.cut()

    return cut


@pytest.mark.parametrize(
    ("path", "route"), [(CHAT, "chat"), ("/v1/messages/count_tokens", "count_tokens"), ("/pooling", "proxied")]
)
async def test_a_client_that_leaves_before_its_turn_is_told_of_as_any_other(
    coordinator, fleet, legs, ask, cut_when, eventually, path, route
):
    at = await coordinator(fleet, "alone", server={"proxied_routes": ["POST /pooling"]})
    at.front.turns = line = Line()
    async with at.open(path, ask()) as live:
        await cut_when(live, lambda: line.waiting)
        assert at.in_flight() == {"requests": 1}
    await eventually(lambda: not at.in_flight())
    line.go_on()
    assert await at.count("coordinator_requests_total") == 1
    assert await at.count("coordinator_requests_total", route=route, outcome="client_gone") == 1
    assert legs(fleet.decode) == []


@pytest.mark.parametrize("shape", ["openai", "text"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_prefill_has_answered_stops_prefill(
    coordinator, fleet, legs, ask, cut_when, eventually, shape, stream
):
    """L02: the worker sees its connection close and aborts; decode is never asked."""
    at = await coordinator(fleet, shape)
    fleet.prefill.behave.next(Fault(hang=True))
    async with at.open(CHAT, ask(stream=stream)) as live:
        await cut_when(live, lambda: legs(fleet.prefill))
    await eventually(lambda: fleet.prefill.aborted)
    await eventually(lambda: not at.in_flight())
    assert legs(fleet.decode) == []
    assert await at.count("coordinator_requests_total", outcome="client_gone") == 1


async def test_a_client_that_leaves_while_render_is_asked_stops_the_request_there(
    coordinator, fleet, legs, ask, cut_when, eventually
):
    """L02: the same for the first leg."""
    at = await coordinator(fleet, "text")
    fleet.render.behave.next(Fault(hang=True))
    async with at.open(CHAT, ask()) as live:
        await cut_when(live, lambda: legs(fleet.render))
    await eventually(lambda: fleet.render.aborted)
    assert legs(fleet.prefill) == []


@pytest.mark.parametrize("shape", ["openai", "text", "unwrapped", "alone"])
async def test_a_client_that_leaves_in_mid_stream_closes_the_connection_to_decode(
    coordinator, fleet, ask, eventually, shape
):
    """L03: after two events; the connection is closed, not kept for the next request, and the permit is back."""
    at = await coordinator(fleet, shape)
    fleet.decode.behave.fault = Fault(path="completions" if shape in ("openai", "alone") else "generate", itl_s=0.05)
    async with at.open(CHAT, ask("Never stop.", stream=True, max_tokens=400)) as live:
        await live.head()
        await live.event()
        await live.event()
        live.cut()
    await eventually(lambda: fleet.decode.aborted)
    await eventually(lambda: not at.in_flight())
    assert fleet.decode.core.running == {}
    assert await at.count("coordinator_requests_total", outcome="client_gone") == 1
    assert await at.count("coordinator_requests_total", outcome="ok") == 0


@pytest.mark.parametrize("shape", ["openai", "text", "derender", "alone"])
async def test_a_client_that_leaves_while_a_whole_answer_is_computed_stops_decode(
    coordinator, fleet, legs, ask, cut_when, eventually, shape
):
    """L04: nothing is written meanwhile that could fail, so the client's connection itself is watched."""
    at = await coordinator(fleet, shape)
    fleet.decode.behave.itl_s = 0.05
    async with at.open(CHAT, ask("Never stop.", max_tokens=400)) as live:
        await cut_when(live, lambda: fleet.decode.core.running)
    await eventually(lambda: fleet.decode.aborted)
    await eventually(lambda: not at.in_flight())
    assert fleet.decode.core.running == {}


async def test_a_streaming_client_of_derender_that_leaves_stops_decode(coordinator, fleet, ask, cut_when, eventually):
    """L04: the leg is unstreamed although the client's request is a stream; heartbeats are being written meanwhile."""
    at = await coordinator(fleet, "derender", server={"heartbeat_after": "10ms", "heartbeat_interval": "10ms"})
    fleet.decode.behave.itl_s = 0.05
    async with at.open(CHAT, ask("Never stop.", stream=True, max_tokens=400)) as live:
        await live.head()
        assert await live.event() == b": keep-alive"
        await cut_when(live, lambda: fleet.decode.core.running)
    await eventually(lambda: fleet.decode.aborted)
    assert fleet.decode.core.running == {}


async def test_half_a_close_by_the_client_is_a_leave_too(coordinator, fleet, ask, eventually):
    """L04: a FIN is all that an SDK sends when it gives up; nobody waits for an answer behind it."""
    at = await coordinator(fleet)
    fleet.decode.behave.itl_s = 0.05
    async with at.open(CHAT, ask("Never stop.", max_tokens=400)) as live:
        await eventually(lambda: fleet.decode.core.running)
        live.finish()
        await eventually(lambda: fleet.decode.aborted)


async def test_fifty_clients_that_leave_in_mid_stream_are_not_the_workers_fault(coordinator, fleet, ask, eventually):
    """R02: the next client is answered by the same worker, and no permit is lost."""
    at = await coordinator(fleet)
    fleet.decode.behave.itl_s = 0.05

    async def leave():
        async with at.open(CHAT, ask("Never stop.", stream=True, max_tokens=100)) as live:
            await live.head()
            await live.event()
            live.cut()

    await asyncio.gather(*(leave() for _ in range(50)))
    await eventually(lambda: len(fleet.decode.aborted) == 50)
    await eventually(lambda: not at.in_flight())
    fleet.decode.behave.itl_s = 0.0
    assert (await at.chat()).status == 200


@pytest.mark.parametrize("at_byte", [0, 1, 40])
async def test_a_client_that_leaves_in_the_middle_of_its_own_request_costs_no_leg(
    coordinator, fleet, legs, eventually, at_byte
):
    """A body that never came whole is nobody's request."""
    at = await coordinator(fleet)
    async with at.open(CHAT, b"{" * at_byte, headers=[("Content-Length", "1000")]) as live:
        await eventually(lambda: at.front.in_flight)
        live.cut()
    await eventually(lambda: not at.front.in_flight)
    assert legs(fleet.prefill) == []


async def test_two_requests_with_the_same_id_at_once_are_told_apart_by_the_workers(
    coordinator, fleet, legs, ask, eventually
):
    """L20: both are answered and see their own id; every leg of one request has one id, of two requests two."""
    at = await coordinator(fleet)
    same = ("X-Request-Id", "same")
    first, second = await asyncio.gather(at.chat("Say hello.", same), at.chat("Just say OK.", same, stream=True))
    assert (first.status, first.text, second.status, second.text) == (
        200,
        "Hello! How can I help you today?",
        200,
        "OK",
    )
    assert [got.headers["X-Request-Id"] for got in (first, second)] == ["same", "same"]
    ids = [{leg.header("x-request-id") for leg in legs(worker)} for worker in (fleet.prefill, fleet.decode)]
    assert ids[0] == ids[1]
    assert len(ids[0]) == 2
    assert all(leg_id.startswith("same-") for leg_id in ids[0])
