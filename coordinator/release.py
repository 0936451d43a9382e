"""What becomes of a hand-over when its client leaves before decode was asked.

A prefill worker keeps the prompt's blocks until somebody fetches them or its lease ends. So the hand-over is still
delivered: to a decode leg of one token, whose answer nobody reads. That leg is not the client's any more, so it has a
deadline of its own, and there are never more than a few of them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from coordinator.logs import log
from envelope.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.context import RequestContext
    from coordinator.metrics import Metrics
    from coordinator.step import Leg, Upstream

_AT_ONCE = 32
_DEADLINE_S = 10.0


class Releaser:
    """Delivers abandoned hand-overs.

    Args:
        leg: makes the delivering leg of a request.
    """

    def __init__(self, leg: Callable[[RequestContext], Leg], upstream: Upstream, metrics: Metrics) -> None:
        self._leg = leg
        self._upstream = upstream
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()

    def release(self, ctx: RequestContext) -> None:
        """Deliver a request's hand-over, if it has one that no decode worker can have seen; does not wait."""
        if ctx.handover is None or ctx.handover_sent:
            return
        if len(self._tasks) >= _AT_ONCE:
            self._metrics.handovers_released.labels("too_many").inc()
            return
        task = asyncio.get_running_loop().create_task(self._deliver(ctx))  # owned: close() awaits it
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Wait for the deliveries under way; each has its deadline."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _deliver(self, ctx: RequestContext) -> None:
        outcome = "delivered"
        try:
            async with asyncio.timeout(_DEADLINE_S):
                await self._upstream.post_json(ctx, self._leg(ctx))
        except (ApiError, TimeoutError) as error:
            outcome = type(error).__name__
            log.warning("request %s: its hand-over stays on prefill until the lease ends: %s", ctx.request_id, error)
        self._metrics.handovers_released.labels(outcome).inc()
