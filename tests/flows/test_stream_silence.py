"""Silence in a stream: comment lines keep the client's connection alive, and cost the status line of a later error."""

import asyncio
import json

import pytest

from coordinator.sim import ABSENT, Canned, Fault
from coordinator.sim.faults import echo

CHAT = "/v1/chat/completions"
BEAT = b": keep-alive"
OFTEN = {"heartbeat_after": "20ms", "heartbeat_interval": "20ms"}
DONE = b"data: [DONE]\n\n"


def delta(content):
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": content}}]}).encode() + b"\n\n"


async def test_comment_lines_come_before_the_first_event_and_between_events(says, scripted, ask):
    """S25: they have no id, are no data, and every event arrives as it was sent."""
    first, second = asyncio.Event(), asyncio.Event()
    at, _ = await says(scripted.sse(first, delta("a"), second, delta("b"), DONE), server=OFTEN)
    async with at.open(CHAT, ask(stream=True)) as live:
        await live.head()
        assert (live.status, live.headers["Content-Type"]) == (200, "text/event-stream; charset=utf-8")
        assert [await live.event() for _ in "123"] == [BEAT] * 3
        first.set()
        while (block := await live.event()) == BEAT:
            pass
        assert block == delta("a").strip()
        assert [await live.event() for _ in "12"] == [BEAT] * 2
        second.set()
        got = await live.rest()
    assert (got.text, got.whole, got.events[-1]) == ("ab", True, "[DONE]")
    assert set(got.blocks) == {BEAT, delta("a").strip(), delta("b").strip(), DONE.strip()}


@pytest.mark.parametrize("leg", ["render", "prefill", "decode"])
@pytest.mark.parametrize("shape", ["text", "derender"])
async def test_the_heart_beats_whichever_leg_is_slow(coordinator, fleet, ask, shape, leg):
    """S25: a long prefill, or a derender leg that is answered whole, is silence to the client."""
    at = await coordinator(fleet, shape, server=OFTEN)
    getattr(fleet, leg).behave.next(Fault(first_byte_s=0.2))
    got = await at.chat(stream=True)
    assert (got.status, got.whole, got.text) == (200, True, "Hello! How can I help you today?")
    assert got.blocks[0] == BEAT
    assert got.headers["X-Request-Id"]


async def test_a_whole_answer_has_no_heartbeats(coordinator, fleet):
    """JSON has no comments: the client waits, and its status is the true one."""
    at = await coordinator(fleet, server=OFTEN)
    fleet.decode.behave.next(Fault(first_byte_s=0.1))
    got = await at.chat()
    assert (got.status, got.raw[:1]) == (200, b"{")


async def test_a_quick_answer_sees_no_heartbeat(coordinator, fleet):
    """They begin after ``heartbeat_after``, so that an early error keeps its status."""
    at = await coordinator(fleet, server={"heartbeat_after": "5s"})
    got = await at.chat(stream=True)
    assert BEAT not in got.raw


async def test_comment_lines_of_a_worker_pass_without_our_own(says, scripted, ask):
    """S25: they are relayed at once, not held until the event behind them."""
    gate = asyncio.Event()
    at, _ = await says(scripted.sse(delta("a"), b": ping\n", gate, delta("b"), DONE))
    async with at.open(CHAT, ask(stream=True)) as live:
        await live.head()
        while b": ping\n" not in live.raw:
            await live.read()
        gate.set()
        got = await live.rest()
    assert got.raw == delta("a") + b": ping\n" + delta("b") + DONE


async def test_an_error_before_the_first_heartbeat_keeps_its_status(coordinator, fleet):
    """The status line is spent by the first comment and not sooner."""
    at = await coordinator(fleet, server={"heartbeat_after": "5s"})
    fleet.prefill.behave.next(Fault(canned=Canned(400, '{"error": {"message": "too long"}}')))
    assert (await at.chat(stream=True)).status == 400


LATE = {
    "prefill 400": ("prefill", Fault(first_byte_s=0.15, canned=Canned(400, '{"error": {"message": "too long"}}')), 400),
    "prefill 500": ("prefill", Fault(first_byte_s=0.15, canned=Canned(500, "secret")), 502),
    "prefill 503": ("prefill", Fault(first_byte_s=0.15, canned=Canned(503, "secret")), 503),
    "render not JSON": ("render", Fault(first_byte_s=0.15, canned=Canned(200, "<secret>")), 502),
    "decode in another mode": ("decode", Fault(first_byte_s=0.15, rewrite=echo(ABSENT)), 502),
}


@pytest.mark.parametrize("shape", ["text", "derender"])
@pytest.mark.parametrize(("leg", "fault", "code"), LATE.values(), ids=LATE)
async def test_an_error_after_a_heartbeat_is_an_event_and_a_broken_end(coordinator, fleet, shape, leg, fault, code):
    """The event has the body that the error's own answer would have had, but for 4xx of a worker: its words."""
    at = await coordinator(fleet, shape, server=OFTEN)
    getattr(fleet, leg).behave.fault = fault
    got = await at.chat(stream=True)
    assert (got.status, got.whole, got.blocks[0]) == (200, False, BEAT)
    assert [list(event) for event in got.events] == [["error"]]
    error = got.events[0]["error"]
    assert b"secret" not in got.raw
    assert "too long" in error["message"] if code == 400 else error["code"] == code
    assert await at.count("coordinator_requests_total", outcome="ok") == 0


@pytest.mark.parametrize(
    ("path", "kind"), [("/v1/messages", b"event: error"), ("/v1/responses", b"event: "), ("/v1/completions", b"data: ")]
)
async def test_every_api_is_told_of_a_late_error_in_its_own_grammar(coordinator, fleet, path, kind):
    """An SDK that does not know the event takes the stream for a finished one."""
    at = await coordinator(fleet, server=OFTEN)
    fleet.prefill.behave.next(Fault(first_byte_s=0.15, canned=Canned(500, "secret")))
    bodies = {
        "/v1/messages": {"max_tokens": 9, "messages": [{"role": "user", "content": "Say hello."}]},
        "/v1/responses": {"input": "Say hello."},
        "/v1/completions": {"prompt": "Say hello."},
    }
    got = await at.post(path, {"model": "tiny", "stream": True, **bodies[path]})
    assert (got.status, got.whole) == (200, False)
    assert got.blocks[-1].startswith(kind)
    assert "502" in got.blocks[-1].decode() or "prefill" in got.blocks[-1].decode()


async def test_no_heartbeat_follows_the_end_of_a_stream_that_is_read_slowly(says, scripted, ask, eventually):
    """What is written behind the last chunk would be taken for the head of the connection's next answer."""
    # The second event keeps the end from being sent, and is too small to be waited for by itself.
    large, last = delta("x" * 8_000_000), delta("y" * 60_000) + DONE
    at, _ = await says(scripted.sse(large, last), server=OFTEN)
    async with at.open(CHAT, ask(stream=True), window=2**14) as live:
        await eventually(lambda: at.unsent() > 1_000_000)
        raw = await live.pull(2**14)
        while at.unsent() > 100_000:
            raw += await live.pull(2**14)
        await asyncio.sleep(0.2)  # ten heartbeats
        while piece := await live.pull(2**20):
            raw += piece
    assert raw.endswith(b"\r\n0\r\n\r\n")
    assert BEAT not in raw.partition(b"[DONE]")[2]


async def test_a_client_that_leaves_between_heartbeats_frees_its_workers(coordinator, fleet, ask, eventually):
    """The heart is not what keeps a request alive."""
    at = await coordinator(fleet, server=OFTEN)
    fleet.prefill.behave.next(Fault(hang=True))
    async with at.open(CHAT, ask(stream=True)) as live:
        await live.head()
        await live.event()
        live.cut()
    await eventually(lambda: fleet.prefill.aborted)
    await eventually(lambda: not at.in_flight())
