"""What becomes of a hand-over that no decode worker took: its client left, or decode refused the request or failed.

A prefill worker keeps the prompt's blocks until somebody fetches them or its lease ends (30 s, during which vLLM's
engine loop spins), and nothing that can be sent to it frees them. So the hand-over is still delivered: to a decode leg
of one token whose answer nobody reads. That leg is not the client's any more: it has a deadline of its own, there are
never more than a few of them, and a cache salt of its own keeps what it fetches out of every other request's prefix
cache. A hand-over that a decode worker may have begun to read is left alone: its reader frees it.

Source: vLLM 0.33 with NIXL; a leg of one token, read to its end, frees the blocks at once, and an abort does not.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from coordinator.logs import log
from envelope.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from coordinator.context import RequestContext
    from coordinator.metrics import Metrics
    from coordinator.step import Leg, Upstream

_AT_ONCE = 32
_DEADLINE_S = 10.0


class Releaser:
    """Delivers abandoned hand-overs.

    Args:
        leg: makes the leg that fetches one.
    """

    def __init__(
        self, leg: Callable[[RequestContext, Mapping[str, Any]], Leg], upstream: Upstream, metrics: Metrics
    ) -> None:
        self._leg = leg
        self._upstream = upstream
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()

    def release(self, ctx: RequestContext) -> None:
        """Deliver what a request, now over, has left on prefill workers; does not wait."""
        for handover in ctx.unfetched():
            if len(self._tasks) >= _AT_ONCE:
                self._metrics.handovers_released.labels("too_many").inc()
                continue
            task = asyncio.get_running_loop().create_task(self._deliver(ctx, handover))  # owned: close() awaits it
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        ctx.handover, ctx.abandoned = None, []  # what comes late is asked for by itself

    async def close(self) -> None:
        """Wait for the deliveries under way; each has its deadline."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _deliver(self, ctx: RequestContext, handover: Mapping[str, Any]) -> None:
        outcome = "delivered"
        try:
            async with asyncio.timeout(_DEADLINE_S):
                await self._upstream.post_json(ctx, self._leg(ctx, handover))
        except (ApiError, TimeoutError) as error:
            outcome = type(error).__name__
            log.warning("request %s: its hand-over stays on prefill until the lease ends: %s", ctx.request_id, error)
        self._metrics.handovers_released.labels(outcome).inc()
