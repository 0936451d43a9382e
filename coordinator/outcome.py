"""How one request ended, and the telling of it: its log line and its metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

from coordinator.logs import access
from coordinator.telemetry.tracing import PASSING
from envelope.errors import ApiError, ClientGone, ClientStalled, LegRejected, Overloaded, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from coordinator.context import Attempt, LegTime, RequestContext
    from coordinator.http.request import Request
    from coordinator.metrics import Metrics
    from coordinator.respond import Result
    from coordinator.telemetry.model_names import ModelNames
    from coordinator.telemetry.recent import Recent
    from coordinator.telemetry.tracing import Trace, Tracing


@dataclass(slots=True)
class Outcome:
    """How one request ended; becomes its log line, its metrics and its span.

    Attributes:
        queued_s: how long it waited for places, also where it got none.
        tokens: ``input`` and ``output``, as the workers counted them; empty where they did not.
    """

    status: int = 0
    word: str = "internal_error"
    error: str | None = None
    result: Result | None = None
    queued_s: float = 0.0
    tokens: dict[str, int] = field(default_factory=dict)
    trace: Trace = PASSING

    def done(self, result: Result) -> None:
        self.result, self.status = result, result.status
        self.word, self.error = ("ok", None) if result.error is None else ("stream_broken", result.error)

    def fail(self, error: ApiError) -> ApiError:
        """Take in what the client is told, and return it."""
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
        return error


class Recorder:
    """Tells of requests: one log line each, the metrics, and a trace.

    Args:
        recent: keeps the last ones for the status page; None where there is none.
    """

    def __init__(
        self, metrics: Metrics, names: ModelNames, tracing: Tracing = PASSING, recent: Recent | None = None
    ) -> None:
        self._metrics = metrics
        self._recent = recent
        self._names = names
        self._tracing = tracing

    def begin(self, request: Request) -> Outcome:
        """Return what becomes of a request that a route has taken."""
        return Outcome(status=500, trace=self._tracing.begin(request.method, request.path, request.headers))

    def record(
        self, route: str, client_id: str, ctx: RequestContext | None, outcome: Outcome, begun: float, seconds: float
    ) -> None:
        """Tell of one request; call it once, when nothing of it is open any more.

        Args:
            begun: monotonic seconds.
        """
        ok = outcome.word == "ok"
        model = None if ctx is None else self._names.label(ctx.body.get("model"), answered=ok)
        self._metrics.request(route, outcome.word, model or "", seconds)
        if ctx is not None:
            for leg in ctx.legs:
                self._metrics.leg(leg)
        counted = {} if outcome.result is None else self._answer(route, model or "", outcome, outcome.result)
        outcome.trace.end(ctx, outcome)
        if self._recent is not None:
            self._recent.add(route, client_id, ctx, outcome, model or "", begun, seconds)
        if access.enabled:
            access.write(_line(route, client_id, ctx, outcome, model, counted, seconds))

    def refused(self, client_id: str, error: ApiError) -> None:
        """Tell of a request that no route took: a path or a method that is not served, or no HTTP."""
        outcome = Outcome()
        outcome.fail(error)
        self.record("none", client_id, None, outcome, monotonic(), 0.0)

    def _answer(self, route: str, model: str, outcome: Outcome, result: Result) -> dict[str, Any]:
        """Count what an answer took, and return it for the line."""
        fields: dict[str, Any] = {}
        prompt = completion = 0
        if isinstance(usage := result.usage, dict):
            prompt = _tokens(usage, "prompt_tokens", "input_tokens")
            completion = _tokens(usage, "completion_tokens", "output_tokens")
            self._metrics.usage(route, model, prompt, completion)
            outcome.tokens = {"input": prompt, "output": completion}
        pace = result.pace
        if pace is not None and (ttft_s := pace.ttft_s) is not None:
            self._metrics.stream(route, model, pace, ttft_s, completion)
            fields["ttft_seconds"] = round(ttft_s, 6)
            if (per_token_s := pace.per_token_s(completion)) is not None:
                fields["tpot_seconds"] = round(per_token_s, 6)
        if isinstance(usage, dict):
            fields["prompt_tokens"], fields["completion_tokens"] = prompt, completion
        return fields


def _line(
    route: str,
    client_id: str,
    ctx: RequestContext | None,
    outcome: Outcome,
    model: str | None,
    counted: dict[str, Any],
    seconds: float,
) -> dict[str, Any]:
    line: dict[str, Any] = {
        "request_id": client_id,
        "route": route,
        "status": outcome.status,
        "outcome": outcome.word,
    }
    if outcome.error:
        line["error"] = outcome.error
    if outcome.queued_s:
        line["queue_seconds"] = round(outcome.queued_s, 6)
    if ctx is not None:
        line["model"] = model
        line["leg_id"] = ctx.leg_id
        line["stream"] = ctx.stream
        line["legs"] = legs_of(ctx.legs)
    line.update(counted)
    line["seconds"] = round(seconds, 6)
    return line


def legs_of(legs: Sequence[LegTime]) -> dict[str, dict[str, Any]]:
    """Return each step's time, outcome and worker; one that ran again, after a failure behind it, has a number."""
    told: dict[str, dict[str, Any]] = {}
    for name, leg in numbered(legs):
        fields: dict[str, Any] = {"seconds": round(leg.seconds, 6), "outcome": leg.outcome}
        if len(leg.attempts) == 1:
            fields["worker"] = leg.attempts[0].worker
        elif leg.attempts:
            fields["calls"] = [_call(attempt) for attempt in leg.attempts]
        told[name] = fields
    return told


def numbered(legs: Sequence[LegTime]) -> Iterator[tuple[str, LegTime]]:
    """Yield each step with its name, which from the second time on has a number."""
    ran: dict[str, int] = {}
    for leg in legs:
        times = ran[leg.step] = ran.get(leg.step, 0) + 1
        yield leg.step if times == 1 else f"{leg.step}#{times}", leg


def _call(attempt: Attempt) -> dict[str, Any]:
    return {"worker": attempt.worker, "seconds": round(attempt.seconds, 6), "outcome": attempt.outcome}


def _tokens(usage: dict[str, object], *names: str) -> int:
    for name in names:
        if (value := usage.get(name)) is not None:
            return value if isinstance(value, int) and value > 0 else 0
    return 0
