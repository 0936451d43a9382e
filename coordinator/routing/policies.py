"""The policies that choose one worker of a pool by its turn, by chance, or by its load.

A policy is told the workers whenever they change, and from then on chooses among them. It is asked for every leg, of
pools with hundreds of workers, so none of them looks at every worker for a choice.

Source: M. Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing".
"""

from __future__ import annotations

import heapq
import random
from itertools import chain, count
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from coordinator.context import RequestContext
    from coordinator.routing.router import PoolLoad, Worker

    Usable = Callable[[Worker], bool] | None
    """Says which workers may be chosen; None is all of them."""


# Draws that may miss before the workers are looked through from one of them on: where most are full, or were tried.
_DRAWS = 4


class Policy(Protocol):
    """One way to choose.

    Attributes:
        weighs: it goes by the tokens in flight, so legs must be counted with their weight.
    """

    weighs: bool

    def use(self, workers: Sequence[Worker]) -> None:
        """Choose among these from now on."""

    def choose(self, ctx: RequestContext, usable: Usable = None, *, again: bool = False) -> Worker | None:
        """Return the worker for a leg of this request; None when no worker may be chosen.

        Args:
            again: another worker had the leg, and failed: that is nobody's turn.
        """

    def why(self, worker: Worker) -> str:
        """Say why this worker, which was chosen last."""

    def beside(self) -> Policy:
        """Return one that chooses in the same way, by what this one learns, among some of the workers."""


class RoundRobin:
    """Each in its turn."""

    weighs = False

    def __init__(self) -> None:
        self._workers: Sequence[Worker] = ()
        self._turn = -1

    def use(self, workers: Sequence[Worker]) -> None:
        self._workers = workers

    def choose(self, ctx: RequestContext, usable: Usable = None, *, again: bool = False) -> Worker | None:
        workers = self._workers
        for ahead in range(1, len(workers) + 1):
            turn = (self._turn + ahead) % len(workers)
            if usable is None or usable(workers[turn]):
                # A retry that took a turn would bring each next request to the worker that fails.
                self._turn = self._turn if again else turn
                return workers[turn]
        return None

    def beside(self) -> RoundRobin:
        return RoundRobin()

    def why(self, worker: Worker) -> str:
        return f"number {self._workers.index(worker) + 1} of {len(self._workers)}"


class _ByChance:
    """
    Args:
        chance: a number from 0 up to 1, without it.
    """

    def __init__(self, chance: Callable[[], float] = random.random) -> None:
        self._workers: Sequence[Worker] = ()
        self._chance = chance

    def use(self, workers: Sequence[Worker]) -> None:
        self._workers = workers

    def _any(self, usable: Usable, but: Worker | None = None) -> Worker | None:
        """Return some usable worker other than ``but``."""
        workers = self._workers
        for _ in range(_DRAWS if workers else 0):
            worker = workers[int(self._chance() * len(workers))]
            if worker is not but and (usable is None or usable(worker)):
                return worker
        first = int(self._chance() * len(workers))
        for at in chain(range(first, len(workers)), range(first)):
            worker = workers[at]
            if worker is not but and (usable is None or usable(worker)):
                return worker
        return None


class Random(_ByChance):
    """Any, by chance: replicas of the coordinator never fall into step."""

    weighs = False

    def choose(self, ctx: RequestContext, usable: Usable = None, *, again: bool = False) -> Worker | None:
        return self._any(usable)

    def beside(self) -> Random:
        return Random(self._chance)

    def why(self, worker: Worker) -> str:
        return f"one of {len(self._workers)}"


class PowerOfTwo(_ByChance):
    """The less loaded of two that chance names."""

    weighs = True

    def choose(self, ctx: RequestContext, usable: Usable = None, *, again: bool = False) -> Worker | None:
        one = self._any(usable)
        other = self._any(usable, but=one)
        return one if other is None or (one is not None and one.tokens <= other.tokens) else other

    def beside(self) -> PowerOfTwo:
        return PowerOfTwo(self._chance)

    def why(self, worker: Worker) -> str:
        return f"the less loaded of two, with {in_flight(worker)}"


def in_flight(worker: Worker) -> str:
    """Say what a worker has to do, as far as it comes from here."""
    return f"{worker.in_flight} legs and {worker.tokens} tokens in flight"


def tokens(worker: Worker) -> float:
    return worker.tokens


class LeastLoaded:
    """The one with the least load; among equals, the one that was chosen longest ago.

    The workers stand in a heap by the load they had when they were entered. A load that has grown since is put right
    when its entry comes to the top; for one that has fallen a new entry is made, and the old one is void. So a choice
    costs a few steps of the heap, however many workers there are.

    Args:
        pool: tells of legs that end, and of what workers say of their load.
        load: what to go by.
        told: the same in words.
    """

    weighs = True

    def __init__(
        self,
        pool: PoolLoad,
        load: Callable[[Worker], float] = tokens,
        told: Callable[[Worker], str] = in_flight,
    ) -> None:
        self._pool = pool
        self._load = load
        self._told = told
        self._numbers = count()
        self._heap: list[tuple[float, int, Worker]] = []
        self._valid: dict[Worker, int] = {}  # the number of each worker's entry
        pool.ordered.append(self.enter)

    def use(self, workers: Iterable[Worker]) -> None:
        self._valid = {worker: next(self._numbers) for worker in workers}
        self._rebuild()

    def enter(self, worker: Worker) -> None:
        """Let a worker stand at its present load."""
        if worker in self._valid:
            self._valid[worker] = number = next(self._numbers)
            heapq.heappush(self._heap, (self._load(worker), number, worker))
            if len(self._heap) > 4 * len(self._valid) + 64:
                self._rebuild()

    def choose(self, ctx: RequestContext, usable: Usable = None, *, again: bool = False) -> Worker | None:
        passed_over = []
        while (worker := self._top()) is not None:
            if usable is None or usable(worker):
                self._to_the_end_of_its_equals(worker)
                break
            passed_over.append(heapq.heappop(self._heap))
        for entry in passed_over:
            heapq.heappush(self._heap, entry)
        return worker

    def beside(self) -> LeastLoaded:
        return LeastLoaded(self._pool, self._load, self._told)

    def why(self, worker: Worker) -> str:
        return f"the least loaded, with {self._told(worker)}"

    def _top(self) -> Worker | None:
        """Return the least loaded worker, whose entry is then the first and right."""
        heap = self._heap
        while heap:
            load, number, worker = heap[0]
            if self._valid.get(worker) != number:
                heapq.heappop(heap)
            elif (now := self._load(worker)) > load:
                heapq.heapreplace(heap, (now, number, worker))
            else:
                return worker
        return None

    def _to_the_end_of_its_equals(self, worker: Worker) -> None:
        self._valid[worker] = number = next(self._numbers)
        heapq.heapreplace(self._heap, (self._load(worker), number, worker))

    def _rebuild(self) -> None:
        self._heap = [(self._load(worker), number, worker) for worker, number in self._valid.items()]
        heapq.heapify(self._heap)
