"""Requests that are almost right: no 500, no silence, no answer that is not JSON, and nothing left over."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from tests.chaos.bodies import BODIES
from tests.chaos.front import SHAPES, answers, fronted, leaks, post, say, wrong
from tests.chaos.mutate import bytes_mutant, json_mutant, text_of
from tests.chaos.report import LINES
from tests.chaos.stage import Lines

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from tests.flows.conftest import Running

_AT_ONCE = 16


async def fuzz(at: Running, lines: Lines, count: int, make: Callable[[], bytes]) -> list[str]:
    """Send so many inputs; return what was wrong with the answers, and what was left when all were given."""
    faults: list[str] = []

    async def one() -> None:
        raw = make()
        try:
            got = answers(await say(at, raw))
        except TimeoutError:
            faults.append(f"no answer: {raw!r}")
            return
        faults.extend(f"{why}: {raw!r}" for answer in got if (why := wrong(answer)))

    for _ in range(count // _AT_ONCE):
        async with asyncio.TaskGroup() as tasks:
            for _ in range(_AT_ONCE):
                tasks.create_task(one())
        if lines.tracebacks:
            break
    return faults + [f"{kind}: {what}" for kind, what in (await leaks(at, lines)).items()]


def counted(full: bool, short: int, long: int) -> int:
    return int(os.environ.get("CHAOS_INPUTS") or (long if full else short))


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_body_that_is_almost_right_is_no_fault_of_ours(rng: random.Random, full: bool, shape: str) -> None:
    """Every value of a request may be anything: it is a 4xx, or the workers' business."""
    count, lines = counted(full, 240, 12_000), Lines()

    def make() -> bytes:
        path, body = rng.choice(BODIES)
        return post(path, text_of(json_mutant(body, rng)), "Connection: close")

    with lines.listening():
        async with fronted(shape) as (at, _):
            faults = await fuzz(at, lines, count, make)
    LINES.append(f"bodies through {shape}: {count} inputs, {len(faults)} wrong")
    assert faults == []


async def test_bytes_that_are_almost_a_request_are_no_fault_of_ours(rng: random.Random, full: bool) -> None:
    """Request line, headers, framing, body: whatever is cut, doubled, or put in between."""
    count, lines = counted(full, 480, 20_000), Lines()
    heads = ("Accept: */*", "Connection: keep-alive", "Authorization: Bearer k", "Expect: 100-continue",
             "X-Request-Id: a", "Connection: X-Hop, close", "X-Hop: 1", "traceparent: 00-1-2-01")  # fmt: skip

    def make() -> bytes:
        path, body = rng.choice(BODIES)
        raw = post(path, text_of(body), *rng.sample(heads, rng.randrange(4)))
        if rng.random() < 0.2:
            raw = raw.replace(b"Content-Length: %d" % len(text_of(body)), b"Transfer-Encoding: chunked")
            raw = raw.replace(text_of(body), b"%x\r\n%s\r\n0\r\n\r\n" % (len(text_of(body)), text_of(body)))
        if rng.random() < 0.1:
            raw += raw
        return bytes_mutant(raw, rng)

    with lines.listening():
        async with fronted("text") as (at, _):
            faults = await fuzz(at, lines, count, make)
    LINES.append(f"requests as bytes: {count} inputs, {len(faults)} wrong")
    assert faults == []
