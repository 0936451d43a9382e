"""What becomes of a hand-over that no decode worker took: its client left, or decode refused the request or failed.

A prefill worker keeps the prompt's blocks until somebody fetches them or its lease ends (30 s, during which vLLM's
engine loop spins), and nothing that can be sent to it frees them. So the hand-over is still delivered: to a decode leg
of one token whose answer nobody reads. That leg is not the client's any more: it has a deadline of its own, a few run
at a time, and a cache salt of its own keeps what it fetches out of every other request's prefix cache.
A hand-over that a decode worker has read is left alone: its reader has freed it. Where that is not known (the leg
broke, or its client left before the worker said anything), it is fetched once more: prefill then notes a reader that
it did not expect, and nothing of what was read is used.

Source: vLLM 0.33 with NIXL; a leg of one token, read to its end, frees the blocks at once, and an abort does not.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from coordinator.logs import log
from envelope.errors import ApiError, InternalError, LegError, LegRejected

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from coordinator.background import Faults
    from coordinator.context import RequestContext
    from coordinator.metrics import Metrics
    from coordinator.step import Leg, Upstream

_AT_ONCE = 32
_WAITING = 1000
_DEADLINE_S = 10.0
_AGAIN_AFTER_S = (0.2, 2.0)


class Releaser:
    """Delivers abandoned hand-overs.

    Args:
        leg: makes the leg that fetches one.
    """

    def __init__(
        self,
        leg: Callable[[RequestContext, Mapping[str, Any]], Leg],
        upstream: Upstream,
        metrics: Metrics,
        faults: Faults,
    ) -> None:
        self._leg = leg
        self._upstream = upstream
        self._metrics = metrics
        self._faults = faults
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    def release(self, ctx: RequestContext) -> None:
        """Deliver what a request, now over, has left on prefill workers; does not wait."""
        for handover in ctx.unfetched():
            if len(self._tasks) >= _WAITING:
                self._metrics.handovers_released.labels("too_many").inc()
                continue
            task = asyncio.get_running_loop().create_task(self._deliver(ctx, handover))  # owned: close() awaits it
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        ctx.abandoned = []  # what comes late is asked for by itself
        if not ctx.handover_fetched:
            ctx.handover = None

    async def close(self) -> None:
        """Wait for the deliveries under way; each has its deadline."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _deliver(self, ctx: RequestContext, handover: Mapping[str, Any]) -> None:
        outcome = "delivered"
        # What becomes of this one is no word on the request's others, which may be under way at the same time.
        own = replace(ctx, handover=None, handover_fetched=False, abandoned=[], failed=[*ctx.failed])
        try:
            async with asyncio.timeout(_DEADLINE_S), self._places:
                await self._fetch(own, self._leg(own, handover))
        except (ApiError, TimeoutError) as error:
            outcome = type(error).__name__
            log.warning("request %s: its hand-over stays on prefill until the lease ends: %s", ctx.request_id, error)
        except Exception as error:
            outcome = InternalError.__name__
            self._faults.tell("release", error)
        self._metrics.handovers_released.labels(outcome).inc()

    async def _fetch(self, ctx: RequestContext, leg: Leg) -> None:
        """Send the leg, and again after a while when it failed: decode workers may be busy, or one was lost."""
        for wait_s in (*_AGAIN_AFTER_S, None):
            ctx.handover_fetched = False
            try:
                await self._upstream.post_json(ctx, leg)
                return
            except LegError as error:
                if wait_s is None or ctx.handover_fetched or isinstance(error, LegRejected):
                    raise
            ctx.failed.clear()
            await asyncio.sleep(wait_s)
