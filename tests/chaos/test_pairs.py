"""Every fault, at either of two legs in flight at once: each request has the right end, and nobody is left waiting."""

from __future__ import annotations

import asyncio
import itertools
import os
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from coordinator.config import Config
from coordinator.sim import Settings, SimFleet
from coordinator.workers import release
from coordinator.workers.retry import RetryBudget
from steps import prefill_decode
from tests.bounds import HANG_S
from tests.chaos.cells import Cell, Setup
from tests.chaos.client import PATHS, body_of, read, wrong
from tests.chaos.faults import ROWS
from tests.chaos.oracle import ANSWER, Expected
from tests.chaos.report import LINES
from tests.chaos.stage import Lines, spoil
from tests.flows.chaos import hang_up
from tests.flows.client import exchange
from tests.flows.conftest import Running, config_tree, listening, poll
from tests.flows.pairs import KINDS

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator

SHORT = 50
# The other leg may have brought the answer before these show, which prefill says after the two have met.
LATE = frozenset(("cut in half", "half, clean", "aborted"))
# Whose worker is another than the next one's is no matter here, and what they spoil is not asked for.
LEFT_OUT = frozenset(("drops a kept connection", "half a hand-over", "no echo of the mode", "another mode"))
SETUP = Setup("openai", probes=False, workers=2, on_missing_handover="fail", on_prefill_failure="fail")
LIMITS = {"first_byte_timeout": "300ms", "idle_timeout": "300ms"}


def cells() -> list[Cell]:
    what = itertools.product(ROWS, ("prefill", "decode"), (False, True), (False, True), ("stays", "leaves"))
    return [
        Cell(SETUP, fault, phase, lasting, stream, client)
        for fault, phase, lasting, stream, client in what
        if fault not in LEFT_OUT and phase in ROWS[fault].phases
    ]


def expected(cell: Cell) -> tuple[Expected, ...]:
    """Return the ends that a request may have, for a client who stays."""
    streamed = cell.stream and cell.phase == "decode"
    effect = cell.row.effect(cell.phase, streamed=streamed, has_mode=False)
    if cell.phase == "prefill" and effect.kind == "nothing" and cell.fault != "aborted":
        return (ANSWER,)  # nothing is handed over by way of the answer
    word = {502: "leg_failed", 503: "unavailable", 504: "timeout"}.get(effect.status, "rejected")
    failed = Expected("error", effect.status, word, cell.phase)
    broken = Expected("broken", effect.status, "stream_broken", cell.phase)
    if cell.row.hangs and effect.kind == "failed":
        # A leg that is silent has the other wait for it, and either may be the first to be late.
        return tuple(Expected("error", 504, word, by) for by in ("prefill", "decode"))
    if cell.phase == "prefill" and cell.fault in LATE:
        return (ANSWER, failed, broken)
    if effect.kind == "fine" or (effect.kind == "again" and not cell.lasting):
        return (ANSWER,)
    return (broken,) if effect.kind in ("broken", "told") else (failed,)


class Stage:
    """A fleet whose legs meet in flight, with a coordinator in front."""

    def __init__(self, fleet: SimFleet, at: Running, lines: Lines, rng: random.Random) -> None:
        self._fleet = fleet
        self._at = at
        self._lines = lines
        self._rng = rng
        self._roles = {"prefill": fleet.prefills, "decode": fleet.decodes}
        for workers in self._roles.values():
            for worker in workers:  # so that a fault that happens once meets whichever worker is asked
                worker.behave._next = workers[0].behave._next

    async def play(self, cell: Cell, number: int) -> str:
        """Return what was wrong, or nothing."""
        text = f"cell {number}: " + " ".join(f"word {n}" for n in range(6))
        self._at.upstream._budget = RetryBudget()  # one that earlier cells have spent would decide this one
        await self._spoil(cell)
        try:
            async with asyncio.timeout(HANG_S):
                why = await self._client(cell, text)
        except TimeoutError:
            why = "no answer"
        await self._restore(cell)
        return why or await self._left()

    async def _spoil(self, cell: Cell) -> None:
        workers, fault = self._roles[cell.phase], cell.row.fault
        await spoil(workers, cell)
        if fault is not None and fault.drop:
            await hang_up(*workers)

    async def _restore(self, cell: Cell) -> None:
        for worker in self._roles[cell.phase]:
            worker.behave.clear()
            if worker._site is None:
                await worker.accept_connections()

    async def _client(self, cell: Cell, text: str) -> str:
        async with exchange(self._at.url, PATHS["chat"], body_of(cell, text)) as live:
            if cell.leaves:
                await asyncio.sleep(self._rng.random() * 0.03)
                live.cut()
                return ""
            got = await read(live, slowly=False)
        if got is None:
            return "no head"
        told = [wrong(cell, text, got, each) for each in expected(cell)]
        return "" if "" in told else told[0]

    async def _left(self) -> str:
        workers = [*self._fleet.prefills, *self._fleet.decodes]
        try:
            # A delivery that is made again, or comes of a prefill that ran on, would meet the next cell's fault.
            upstream, releaser = self._at.upstream, self._at.front.plan.releaser
            await poll(lambda: not (self._at.in_flight() or upstream._lingering or releaser._tasks))
            await poll(lambda: not any(worker.in_flight or worker.core.running for worker in workers))
        except AssertionError:
            return f"left: {self._at.in_flight()}, busy: {[w.role for w in workers if w.in_flight]}"
        pairs, wrong_ = self._fleet.pairs, [*self._fleet.pairs.violations, *self._lines.tracebacks]
        # A decode that was spoiled has not fetched, and nobody can tell one whose prefill was.
        for kept in (pairs.violations, pairs.unsent, pairs.stranded, self._lines.tracebacks):
            kept.clear()
        return "; ".join(wrong_)


@asynccontextmanager
async def stage(fleet: SimFleet, limits: dict[str, str], lines: Lines, rng: random.Random) -> AsyncIterator[Stage]:
    well = {"health": {"failures": 0}}  # a worker that was left out would decide the next cells
    changes: dict[str, Any] = {"server": {"readiness_interval": "1h"}, "pools": {"prefill": well, "decode": well}}
    config = Config.model_validate(config_tree(fleet, "pair", {"prefill-decode": limits}, changes))
    async with AsyncExitStack() as stack:
        yield Stage(fleet, await listening(stack, config), lines, rng)


@pytest.mark.parametrize("kind", KINDS)
async def test_whatever_goes_wrong_with_one_leg_of_a_pair(kind: str, rng: random.Random, full: bool) -> None:
    """Legs that hang meet a limit; nobody else is hurried."""
    chosen = cells()
    rng.shuffle(chosen)
    chosen = chosen if full else chosen[: int(os.environ.get("CHAOS_CELLS") or SHORT)]
    lines, faults = Lines(), list[str]()
    settings = Settings(kv=kind)
    # A delivery may meet a worker that hangs, and so may a prefill that runs on.
    soon = patch.object(release, "_DEADLINE_S", 0.5), patch.object(release, "_AGAIN_AFTER_S", (0.01, 0.05))
    with lines.listening(), soon[0], soon[1], patch.object(prefill_decode, "_RUNS_ON_S", 0.5):
        async with SimFleet(prefills=2, decodes=2, settings=settings) as fleet:
            for limits in ({}, LIMITS):
                async with stage(fleet, limits, lines, rng) as playing:
                    for number, cell in enumerate(chosen):
                        if cell.row.hangs is bool(limits) and (why := await playing.play(cell, number)):
                            faults.append(f"{cell}: {why}")
    LINES.append(f"pairs by {kind}: {len(chosen)} of {len(cells())} cells")
    assert faults == [], "\n".join(faults)
