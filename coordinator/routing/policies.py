"""The policies that choose one worker of a pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from coordinator.routing.router import Worker


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
