"""What is told of one call of one worker: its clock, its place in the gauges, a line at debug."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from coordinator.context import Attempt
from coordinator.logs import log

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.context import RequestContext
    from coordinator.metrics import Metrics
    from coordinator.routing.router import Worker
    from coordinator.step import Leg


class Watcher:
    """Watches every call of a worker.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock

    def begin(self, ctx: RequestContext, leg: Leg, worker: Worker, number: int) -> Watched:
        """Note that a worker is called; whoever called it says how that ended, and when all is closed."""
        label = self._metrics.worker(worker.url)
        attempt = Attempt(leg.step, leg.role, label, number, self._clock())
        ctx.attempts.append(attempt)
        return Watched(attempt, self._metrics, self._clock, ctx)


class Watched:
    """One call under way."""

    __slots__ = ("_clock", "_ctx", "_metrics", "_settled", "attempt")

    def __init__(self, attempt: Attempt, metrics: Metrics, clock: Callable[[], float], ctx: RequestContext) -> None:
        self.attempt = attempt
        self._metrics = metrics
        self._clock = clock
        self._ctx = ctx
        self._settled = False
        metrics.leg_opened(attempt)

    def settle(self, outcome: str) -> None:
        """Note the answer, or the first event of a stream, or why there was none; the first word stands."""
        if self._settled:
            return
        self._settled = True
        attempt = self.attempt
        attempt.outcome, attempt.seconds = outcome, self._clock() - attempt.begun
        self._metrics.attempt(attempt)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("leg", extra={"fields": _line(self._ctx, attempt)})

    def close(self) -> None:
        """Note that the worker has nothing more to do for us; call it once."""
        self._metrics.leg_closed(self.attempt)


def _line(ctx: RequestContext, attempt: Attempt) -> dict[str, object]:
    return {
        "request_id": ctx.request_id,
        "leg_id": ctx.leg_id,
        "step": attempt.step,
        "role": attempt.role,
        "worker": attempt.worker,
        "attempt": attempt.number,
        "outcome": attempt.outcome,
        "seconds": round(attempt.seconds, 6),
    }
