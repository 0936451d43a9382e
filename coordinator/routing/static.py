"""A fixed list of workers and the policies that choose among them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.routing.router import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from coordinator.context import RequestContext


def round_robin(workers: Sequence[Worker], turn: int) -> Worker:
    """Each in its turn."""
    return workers[turn % len(workers)]


def least_inflight(workers: Sequence[Worker], turn: int) -> Worker:
    """The one with the fewest legs being answered; among equals, each in its turn."""
    fewest = min(worker.in_flight for worker in workers)
    idle = [worker for worker in workers if worker.in_flight == fewest]
    return idle[turn % len(idle)]


POLICIES: dict[str, Callable[[Sequence[Worker], int], Worker]] = {
    "round_robin": round_robin,
    "least_inflight": least_inflight,
}


class StaticRouter:
    """Workers from the file."""

    def __init__(self, endpoints: Sequence[str], policy: str) -> None:
        self._workers = tuple(Worker(url) for url in endpoints)
        self._choose = POLICIES[policy]
        self._turn = -1

    def serves(self, ctx: RequestContext) -> bool:
        return True

    def pick(self, ctx: RequestContext, tried: Sequence[Worker] = ()) -> Worker | None:
        self._turn += 1
        left = [worker for worker in self._workers if worker not in tried] if tried else self._workers
        return self._choose(left, self._turn) if left else None

    def known(self) -> tuple[Worker, ...]:
        return self._workers
