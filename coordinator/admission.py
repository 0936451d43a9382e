"""Who may begin: so many requests at a time, and a line of those that wait, both with a bound.

A request asks twice. ``begin``, before its body is read, takes one of ``server.max_concurrency`` places. ``reserve``,
before its first leg, takes a place at each role whose pool has a ``max_inflight``, at all of them or at none: decode's
is kept while prefill works, so that no prompt is computed for a decode that has no room. Who does not get in waits in
the order of arrival. A line that is full refuses with 429 and a wait that is too long ends with 503, and nothing has
been done for the request by then. How many places there are is asked anew each time: workers come, go, and are left
out for a while.

A ``Permit`` owns what one request holds. It is released once, in a ``finally``, however the request ends; a request
that is cancelled while it waits, or in the moment in which it was let in, leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from envelope.errors import QueueFull, QueueTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence
    from typing import Protocol

    from coordinator.context import RequestContext

    Wanted = Sequence[tuple[Hashable, Callable[[], int]]]
    """What a request needs one place of, each with what says how many places there are now."""

    Place = Callable[[RequestContext], tuple[Hashable, Callable[[], int]] | None]
    """Says which places a request's legs of one role use, and what says how many there are; None is no limit."""

    class QueueEvents(Protocol):
        """The instruments; ``metrics`` implements it."""

        def queued(self, change: int) -> None: ...

        def waited(self, seconds: float, outcome: str) -> None: ...


# Places may be added with nobody leaving; so often the line looks whether there are more.
_LOOK_S = 0.5

# OpenAI's SDK does as Retry-After says up to a minute, and beyond it what it likes.
_LONGEST_RETRY_S = 60


@dataclass(slots=True, eq=False)
class _Waiter:
    wanted: Wanted
    let_in: asyncio.Future[bool]


class _Gate:
    """Places, and the line before them: who leaves hands the place on to the first of those who wait."""

    def __init__(self) -> None:
        self.held: dict[Hashable, int] = {}
        self._line: deque[_Waiter] = deque()
        self._looks: asyncio.TimerHandle | None = None  # while anybody waits

    def enter(self, wanted: Wanted) -> bool:
        """Take the places if they are free and nobody was there before."""
        if self._line or not self._fits(wanted):
            return False
        self._take(wanted)
        return True

    async def wait(self, wanted: Wanted, limit_s: float | None) -> bool:
        """Join the line; return whether the places were had in time."""
        loop = asyncio.get_running_loop()
        waiter = _Waiter(wanted, loop.create_future())
        self._line.append(waiter)
        if self._looks is None:
            self._looks = loop.call_later(_LOOK_S, self._look, loop)
        timer = None if limit_s is None else loop.call_later(limit_s, _expire, waiter)
        try:
            return await waiter.let_in
        except asyncio.CancelledError:
            # Let in, and cancelled before it could run: the future has its result, and nobody else knows of it.
            if waiter.let_in.done() and not waiter.let_in.cancelled() and waiter.let_in.result():
                self.leave([key for key, _ in wanted])
            raise
        finally:
            if timer is not None:
                timer.cancel()
            if waiter in self._line:
                self._line.remove(waiter)
            self._advance()  # the next one may want less than the one that gave up

    def leave(self, keys: Sequence[Hashable]) -> None:
        for key in keys:
            self.held[key] -= 1
            if not self.held[key]:
                del self.held[key]
        self._advance()

    @property
    def waiting(self) -> int:
        return len(self._line)

    def full(self, wanted: Wanted) -> list[Hashable]:
        return [key for key, limit in wanted if self.held.get(key, 0) >= limit()]

    def _fits(self, wanted: Wanted) -> bool:
        return all(self.held.get(key, 0) < limit() for key, limit in wanted)

    def _take(self, wanted: Wanted) -> None:
        for key, _ in wanted:
            self.held[key] = self.held.get(key, 0) + 1

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._advance()
        self._looks = loop.call_later(_LOOK_S, self._look, loop) if self._line else None

    def _advance(self) -> None:
        while self._line:
            waiter = self._line[0]
            if not waiter.let_in.done():
                if not self._fits(waiter.wanted):
                    return
                self._take(waiter.wanted)
                waiter.let_in.set_result(True)
            self._line.popleft()


def _expire(waiter: _Waiter) -> None:
    if not waiter.let_in.done():
        waiter.let_in.set_result(False)


class Admission:
    """The places of one coordinator.

    Args:
        max_concurrency: requests at a time; 0 is no limit.
        places: by role, of the pools that have a limit.
        queue_size: how many requests may wait, for whatever they wait.
        queue_timeout_s: how long one request may wait in all; None is no limit.
        clock: monotonic seconds.
        after: whose place this one takes. What its requests hold counts here too, and who waits there comes first.
    """

    def __init__(
        self,
        max_concurrency: int,
        places: Mapping[str, Place],
        *,
        queue_size: int,
        queue_timeout_s: float | None,
        events: QueueEvents,
        clock: Callable[[], float],
        after: Admission | None = None,
    ) -> None:
        self._begin: Wanted = (("server", lambda: max_concurrency),) if max_concurrency else ()
        self._places = dict(places)
        self._queue_size = queue_size
        self._queue_timeout_s = queue_timeout_s
        self._events = events
        self._clock = clock
        self._front: _Gate = _Gate() if after is None else after._front
        self._roles: _Gate = _Gate() if after is None else after._roles

    @property
    def waiting(self) -> int:
        """How many requests wait for a place, of whatever kind."""
        return self._front.waiting + self._roles.waiting

    @property
    def held(self) -> dict[Hashable, int]:
        """How many places are taken, of whatever has any taken."""
        return self._front.held | self._roles.held

    def permit(self) -> Permit:
        return Permit(self)

    def refuse_if_full(self) -> None:
        """Say no to a request that ``begin`` would refuse at once, before its body is asked for.

        Raises:
            QueueFull
        """
        if self._front.full(self._begin):
            self._check_queue("this coordinator")

    def _check_queue(self, who: str) -> None:
        if self.waiting >= self._queue_size:
            raise QueueFull(
                f"{who} has as many requests as it may have, and the queue is full; ask again later",
                headers=self._retry_after(),
            )

    def _retry_after(self) -> dict[str, str]:
        """By then whoever waits now has been let in or sent away."""
        wait_s = math.ceil(self._queue_timeout_s or 0) if self._queue_size else 0
        return {"Retry-After": str(min(max(wait_s, 1), _LONGEST_RETRY_S))}


class Permit:
    """What one request holds."""

    __slots__ = ("_admission", "_begun", "_roles", "_waited_s")

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._begun = False
        self._roles: dict[str, Hashable] = {}
        self._waited_s = 0.0

    @property
    def waited_s(self) -> float:
        """How long the request has waited for places."""
        return self._waited_s

    async def begin(self) -> None:
        """Take a place at the coordinator.

        Raises:
            QueueFull, QueueTimeout.
        """
        admission = self._admission
        if admission._begin:
            if not admission._front.enter(admission._begin):
                await self._wait(admission._front, admission._begin, "this coordinator")
            self._begun = True

    async def reserve(self, ctx: RequestContext) -> None:
        """Take a place at every role that the request needs and that has a limit.

        Raises:
            QueueFull, QueueTimeout.
            BadRequest, Forbidden: the request names a worker that it may not name.
        """
        admission = self._admission
        if not admission._places:
            return
        named = {role: place for role, of in admission._places.items() if (place := of(ctx)) is not None}
        wanted = tuple(named.values())
        if wanted and not admission._roles.enter(wanted):
            full = set(admission._roles.full(wanted))
            roles = [role for role, (key, _) in named.items() if key in full]
            await self._wait(admission._roles, wanted, " and ".join(roles or named))
        self._roles = {role: key for role, (key, _) in named.items()}

    def free(self, role: str | None) -> None:
        """Give the place at one role back early: its last leg is over."""
        if self._roles and role in self._roles:
            self._admission._roles.leave([self._roles.pop(role)])

    def release(self) -> None:
        """Give back whatever is held; more than once does no harm."""
        if self._roles:
            keys, self._roles = list(self._roles.values()), {}
            self._admission._roles.leave(keys)
        if self._begun:
            self._begun = False
            self._admission._front.leave([key for key, _ in self._admission._begin])

    async def _wait(self, gate: _Gate, wanted: Wanted, who: str) -> None:
        admission = self._admission
        admission._check_queue(who)
        limit_s = admission._queue_timeout_s
        since, outcome = admission._clock(), "left"
        admission._events.queued(1)
        try:
            in_time = await gate.wait(wanted, None if limit_s is None else max(limit_s - self._waited_s, 0.0))
            outcome = "let_in" if in_time else "timeout"
        finally:
            admission._events.queued(-1)
            waited_s = admission._clock() - since
            self._waited_s += waited_s
            admission._events.waited(waited_s, outcome)
        if not in_time:
            raise QueueTimeout(
                f"{who} had no room for this request within {limit_s:g} s; ask again later",
                headers=admission._retry_after(),
            )
