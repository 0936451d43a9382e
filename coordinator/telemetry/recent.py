"""The last requests that are over, kept for the status page: how long each leg took, and nothing that was said.

A request's context holds its prompt, so it is not kept; what is kept are names, times and counts.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from coordinator.context import LegTime, RequestContext
    from coordinator.outcome import Outcome

KEPT = 50

# What monitors and scanners ask for all the time: of the last requests no other would be left.
_ASIDE = frozenset(("models", "none"))


@dataclass(slots=True, frozen=True)
class Ended:
    """One request.

    Attributes:
        at: when it ended, in seconds since the epoch.
        begun: when it began, in monotonic seconds as its legs are.
    """

    at: float
    begun: float
    seconds: float
    route: str
    request_id: str
    status: int
    outcome: str
    model: str
    stream: bool
    queued_s: float
    ttft_s: float | None
    legs: Sequence[LegTime]

    def shown(self) -> dict[str, Any]:
        """Return it for the page; times are seconds since the request began."""
        legs = []
        for leg in self.legs:
            workers = list(dict.fromkeys(attempt.worker for attempt in leg.attempts))
            legs.append(
                {
                    "step": leg.step,
                    "begins_s": round(max(leg.begun - self.begun, 0.0), 6),
                    "seconds": round(leg.seconds, 6),
                    "outcome": leg.outcome,
                    "workers": workers,
                    "calls": len(leg.attempts),
                }
            )
        return {
            "at": round(self.at, 3),
            "seconds": round(self.seconds, 6),
            "route": str(self.route),
            "request_id": self.request_id,
            "status": self.status,
            "outcome": self.outcome,
            "model": self.model,
            "stream": self.stream,
            "queued_s": round(self.queued_s, 6),
            "ttft_s": None if self.ttft_s is None else round(self.ttft_s, 6),
            "legs": legs,
        }


class Recent:
    """
    Args:
        now: seconds since the epoch.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._ended: deque[Ended] = deque(maxlen=KEPT)

    def add(
        self,
        route: str,
        request_id: str,
        ctx: RequestContext | None,
        outcome: Outcome,
        model: str,
        begun: float,
        seconds: float,
    ) -> None:
        if route in _ASIDE:
            return
        result = outcome.result
        self._ended.append(
            Ended(
                self._now(),
                begun,
                seconds,
                route,
                request_id,
                outcome.status,
                outcome.word,
                model,
                ctx is not None and ctx.stream,
                outcome.queued_s,
                None if result is None or result.pace is None else result.pace.ttft_s,
                () if ctx is None else ctx.legs,
            )
        )

    def shown(self) -> list[dict[str, Any]]:
        """Return them, the last one first."""
        return [ended.shown() for ended in reversed(self._ended)]
