"""Prefix affinity: a prompt goes where its beginning was computed, as long as that worker is not overloaded.

A table remembers which workers were sent which blocks. A prompt of which at least half was seen goes to a worker that
saw the most of it. Any other goes where a hash ring puts its first unseen block, so that conversations with the same
system prompt are spread, each to a place that every replica of the coordinator comes to by itself. Nobody is sent a
prompt while he has more than his share in flight: then the next on the ring has it.

For who counts uncached tokens the ends of prompts are remembered too: the next turn of a conversation goes on there.

Source: V. Mirrokni et al., "Consistent Hashing with Bounded Loads"; the threshold of a half is SGLang router's.
"""

from __future__ import annotations

from collections import OrderedDict
from copy import copy
from dataclasses import dataclass
from random import getrandbits
from typing import TYPE_CHECKING

from coordinator.routing.blocks import prompt, tokens_behind
from coordinator.routing.ring import Ring

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from coordinator.context import RequestContext
    from coordinator.routing.blocks import Marks, Prompt
    from coordinator.routing.policies import Usable
    from coordinator.routing.router import PoolLoad, Worker

_HOLDERS = 4  # workers that are remembered for a block
_ENDS = 8  # ends of prompts that are remembered between a mark and the next
_SEEN_ENOUGH = 0.5
_NEAR = 64  # places on the ring: with a limit of 1.25 times the mean, at least a fifth of the workers are below it


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
        self._stays: dict[Worker, tuple[_Stay]] = {}  # each in the tuple that stands for it in the table
        self._table: OrderedDict[int, tuple[_Stay, ...]] = OrderedDict()
        self._ends: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._ring = Ring()
        self._workers: frozenset[Worker] = frozenset()
        self._share = 0.0  # of the pool's tokens in flight, above which a worker has too many
        self._leads = True  # or goes by the table of one that has more workers
        self._last = 0, 0  # how many blocks the chosen worker was sent before, of how many
        self._counted: tuple[Prompt, _Stay] | None = None  # whose tokens were counted last, and for which worker

    def use(self, workers: Sequence[Worker]) -> None:
        self._ring.use(workers)
        self._workers = frozenset(workers)
        self._share = self._max_load / (len(workers) or 1)
        if not self._leads:
            return
        stays = self._stays
        for worker in [worker for worker in stays if worker not in self._workers]:
            stays.pop(worker)[0].here = False
        for worker in workers:
            stays.setdefault(worker, (_Stay(worker),))

    def beside(self) -> PrefixAffinity:
        """Return one with a ring of its own, which goes by this one's table; who is told of prompts is this one."""
        other = copy(self)
        other._ring, other._leads, other._counted = Ring(), False, None
        return other

    def take_over(self, before: PrefixAffinity) -> None:
        """Go on with another's table, which begins with an empty one; with other marks it says nothing."""
        if before._marks is self._marks:
            self._table, before._table = before._table, OrderedDict()
            self._ends, before._ends = before._ends, OrderedDict()
            self._stays, before._stays = before._stays, {worker: (_Stay(worker),) for worker in before._stays}

    def choose(self, ctx: RequestContext, usable: Usable = None, *, again: bool = False) -> Worker | None:
        asked, limit = prompt(ctx, self._marks), self._limit()
        counted, self._counted = self._counted, None  # whatever is chosen next may change what was found
        if counted is not None and counted[0] is asked:
            worker = _least((counted[1],), limit, usable)
            if worker is not None:
                return worker
        worker = self._of_those_sent_it(asked, limit, usable)
        return self._by_ring(self._place(asked), limit, usable) if worker is None else worker

    def remember(self, ctx: RequestContext, worker: Worker) -> None:
        """Note that a worker is sent this request's prompt."""
        alone, sent = self._stays.get(worker), prompt(ctx, self._marks)
        if alone is None or not sent.marks:
            return
        last = self._marks.blocks[sent.marks - 1]
        if self._marks.spread and sent.blocks > last and not self._note(sent.number(sent.blocks), alone):
            self._note_end(sent.number(last), sent.blocks)
        self._remember(sent, alone)
        while len(self._table) > self._remembered_blocks:
            self._table.popitem(last=False)

    def uncached_tokens(self, ctx: RequestContext, most: int, usable: Usable = None) -> int:
        """Return how many of a prompt's tokens the worker that would be chosen now was not sent before.

        Args:
            most: from so many on they need not be counted.
        """
        asked = prompt(ctx, self._marks)
        worker = self._of_those_sent_it(asked, self._limit(), usable)
        known, _ = self._last
        self._counted = None
        if worker is not None:
            (stay,) = self._stays[worker]
            self._counted = asked, stay
            for end in sorted(self._ends.get(asked.number(known), ()), reverse=True):
                if end <= asked.blocks and stay in self._table.get(asked.number(end), ()):
                    known = end
                    break
        return tokens_behind(ctx, self._marks, known, most)

    def why(self, worker: Worker) -> str:
        known, blocks = self._last
        if not blocks:
            how = "the prompt is shorter than a block"
        elif known:
            how = f"it was sent at least {known} of the prompt's first {blocks} blocks before"
        else:
            how = f"by hash of {blocks} blocks"
        return f"{how}, with {worker.in_flight} legs and {worker.tokens} tokens in flight"

    def _of_those_sent_it(self, asked: Prompt, limit: float, usable: Usable) -> Worker | None:
        """Return the worker that was sent the most, if that is enough; of several the one with the least load."""
        table, blocks, mark = self._table, self._marks.blocks, asked.marks
        whole = blocks[mark - 1] if mark else 0
        self._last = 0, whole
        before, enough, among = None, _SEEN_ENOUGH * whole, None if self._leads else self._workers
        while mark and (many := blocks[mark - 1]) >= enough:
            holders = table.get(asked.number(many))
            if holders is None:
                if mark == asked.marks and asked.number(1) not in table:
                    break  # nor is anything between them
            elif holders is not before and (worker := _least(holders, limit, usable, among)) is not None:
                self._last = many, whole
                return worker
            before = holders
            mark -= 1
        return None

    def _place(self, asked: Prompt) -> int:
        """Return where the ring has a prompt: by the first mark that was sent to nobody who is still here."""
        if not asked.marks:
            # A prompt shorter than a block has nothing worth keeping together, so any place will do.
            return getrandbits(64) - (1 << 63)
        table, number = self._table, 0
        for mark in range(asked.marks):
            number = asked.number(self._marks.blocks[mark])
            if not _any_here(table.get(number, ())):
                break
        return number

    def _by_ring(self, place: int, limit: float, usable: Usable) -> Worker | None:
        """Return the next worker that is not above the limit; of those near by the least loaded, where all are."""
        first = self._ring.first(place)
        if first is not None and first.tokens <= limit and (usable is None or usable(first)):
            return first
        # Where none of those near by may be chosen, few may at all, and their places do not matter any more.
        for workers in (self._ring.after(place, _NEAR), self._workers):
            least = None
            for worker in workers:
                if usable is not None and not usable(worker):
                    continue
                if worker.tokens <= limit:
                    return worker
                least = worker if least is None or worker.tokens < least.tokens else least
            if least is not None:
                return least
        return None

    def _limit(self) -> float:
        """Return the load above which a worker gets nothing more; never all of them are above it."""
        limit = self._share * self._pool.tokens
        return limit if limit > self._free_tokens else self._free_tokens

    def _remember(self, sent: Prompt, alone: tuple[_Stay]) -> None:
        """Note what was sent up to the last mark, and up to the first that was sent to nobody yet.

        So with each prompt that goes on from a shared beginning there is a mark more of it, until they are told apart.
        Where a prompt ends at its last mark, its next turn may differ before that, so the one before is noted as well.
        """
        table, blocks, last = self._table, self._marks.blocks, sent.marks - 1
        if self._note(sent.number(blocks[last]), alone):
            if 2 * len(table) > self._remembered_blocks:  # else nothing is forgotten soon
                first = sent.number(1)  # without which the next turn would not be looked for
                table.setdefault(first, alone)
                table.move_to_end(first)
            return
        if last > 1 and sent.ends_at_a_mark():
            last -= 1
            self._note(sent.number(blocks[last]), alone)
        for many in blocks[:last]:
            number = sent.number(many)
            if not _any_here(table.get(number, ())):
                table[number] = alone
                table.move_to_end(number)
                return
            self._note(number, alone)

    def _note(self, number: int, alone: tuple[_Stay]) -> bool:
        """Note that a worker was sent what has this number; say whether it had been before."""
        table = self._table
        if (holders := table.get(number)) is None:
            table[number] = alone
            return False
        table.move_to_end(number)
        if alone[0] in holders:
            return True
        table[number] = *alone, *holders[: _HOLDERS - 1]
        return False

    def _note_end(self, mark: int, blocks: int) -> None:
        """Note that a prompt ends behind so many blocks, of those whose last mark has this number."""
        ends = self._ends
        before = ends.get(mark, ())
        if blocks not in before:
            ends[mark] = (blocks, *before[: _ENDS - 1])
        ends.move_to_end(mark)
        while len(ends) > self._remembered_blocks:  # which another file may have made fewer
            ends.popitem(last=False)


def _any_here(holders: Sequence[_Stay]) -> bool:
    for stay in holders:  # noqa: SIM110 - a generator takes three times as long
        if stay.here:
            return True
    return False


def _least(
    holders: Sequence[_Stay], limit: float, usable: Usable, among: Container[Worker] | None = None
) -> Worker | None:
    """Return the worker with the least load of those that are here, are not above the limit, and may be chosen."""
    least = None
    for stay in holders:
        worker = stay.worker
        if not stay.here or worker.tokens > limit or (among is not None and worker not in among):
            continue
        if (usable is None or usable(worker)) and (least is None or worker.tokens < least.tokens):
            least = worker
    return least
