"""Many streams at once, and a client that does not read: nothing is queued, and nothing piles up."""

import asyncio
import json
import resource

import pytest

CHAT = "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"


def delta(content):
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": content}}]}).encode() + b"\n\n"


@pytest.fixture
def many_files():
    """Four sockets for each request, all of them in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_three_hundred_streams_reach_the_worker_at_once(says, scripted, many_files, eventually):
    """H14: an HTTP client's usual limit of 100 connections would make the others wait for somebody's answer."""
    gate = asyncio.Event()
    at, decode = await says(scripted.sse(delta("a"), gate, delta("b"), DONE))
    asked = asyncio.gather(*(at.chat(stream=True) for _ in range(300)))
    await eventually(lambda: len(decode.received) == 300)
    assert await at.count("coordinator_requests_in_flight", route="chat") == 300
    gate.set()
    assert {(got.status, got.whole, got.text) for got in await asked} == {(200, True, "ab")}


async def test_three_hundred_requests_go_through_both_legs_at_once(coordinator, fleet, many_files):
    """H14: and every hand-over is read once."""
    at = await coordinator(fleet, "text")
    answers = await asyncio.gather(*(at.chat("Count to 20.", stream=True, max_tokens=5) for _ in range(300)))
    assert {(got.status, got.whole, got.text) for got in answers} == {(200, True, "1, 2,")}
    assert len(set(fleet.store.read)) == 300


MANY = 50 * 2**20  # more than all socket buffers on the way can hold


@pytest.mark.parametrize("shape", ["alone", "unwrapped"])
async def test_a_client_that_does_not_read_stops_the_worker_and_costs_no_memory(says, scripted, ask, eventually, shape):
    """S27: the worker can write what sockets hold and no more, and the coordinator keeps next to nothing."""
    if shape == "alone":
        event = delta("x" * 2**16)
    else:
        choice = {"index": 0, "text": "x" * 2**16, "token_ids": [1], "finish_reason": None}
        event = b"data: " + json.dumps({"output_mode": "text", "choices": [choice]}).encode() + b"\n\n"
    at, decode = await says(scripted.sse(*[event] * (MANY // 2**16), DONE), shape=shape)
    async with at.open(CHAT, ask(stream=True), window=2**14) as live:
        await live.pull(2**10)
        before = -1
        while decode.written != before:
            before = decode.written
            await asyncio.sleep(0.2)
        assert decode.written < MANY / 2
        assert at.unsent() < 2**20
        live.cut()
    await eventually(lambda: not decode.open)
    await eventually(lambda: not at.in_flight())


async def test_a_client_that_reads_slowly_gets_all_of_it(says, scripted, ask):
    """S27: the worker is paused and goes on; not one byte is lost."""
    events = [delta(f"{number:04} " + "x" * 2**16) for number in range(100)]
    at, _ = await says(scripted.sse(*events, DONE))
    async with at.open(CHAT, ask(stream=True), window=2**14) as live:
        await live.head()
        for _ in range(10):
            await live.event()
            await asyncio.sleep(0.01)
        got = await live.rest()
    assert (got.whole, got.raw == b"".join(events) + DONE) == (True, True)
