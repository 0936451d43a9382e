"""What is told of one call of one worker: its clock, its place in the gauges, a line at debug, its bodies at trace."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from coordinator.context import Attempt
from coordinator.logs import TRACE, log
from coordinator.step import Reply
from coordinator.telemetry.redact import redacted
from coordinator.telemetry.tracing import UNTOLD

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.context import Headers, RequestContext
    from coordinator.metrics import Metrics
    from coordinator.routing.router import Worker
    from coordinator.step import Leg
    from coordinator.telemetry.tracing import LegTrace
    from envelope.errors import ApiError


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
        if log.isEnabledFor(TRACE):
            named = _named((ctx.request_id, ctx.leg_id), attempt)
            log.log(TRACE, "leg body", extra={"fields": {**named, "body": redacted(leg.body)}})
        trace = UNTOLD if ctx.trace is None else ctx.trace.leg(leg, worker.url, number)
        return Watched(attempt, trace, self._metrics, self._clock, ctx)


class Watched:
    """One call under way."""

    __slots__ = ("_clock", "_closed", "_ids", "_metrics", "_settled", "_trace", "attempt")

    def __init__(
        self, attempt: Attempt, trace: LegTrace, metrics: Metrics, clock: Callable[[], float], ctx: RequestContext
    ) -> None:
        self.attempt = attempt
        self._trace = trace
        self._metrics = metrics
        self._clock = clock
        # Not the context itself, whose answer may be the call that has this: a cycle.
        self._ids = ctx.request_id, ctx.leg_id
        self._settled = self._closed = False
        metrics.leg_opened(attempt)

    @property
    def headers(self) -> Headers:
        """What the call carries of trace context."""
        return self._trace.headers

    def answered(self, answer: object) -> None:
        """Note a whole answer, or the first event of a stream."""
        self.settle("ok")
        if isinstance(answer, Reply) and log.isEnabledFor(TRACE):
            fields = {**_named(self._ids, self.attempt), "status": answer.status, "body": redacted(answer.body)}
            log.log(TRACE, "leg answer", extra={"fields": fields})

    def settle(self, outcome: str) -> None:
        """Note how the call went; the first word stands."""
        if self._settled:
            return
        self._settled = True
        attempt = self.attempt
        attempt.outcome, attempt.seconds = outcome, self._clock() - attempt.begun
        self._metrics.attempt(attempt)
        if log.isEnabledFor(logging.DEBUG):
            ended = {"outcome": outcome, "seconds": round(attempt.seconds, 6)}
            log.debug("leg", extra={"fields": {**_named(self._ids, attempt), **ended}})
        if self._closed:
            self._trace.end(attempt)

    def broke(self, error: ApiError) -> None:
        """Note that a stream failed after its first event."""
        if self.attempt.outcome == "ok":
            self.attempt.outcome = type(error).__name__
            self._metrics.stream_broken(self.attempt)

    def close(self) -> None:
        """Note that the worker has nothing more to do for us; call it once."""
        self._metrics.leg_closed(self.attempt)
        self._closed = True
        if self._settled:
            self._trace.end(self.attempt)


def _named(ids: tuple[str, str], attempt: Attempt) -> dict[str, object]:
    request_id, leg_id = ids
    return {
        "request_id": request_id,
        "leg_id": leg_id,
        "step": attempt.step,
        "role": attempt.role,
        "worker": attempt.worker,
        "attempt": attempt.number,
    }
