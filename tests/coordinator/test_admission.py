"""Places and the line before them: nobody is let in twice, nobody is forgotten, and every place comes back."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from coordinator.admission import Admission, Permit
from coordinator.context import RequestContext
from envelope.errors import QueueFull, QueueTimeout
from envelope.formats import Format

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


@dataclass
class Told:
    """What the instruments were told."""

    queued_now: int = 0
    waits: list[str] = field(default_factory=list)

    def queued(self, change: int) -> None:
        self.queued_now += change
        assert self.queued_now >= 0

    def waited(self, seconds: float, outcome: str) -> None:
        self.waits.append(outcome)


@dataclass
class Desk:
    """An admission and what it told."""

    admission: Admission
    told: Told

    async def enter(self, request: RequestContext | None = None) -> Permit:
        """Let a request in that nobody cancels."""
        permit = self.admission.permit()
        await permit.begin()
        if request is not None:
            await permit.reserve(request)
        return permit

    @asynccontextmanager
    async def waiting(self, request: RequestContext | None = None) -> AsyncIterator[asyncio.Task[Permit]]:
        before = self.admission.waiting
        task = asyncio.create_task(self.enter(request))
        await settle()
        assert self.admission.waiting == before + 1
        yield task
        task.cancel()
        await asyncio.wait((task,))


def desk(most: int = 0, *, queue_size: int = 8, queue_timeout_s: float | None = 5.0, **roles: Any) -> Desk:
    """Make one; a role is its number of places, or what says them for a request."""

    def always(role: str, limit: int) -> Callable[[RequestContext], tuple[str, Callable[[], int]]]:
        return lambda _request: (role, lambda: limit)

    places = {role: of if callable(of) else always(role, of) for role, of in roles.items()}
    told = Told()
    clock = asyncio.get_running_loop().time
    admission = Admission(
        most, places, queue_size=queue_size, queue_timeout_s=queue_timeout_s, events=told, clock=clock
    )
    return Desk(admission, told)


def request(**routing: str) -> RequestContext:
    return RequestContext("id", "id-1", Format.CHAT, {}, (), routing, stream=False)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_without_limits_nobody_waits_and_nothing_is_counted() -> None:
    at = desk()
    permit = await at.enter(request())
    assert at.admission.held == {}
    permit.release()


async def test_who_leaves_lets_in_the_first_of_those_who_wait() -> None:
    at = desk(1)
    first = await at.enter()
    async with at.waiting() as second, at.waiting() as third:
        first.release()
        await settle()
        assert (second.done(), third.done()) == (True, False)
        second.result().release()
        await settle()
        assert third.done()
        third.result().release()
    assert at.admission.held == {}
    assert at.told.waits == ["let_in", "let_in"]


async def test_nobody_slips_in_before_those_who_wait() -> None:
    at = desk(1)
    first = await at.enter()
    async with at.waiting() as second:
        first.release()  # the place is the second's from here on, although it has not run yet
        third = asyncio.create_task(at.enter())
        await settle()
        assert (second.done(), third.done()) == (True, False)
        second.result().release()
        (await third).release()


async def test_a_full_queue_refuses_at_once_with_429() -> None:
    at = desk(1, queue_size=1, queue_timeout_s=7)
    first = await at.enter()
    async with at.waiting():
        with pytest.raises(QueueFull, match="queue is full") as refused:
            await at.enter()
        with pytest.raises(QueueFull):
            at.admission.refuse_if_full()
    assert refused.value.status == 429
    assert refused.value.headers == {"Retry-After": "7"}
    first.release()
    at.admission.refuse_if_full()


async def test_without_a_queue_the_retry_is_soon() -> None:
    at = desk(1, queue_size=0)
    first = await at.enter()
    with pytest.raises(QueueFull) as refused:
        await at.enter()
    assert refused.value.headers == {"Retry-After": "1"}
    first.release()


async def test_a_wait_that_is_too_long_ends_with_503() -> None:
    at = desk(1, queue_timeout_s=0.01)
    first = await at.enter()
    with pytest.raises(QueueTimeout, match=r"within 0\.01 s") as refused:
        await at.enter()
    assert refused.value.status == 503
    assert refused.value.headers == {"Retry-After": "1"}
    assert (at.admission.waiting, at.told.queued_now, at.told.waits) == (0, 0, ["timeout"])
    first.release()
    assert at.admission.held == {}


async def test_both_waits_of_a_request_share_one_limit() -> None:
    at = desk(1, decode=1, queue_timeout_s=0.2)
    other = at.admission.permit()
    await other.reserve(request())
    first = await at.enter()
    loop = asyncio.get_running_loop()
    begun = loop.time()
    loop.call_later(0.15, first.release)
    with pytest.raises(QueueTimeout):
        await at.enter(request())
    assert loop.time() - begun < 0.3
    other.release()


async def test_decode_is_kept_from_the_start_and_prefill_only_as_long_as_it_works() -> None:
    at = desk(prefill=1, decode=2)
    first = await at.enter(request())
    assert at.admission.held == {"prefill": 1, "decode": 1}
    first.free("prefill")
    first.free("prefill")
    second = await at.enter(request())
    assert at.admission.held == {"prefill": 1, "decode": 2}
    second.free("prefill")
    with pytest.raises(QueueTimeout, match="decode had no room"):
        at.admission._queue_timeout_s = 0.01
        await at.enter(request())
    first.release()
    second.release()
    second.release()
    assert at.admission.held == {}


async def test_a_request_takes_all_its_places_or_none() -> None:
    at = desk(prefill=5, decode=1)
    first = await at.enter(request())
    async with at.waiting(request()):
        assert at.admission.held == {"prefill": 1, "decode": 1}
    first.release()
    assert at.admission.held == {}


async def test_a_role_that_the_request_leaves_out_is_not_asked() -> None:
    at = desk(prefill=lambda asked: ("prefill", lambda: 1) if "p" in asked.routing else None, decode=5)
    first = await at.enter(request(p="x"))
    second = await at.enter(request())
    assert at.admission.held == {"prefill": 1, "decode": 2}
    first.release()
    second.release()


async def test_one_who_gives_up_does_not_hold_up_those_behind() -> None:
    """The first in line wants two places, the next only one of them."""
    at = desk(prefill=lambda asked: ("prefill", lambda: 1) if "p" in asked.routing else None, decode=1)
    holder = at.admission.permit()
    holder._roles = {"prefill": "prefill"}
    at.admission._roles.enter((("prefill", lambda: 1),))
    async with at.waiting(request(p="x")) as first, at.waiting(request()) as second:
        first.cancel()
        await settle()
        second.result().release()
    holder.release()
    assert at.admission.held == {}


async def test_one_who_is_cancelled_in_the_moment_of_being_let_in_hands_the_place_on() -> None:
    at = desk(1)
    first = await at.enter()
    async with at.waiting() as second, at.waiting() as third:
        first.release()
        second.cancel()
        await settle()
        assert second.cancelled()
        third.result().release()
    assert at.admission.held == {}


async def test_the_limit_may_grow_while_requests_wait() -> None:
    """A pool that finds more workers has more places, for those who wait as well, with nobody leaving."""
    workers = [1]
    at = desk(decode=lambda _asked: ("decode", lambda: len(workers)))
    first = await at.enter(request())
    async with at.waiting(request()) as waiting:
        workers.append(2)
        second = await waiting
    assert at.admission.held == {"decode": 2}
    first.release()
    second.release()


async def test_the_limit_may_shrink_while_requests_wait() -> None:
    """A worker that is left out takes its places with it: who leaves lets nobody in who would have had one of them."""
    workers = [1, 2]
    at = desk(decode=lambda _asked: ("decode", lambda: len(workers)))
    first, second = await at.enter(request()), await at.enter(request())
    async with at.waiting(request()) as waiting:
        workers.pop()
        first.release()
        await settle()
        assert (waiting.done(), at.admission.held) == (False, {"decode": 1})
        second.release()
        (await waiting).release()


async def test_a_thousand_cancels_leave_no_place_taken() -> None:
    """Requests come, wait, work and are cancelled at any point of it; what they held is counted all the while."""
    at = desk(3, prefill=2, decode=3, queue_size=3, queue_timeout_s=0.001)
    rng, ended = random.Random(8), {"ok": 0, "cancelled": 0, "refused": 0}
    most = {"server": 3, "prefill": 2, "decode": 3}

    async def one() -> None:
        permit = at.admission.permit()
        try:
            await permit.begin()
            await asyncio.sleep(0)
            await permit.reserve(request())
            assert all(count <= most[str(key)] for key, count in at.admission.held.items())
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            permit.free("prefill")
            await asyncio.sleep(0)
            ended["ok"] += 1
        except (QueueFull, QueueTimeout):
            ended["refused"] += 1
        except asyncio.CancelledError:
            ended["cancelled"] += 1
            raise
        finally:
            permit.release()

    alive: list[asyncio.Task[None]] = []
    while ended["cancelled"] < 1000:
        alive += [asyncio.create_task(one()) for _ in range(rng.randrange(4))]
        await asyncio.sleep(0)
        alive = [task for task in alive if not task.done()]
        if alive and rng.random() < 0.7:
            rng.choice(alive).cancel()
    for task in alive:
        task.cancel()
    await asyncio.gather(*alive, return_exceptions=True)
    assert ended["ok"] and ended["refused"]
    assert (at.admission.held, at.admission.waiting, at.told.queued_now) == ({}, 0, 0)
    assert not at.admission._front._line and not at.admission._roles._line
