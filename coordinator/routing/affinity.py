"""Prefix affinity: a prompt goes where its beginning was computed, as long as that worker is not overloaded.

A table remembers which workers were sent which blocks. A prompt of which at least half was seen goes to a worker that
saw the most of it. Any other goes where a hash ring puts its first unseen block, so that conversations with the same
system prompt are spread, each to a place that every replica of the coordinator comes to by itself. Nobody is sent a
prompt while he has more than his share in flight: then the next on the ring has it.

Source: V. Mirrokni et al., "Consistent Hashing with Bounded Loads"; the threshold of a half is SGLang router's.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from random import getrandbits
from typing import TYPE_CHECKING

from coordinator.routing.blocks import chain, tokens_behind
from coordinator.routing.ring import Ring

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.context import RequestContext
    from coordinator.routing.blocks import Marks
    from coordinator.routing.policies import Usable
    from coordinator.routing.router import PoolLoad, Worker

_HOLDERS = 4  # workers that are remembered for a block
_SEEN_ENOUGH = 0.5


@dataclass(slots=True, eq=False)
class _Stay:
    """A worker from when it came until it leaves: if it comes back, what it had in its cache may be gone."""

    worker: Worker
    here: bool = True


class PrefixAffinity:
    """
    Args:
        pool: what the workers do together.
        where: the marks at which prompts are compared.
        remembered_blocks: how many marks the table has; the ones that were not asked for the longest go first.
        max_load: how many times the mean load a worker may have.
        free_tokens: tokens in flight that a worker may have whatever the others have.
    """

    weighs = True

    def __init__(self, pool: PoolLoad, where: Marks, remembered_blocks: int, max_load: float, free_tokens: int) -> None:
        self._pool = pool
        self._marks = where
        self._remembered_blocks = remembered_blocks
        self._max_load = max_load
        self._free_tokens = free_tokens
        self._stays: dict[Worker, _Stay] = {}
        self._table: OrderedDict[int, tuple[_Stay, ...]] = OrderedDict()
        self._ring = Ring()
        self._last = 0, 0  # how many blocks the chosen worker was sent before, of how many

    def use(self, workers: Sequence[Worker]) -> None:
        before = self._stays
        self._stays = {worker: before.get(worker) or _Stay(worker) for worker in workers}
        for worker in before.keys() - self._stays.keys():
            before[worker].here = False
        self._ring.use(workers)

    def take_over(self, before: PrefixAffinity) -> None:
        """Go on with another's table, which begins with an empty one; with other marks it says nothing."""
        if before._marks is self._marks:
            self._table, before._table = before._table, OrderedDict()
            self._stays, before._stays = before._stays, {worker: _Stay(worker) for worker in before._stays}

    def choose(self, ctx: RequestContext, usable: Usable = None, *, again: bool = False) -> Worker | None:
        numbers, limit = chain(ctx, self._marks), self._limit()
        worker, seen = self._of_those_sent_it(numbers, limit, usable)
        if worker is None:
            # A prompt shorter than a block has nothing worth keeping together, so any place will do.
            place = numbers[min(seen, len(numbers) - 1)] if numbers else getrandbits(64) - (1 << 63)
            worker = self._by_ring(place, limit, usable)
        return worker

    def remember(self, ctx: RequestContext, worker: Worker) -> None:
        """Note that a worker is sent this request's prompt."""
        if (stay := self._stays.get(worker)) is not None:
            self._remember(chain(ctx, self._marks), stay)

    def uncached_tokens(self, ctx: RequestContext, usable: Usable = None) -> int:
        """Return how many of a prompt's tokens the worker that would be chosen now was not sent before."""
        self._of_those_sent_it(chain(ctx, self._marks), self._limit(), usable)
        known, _ = self._last
        return tokens_behind(ctx, self._marks, known)

    def why(self, worker: Worker) -> str:
        known, blocks = self._last
        if not blocks:
            how = "the prompt is shorter than a block"
        elif known:
            how = f"it was sent at least {known} of the prompt's first {blocks} blocks before"
        else:
            how = f"by hash of {blocks} blocks"
        return f"{how}, with {worker.in_flight} legs and {worker.tokens} tokens in flight"

    def _of_those_sent_it(self, numbers: Sequence[int], limit: float, usable: Usable) -> tuple[Worker | None, int]:
        """Return the worker that was sent the most, if that is enough; of several the one with the least load.

        Beside it: how many marks were sent to somebody who is still here.
        """
        table, blocks = self._table, self._marks.blocks
        whole = blocks[len(numbers) - 1] if numbers else 0
        self._last = 0, whole
        seen, before = 0, None
        for mark in range(len(numbers), 0, -1):
            enough = blocks[mark - 1] >= _SEEN_ENOUGH * whole
            if seen and not enough:
                break
            holders = table.get(numbers[mark - 1])
            if holders is None or holders is before:
                continue
            before = holders
            if enough and (worker := _least(holders, limit, usable)) is not None:
                self._last = blocks[mark - 1], whole
                return worker, mark
            if not seen and any(stay.here for stay in holders):
                seen = mark
        return None, seen

    def _by_ring(self, place: int, limit: float, usable: Usable) -> Worker | None:
        least = None
        for worker in self._ring.after(place):
            if usable is not None and not usable(worker):
                continue
            if worker.tokens <= limit:
                return worker
            least = worker if least is None or worker.tokens < least.tokens else least
        return least

    def _limit(self) -> float:
        """Return the load above which a worker gets nothing more; never all of them are above it."""
        return max(self._max_load * self._pool.tokens / (len(self._stays) or 1), self._free_tokens)

    def _remember(self, numbers: Sequence[int], stay: _Stay) -> None:
        table = self._table
        alone: tuple[_Stay, ...] = (stay,)
        before, now = alone, alone
        for number in reversed(numbers):
            holders = table.get(number)
            if holders is None:
                table[number] = alone
                continue
            table.move_to_end(number)
            if stay in holders:  # and so it is in what comes before it
                break
            if holders is not before:  # what went the same way shares one tuple
                before, now = holders, (stay, *holders[: _HOLDERS - 1])
            table[number] = now
        while len(table) > self._remembered_blocks:
            table.popitem(last=False)


def _least(holders: Sequence[_Stay], limit: float, usable: Usable) -> Worker | None:
    """Return the worker with the least load of those that are here, are not above the limit, and may be chosen."""
    least = None
    for stay in holders:
        worker = stay.worker
        if stay.here and worker.tokens <= limit and (usable is None or usable(worker)):
            least = worker if least is None or worker.tokens < least.tokens else least
    return least
