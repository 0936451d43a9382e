"""Which workers of a pool are left out for a while, because their legs fail or their ``/health`` does.

::

    well ── so many failures in a row ──> out ── its time is over ──> on trial ── one leg went well ──> well
                                           ^                             │
                                           └────── a leg failed: longer ─┘

On trial a worker gets a leg a second, until one has gone well or failed. Beside that it is down while its ``/health``
fails twice in a row, until it answers again. When too few would be left, our judgement is worth less than the
workers, and all of them are used.

What counts is what the worker did: no connection, a 5xx, an answer that broke off or did not come in time. A 4xx is
the client's, a client that leaves is nobody's fault, and a full queue is no failure.

Source: Envoy's outlier detection and panic threshold.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordinator.logs import log

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from coordinator.routing.members import Members
    from coordinator.routing.router import Worker
    from envelope.errors import ApiError

_TRIAL_S = 1.0
_PROBES = 2
_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """
    Attributes:
        failures: so many in a row put a worker out; 0 is never.
        first_s: how long it is out at first, then twice as long each time.
        longest_s: and never longer than this; after as long without a failure the count begins anew.
        least_left: share of the workers that must be left, 0 to 1, or all of them are used.
    """

    failures: int = 5
    first_s: float = 10.0
    longest_s: float = 300.0
    least_left: float = 0.2


@dataclass(slots=True)
class _Out:
    """A worker that is out, or has been.

    Attributes:
        times: how often in a row.
        until: the end of its time, when the trial begins.
        next_trial: when it gets its next leg.
        well_since: when it was let in again; never while it is out.
    """

    times: int = 0
    until: float = 0.0
    next_trial: float = 0.0
    well_since: float = _NEVER


class Health:
    """
    Args:
        role: for the log.
        clock: monotonic seconds.

    Attributes:
        ejections: how often a worker was put out.
        on_trial: those that get a leg now and then; ``may_try`` says when.
    """

    def __init__(
        self,
        role: str,
        members: Members,
        limits: HealthLimits,
        clock: Callable[[], float],
    ) -> None:
        self._role = role
        self._members = members
        self._limits = limits
        self._clock = clock
        self.ejections = 0
        self._out: dict[Worker, _Out] = {}
        self._past: dict[Worker, _Out] = {}
        self._faults: Counter[Worker] = Counter()  # probes of /health that failed in a row
        self._generation = -1
        self._next = _NEVER  # when the first of those that are out goes on trial
        self._panics = False
        self.on_trial: frozenset[Worker] = frozenset()
        self._used: tuple[Worker, ...] = ()

    def used(self) -> tuple[Worker, ...]:
        """Return the workers that may be picked, those on trial among them."""
        if self._generation != self._members.generation or (self._next < _NEVER and self._clock() >= self._next):
            self._look()
        return self._used

    def may_try(self, worker: Worker) -> bool:
        out = self._out.get(worker)
        return out is None or self._clock() >= out.next_trial

    def tries(self, worker: Worker) -> None:
        """Note that a worker on trial is given a leg."""
        self._out[worker].next_trial = self._clock() + _TRIAL_S

    def report(self, worker: Worker, error: ApiError | None) -> None:
        """Take in how a leg ended; None is well."""
        if error is None:
            if worker.failures:
                self._went_well(worker)
        elif getattr(error, "ailing", False):
            self._failed(worker, error)

    def probed(self, worker: Worker, fault: str | None) -> None:
        """Take in what a worker answered to ``GET /health``; None is well."""
        was_down = self._is_down(worker)
        if fault is None:
            self._faults.pop(worker, None)
        else:
            self._faults[worker] += 1
        if self._is_down(worker) != was_down:
            log.warning(
                "%s: %s", self._role, f"{worker.url} is left out: {fault}" if fault else f"{worker.url} is back"
            )
            self._look()

    def take_over(self, before: Health) -> None:
        """Leave out whoever was left out before; their times go on."""
        self._out, self._past = dict(before._out), dict(before._past)
        self._faults = Counter(before._faults)
        self._look()

    def states(self) -> Mapping[str, int]:
        """Return how many workers are ``well``, on ``trial``, ``ejected``, ``down``, and ``leaving``."""
        found = Counter({"well": 0, "trial": 0, "ejected": 0, "down": 0, "leaving": len(self._members.leaving)})
        found.update(map(self.state, self._members.workers))
        return found

    def state(self, worker: Worker) -> str:
        if self._is_down(worker):
            return "down"
        if (out := self._out.get(worker)) is None:
            return "well"
        return "trial" if self._clock() >= out.until else "ejected"

    def _failed(self, worker: Worker, error: ApiError) -> None:
        worker.failures += 1
        out, now = self._out.get(worker), self._clock()
        if out is not None and now < out.until:
            return  # a leg from before, or one that nobody else could have
        if out is not None or (self._limits.failures and worker.failures >= self._limits.failures):
            self._eject(worker, now, error)

    def _eject(self, worker: Worker, now: float, error: ApiError) -> None:
        past = self._out.get(worker) or self._past.pop(worker, None) or _Out()
        if past.well_since < now - self._limits.longest_s:
            past = _Out()
        seconds = min(self._limits.longest_s, self._limits.first_s * 2.0**past.times)
        self._out[worker] = _Out(past.times + 1, now + seconds, now + seconds)
        self.ejections += 1
        log.warning(
            "%s: %s is left out for %g s after %d failures, the last: %s",
            *(self._role, worker.url, seconds, worker.failures, error.message),
        )
        self._look()

    def _went_well(self, worker: Worker) -> None:
        out, now = self._out.get(worker), self._clock()
        if out is None:
            worker.failures = 0
        elif now >= out.until or self._panics:
            worker.failures = max(0, self._limits.failures - 1)  # the next failure counts in full
            self._past[worker] = _Out(out.times, well_since=now)
            del self._out[worker]
            log.info("%s: %s is used again", self._role, worker.url)
            self._look()

    def _is_down(self, worker: Worker) -> bool:
        return self._faults[worker] >= _PROBES

    def _look(self) -> None:
        """Work out anew who may be picked."""
        workers, now = self._members.workers, self._clock()
        here = frozenset(workers)
        for kept in (self._out, self._past, self._faults):
            for gone in [worker for worker in kept if worker not in here]:
                del kept[gone]
        self._generation = self._members.generation
        self._next = min((out.until for out in self._out.values() if now < out.until), default=_NEVER)
        trial = frozenset(worker for worker, out in self._out.items() if now >= out.until)
        left = tuple(
            worker for worker in workers if not self._is_down(worker) and (worker not in self._out or worker in trial)
        )
        panics = len(left) < self._limits.least_left * len(workers)
        if panics and not self._panics:
            log.warning("%s: %d of %d workers are left, so all are used", self._role, len(left), len(workers))
        self._panics = panics
        self.on_trial = frozenset() if panics else trial
        self._used = workers if panics or len(left) == len(workers) else left
