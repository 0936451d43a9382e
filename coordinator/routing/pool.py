"""The workers of a pool, and one of them for each leg."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.routing.policies import POLICIES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.context import RequestContext
    from coordinator.routing.members import Members
    from coordinator.routing.router import Worker


class PoolRouter:
    """
    Args:
        members: the workers, which may change at any time.
        policy: how one of them is chosen.
        max_inflight: legs that a worker is given at a time, 0 is no limit. ``admission`` lets no more requests in than
            there is room for, so a worker gets one more only where the others have failed.
    """

    def __init__(self, members: Members, policy: str, max_inflight: int = 0) -> None:
        self.members = members
        self._choose = POLICIES[policy]
        self._max_inflight = max_inflight
        self._turn = -1

    def serves(self, ctx: RequestContext) -> bool:
        return True

    def pick(self, ctx: RequestContext, tried: Sequence[Worker] = ()) -> Worker | None:
        self._turn += 1
        left: Sequence[Worker] = self.members.workers
        if tried:
            left = [worker for worker in left if worker not in tried]
        if self._max_inflight:
            left = [worker for worker in left if worker.in_flight < self._max_inflight] or left
        return self._choose(left, self._turn) if left else None

    def known(self) -> tuple[Worker, ...]:
        return self.members.workers
