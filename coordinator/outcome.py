"""How one request ended, and the telling of it: its log line and its metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordinator.logs import access
from envelope.errors import ApiError, ClientGone, ClientStalled, LegRejected, Overloaded, Unauthorized

if TYPE_CHECKING:
    from coordinator.context import RequestContext
    from coordinator.metrics import Metrics
    from coordinator.respond import Result


@dataclass(slots=True)
class Outcome:
    """How one request ended; becomes its log line and its metrics."""

    status: int = 0
    word: str = "internal_error"
    error: str | None = None
    result: Result | None = None

    def done(self, result: Result) -> None:
        self.result, self.status = result, result.response.status
        self.word, self.error = ("ok", None) if result.error is None else ("stream_broken", result.error)

    def fail(self, error: ApiError) -> None:
        self.status, self.error = error.status, type(error).__name__
        if isinstance(error, ClientGone):
            self.word = "client_stalled" if isinstance(error, ClientStalled) else "client_gone"
        elif isinstance(error, LegRejected):
            self.word = "rejected"
        elif isinstance(error, Overloaded):
            self.word = "overloaded"
        elif isinstance(error, Unauthorized):
            self.word = "unauthorized"
        elif error.status < 500:
            self.word = "bad_request"
        else:
            self.word = {502: "leg_failed", 503: "unavailable", 504: "timeout"}.get(error.status, "internal_error")


class Recorder:
    """Tells of requests that are over: one log line each, and the metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def record(self, route: str, client_id: str, ctx: RequestContext | None, outcome: Outcome, seconds: float) -> None:
        """Tell of one request; call it once, when nothing of it is open any more."""
        self._metrics.requests.labels(route, outcome.word).inc()
        self._metrics.request_seconds.labels(route).observe(seconds)
        fields = {"request_id": client_id, "route": str(route), "status": outcome.status, "outcome": outcome.word}
        if outcome.error:
            fields["error"] = outcome.error
        if ctx is not None:
            fields |= self._leg_fields(ctx)
        if outcome.result is not None:
            fields |= self._answer_fields(route, outcome.result)
        access.info("request", extra={"fields": {**fields, "seconds": round(seconds, 6)}})

    def _leg_fields(self, ctx: RequestContext) -> dict[str, object]:
        for leg in ctx.legs:
            self._metrics.leg(leg)
        legs = {leg.step: {"seconds": round(leg.seconds, 6), "outcome": leg.outcome} for leg in ctx.legs}
        return {"leg_id": ctx.leg_id, "stream": ctx.stream, "legs": legs}

    def _answer_fields(self, route: str, result: Result) -> dict[str, object]:
        fields: dict[str, object] = {}
        if result.ttft_s is not None:
            self._metrics.ttft_seconds.labels(route).observe(result.ttft_s)
            fields["ttft_seconds"] = round(result.ttft_s, 6)
        if isinstance(usage := result.usage, dict):
            prompt = _count(usage, "prompt_tokens", "input_tokens")
            completion = _count(usage, "completion_tokens", "output_tokens")
            self._metrics.usage(route, prompt, completion)
            fields |= {"prompt_tokens": prompt, "completion_tokens": completion}
        return fields


def _count(usage: dict[str, object], *names: str) -> int:
    value = next((usage[name] for name in names if usage.get(name) is not None), 0)
    return value if isinstance(value, int) and value > 0 else 0
