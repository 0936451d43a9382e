"""``Server-Timing``: how long each leg took, for whoever is let to see it."""

from __future__ import annotations

import re

import pytest

from coordinator.sim import Fault
from tests.flows.setups import CHAT

ON = {"server_timing": True}


def times(value: str) -> dict[str, float]:
    """Read the header as a browser does."""
    found = {}
    for part in value.split(", "):
        match = re.fullmatch(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+);dur=(\d+\.\d)", part)
        assert match, part
        found[match[1]] = float(match[2])
    return found


async def test_nobody_is_told_unless_it_is_switched_on(coordinator, fleet):
    at = await coordinator(fleet)
    assert "Server-Timing" not in (await at.chat()).headers
    assert "Server-Timing" not in (await at.chat(stream=True)).headers


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_tells_how_long_each_leg_took(coordinator, fleet, stream):
    fleet.prefill.behave.fault = Fault(first_byte_s=0.05)
    at = await coordinator(fleet, "text", server=ON)
    got = await at.chat(stream=stream)
    told = times(got.headers["Server-Timing"])
    assert list(told) == ["render", "prefill", "decode"]
    assert told["prefill"] >= 50


async def test_a_failure_tells_it_too(coordinator, fleet, excuse):
    excuse("unread", "there is no decode worker left that could fetch it")
    at = await coordinator(fleet, "text", server=ON)
    await fleet.decode.refuse_connections()
    got = await at.chat()
    assert got.status == 503
    assert list(times(got.headers["Server-Timing"]))[:3] == ["render", "prefill", "decode"]


async def test_a_request_that_waited_is_told_how_long(coordinator, fleet, ask, eventually):
    at = await coordinator(fleet, server={**ON, "max_concurrency": 1})
    fleet.decode.behave.next(Fault(first_byte_s=0.2))
    async with at.open(CHAT, ask()) as first:
        await eventually(lambda: fleet.decode.in_flight)
        got = await at.chat()
        await first.head()
        await first.rest()
    assert times(got.headers["Server-Timing"])["queue"] > 0


async def test_what_reached_no_leg_tells_nothing(coordinator, fleet):
    at = await coordinator(fleet, server=ON)
    got = await at.post(CHAT, b"[]")
    assert (got.status, "Server-Timing" in got.headers) == (400, False)
