"""Answers that take long, on a clock that jumps while nothing happens: nothing has a limit that nobody has set."""

import asyncio
from contextlib import contextmanager

import pytest

from tests.bounds import HANG_S
from tests.flows import client

COUNTED = ", ".join(map(str, range(1, 21))) + "."


@contextmanager
def jumping_clock(monkeypatch):
    """Let the event loop's clock jump some seconds when nothing has come for a millisecond.

    Gives a function that tells how many seconds have passed on it.
    """
    loop, jumped = asyncio.get_running_loop(), 0.0
    real, begun, select = loop.time, loop.time(), loop._selector.select

    def look(timeout=None):
        nonlocal jumped
        ready = select(0.001 if timeout is None else min(timeout, 0.001))
        if not ready and timeout:
            jumped += min(timeout, 5.0)
        return ready

    with monkeypatch.context() as patch:
        patch.setattr(client, "HANG_S", HANG_S * 1000)
        patch.setattr(loop, "time", lambda: real() + jumped)
        patch.setattr(loop._selector, "select", look)
        yield lambda: loop.time() - begun


# What ends before decode begins may well take a few of our milliseconds.
PATIENT = {"prefill": {"connect_timeout": "1h"}, "decode": {"connect_timeout": "1h"}}
SERVER = {"heartbeat_after": None, "read_timeout": "1h"}


@pytest.mark.parametrize(
    ("shape", "stream"), [("openai", True), ("openai", False), ("text", True), ("derender", False)]
)
async def test_an_answer_that_takes_many_minutes_is_not_cut(coordinator, fleet, ask, monkeypatch, shape, stream):
    """S26: tokens 10 s apart, or one answer after 600 s, with the defaults of every limit on answers."""
    steps = PATIENT | ({} if shape == "openai" else {"render": {"timeout": "1h"}})
    at = await coordinator(fleet, shape, steps=steps, server=SERVER)
    await answers_late(at, fleet, ask, monkeypatch, stream)


@pytest.mark.parametrize("stream", [False, True])
async def test_nor_is_one_that_comes_through_a_gateway(coordinator, fleet, ask, monkeypatch, stream):
    """S26, D2: llm-d's coordinator waits 60 s for the head of a leg, which a whole answer takes all its time for."""
    gateway = {"address": fleet.decode.url}
    at = await coordinator(
        fleet, "alone", pools={"decode": None}, gateway=gateway, steps={"decode": PATIENT["decode"]}, server=SERVER
    )
    await answers_late(at, fleet, ask, monkeypatch, stream)


async def answers_late(at, fleet, ask, monkeypatch, stream):
    """Ask, and have the worker take 10 s for each token."""
    fleet.decode.behave.itl_s = 10.0
    with jumping_clock(monkeypatch) as elapsed:
        async with at.open("/v1/chat/completions", ask("Count to 20.", stream=stream)) as live:
            await live.head()
            got = await live.rest()
        assert (got.status, got.whole, got.text) == (200, True, COUNTED)
        assert elapsed() > 400
