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
from random import randrange
from typing import TYPE_CHECKING

from coordinator.routing.blocks import chain
from coordinator.routing.ring import Ring
from envelope.prompt import count_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.context import RequestContext
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
        block_tokens: tokens of one block.
        remembered_blocks: how many blocks the table has; the ones that were not asked for the longest go first.
        max_load: how many times the mean load a worker may have.
        free_tokens: tokens in flight that a worker may have whatever the others have.
    """

    weighs = True

    def __init__(
        self, pool: PoolLoad, block_tokens: int, remembered_blocks: int, max_load: float, free_tokens: int
    ) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
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
        """Go on with another's table, which begins with an empty one; blocks of another size are other blocks."""
        if before._block_tokens == self._block_tokens:
            self._table, before._table = before._table, OrderedDict()
            self._stays, before._stays = before._stays, {worker: _Stay(worker) for worker in before._stays}

    def choose(self, ctx: RequestContext, usable: Usable = None, *, again: bool = False) -> Worker | None:
        blocks = chain(ctx, self._block_tokens)
        seen = self._seen(blocks)
        return self._of_those_sent_it(blocks, seen, usable) or self._by_ring(blocks, seen, usable)

    def remember(self, ctx: RequestContext, worker: Worker) -> None:
        """Note that a worker is sent this request's prompt."""
        if (stay := self._stays.get(worker)) is not None:
            self._remember(chain(ctx, self._block_tokens), stay)

    def uncached_tokens(self, ctx: RequestContext, usable: Usable = None) -> int:
        """Return how many of a prompt's tokens the worker that would be chosen now was not sent before."""
        blocks = chain(ctx, self._block_tokens)
        self._of_those_sent_it(blocks, self._seen(blocks), usable)
        known, _ = self._last
        return count_tokens(ctx.api, ctx.body, ctx.rendered) - known * self._block_tokens

    def why(self, worker: Worker) -> str:
        known, blocks = self._last
        how = f"it was sent {known} of the prompt's {blocks} blocks before" if known else f"by hash of {blocks} blocks"
        how = how if blocks else "the prompt is shorter than a block"
        return f"{how}, with {worker.in_flight} legs and {worker.tokens} tokens in flight"

    def _seen(self, blocks: Sequence[int]) -> list[tuple[_Stay, ...]]:
        """Return who was sent each block, up to the first that nobody was sent."""
        found, table = [], self._table
        for block in blocks:
            if (holders := table.get(block)) is None:
                break
            found.append(holders)
        return found

    def _of_those_sent_it(
        self, blocks: Sequence[int], seen: Sequence[tuple[_Stay, ...]], usable: Usable
    ) -> Worker | None:
        """Return the worker that was sent the most, if that is enough; of several the one with the least load."""
        self._last = 0, len(blocks)
        limit, before = self._limit(), None
        for known in range(len(seen), 0, -1):
            if known < _SEEN_ENOUGH * len(blocks):
                break
            holders = seen[known - 1]
            if holders is not before and (worker := _least(holders, limit, usable)) is not None:
                self._last = known, len(blocks)
                return worker
            before = holders
        return None

    def _by_ring(self, blocks: Sequence[int], seen: Sequence[tuple[_Stay, ...]], usable: Usable) -> Worker | None:
        limit, least = self._limit(), None
        # A prompt shorter than a block has nothing worth keeping together, so any place will do.
        place = blocks[min(_known(seen), len(blocks) - 1)] if blocks else randrange(-(2**63), 2**63)
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

    def _remember(self, blocks: Sequence[int], stay: _Stay) -> None:
        table = self._table
        alone: tuple[_Stay, ...] = (stay,)
        before, now = alone, alone
        for block in reversed(blocks):  # the first block last, as without it the others are not found
            holders = table.get(block)
            if holders is None:
                table[block] = alone
                continue
            if holders is not before:  # blocks that went the same way share one tuple
                before, now = holders, holders if stay in holders else (stay, *holders[: _HOLDERS - 1])
            if now is not holders:
                table[block] = now
            table.move_to_end(block)
        while len(table) > self._remembered_blocks:
            table.popitem(last=False)


def _known(seen: Sequence[tuple[_Stay, ...]]) -> int:
    """Return how many blocks were sent to somebody who is still here."""
    here: tuple[_Stay, ...] = ()
    for number, holders in enumerate(seen):
        if holders is not here and not any(stay.here for stay in holders):
            return number
        here = holders
    return len(seen)


def _least(holders: Sequence[_Stay], limit: float, usable: Usable) -> Worker | None:
    """Return the worker with the least load of those that are here, are not above the limit, and may be chosen."""
    least = None
    for stay in holders:
        worker = stay.worker
        if stay.here and worker.tokens <= limit and (usable is None or usable(worker)):
            least = worker if least is None or worker.tokens < least.tokens else least
    return least
