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
    """Workers from the file.

    Args:
        max_inflight: legs that a worker is given at a time, 0 is no limit. ``admission`` lets no more requests in than
            there is room for, so a worker gets one more only where the others have failed.
        headers: what every leg carries.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        policy: str,
        max_inflight: int = 0,
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._workers = tuple(Worker(url, headers) for url in endpoints)
        self._choose = POLICIES[policy]
        self._max_inflight = max_inflight
        self._turn = -1

    def serves(self, ctx: RequestContext) -> bool:
        return True

    def pick(self, ctx: RequestContext, tried: Sequence[Worker] = ()) -> Worker | None:
        self._turn += 1
        left: Sequence[Worker] = self._workers
        if tried:
            left = [worker for worker in left if worker not in tried]
        if self._max_inflight:
            left = [worker for worker in left if worker.in_flight < self._max_inflight] or left
        return self._choose(left, self._turn) if left else None

    def known(self) -> tuple[Worker, ...]:
        return self._workers
