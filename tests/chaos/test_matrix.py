"""All that can go wrong, in every phase, format and set-up: each request has the right end, and leaves nothing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tests.chaos.cells import APIS, by_setup, every_cell, sample
from tests.chaos.faults import ROWS
from tests.chaos.report import LINES, Tally
from tests.chaos.stage import Lines, stage

if TYPE_CHECKING:
    import random

# A sample takes each fault in each phase in turn, so both have them all.
SHORT, LONG = 390, 12_000


def test_the_matrix_has_every_fault_of_the_simulator() -> None:
    """A new way to misbehave is a new row."""
    from dataclasses import fields

    from coordinator.sim import Fault

    used = {
        field.name
        for row in ROWS.values()
        if row.fault is not None
        for field in fields(Fault)
        if getattr(row.fault, field.name) != field.default
    }
    assert used | {"path"} == {field.name for field in fields(Fault)}


async def test_whatever_goes_wrong_each_request_has_the_right_end_and_leaves_nothing(
    rng: random.Random, full: bool
) -> None:
    """One coordinator per set-up answers one cell after the other, as it would for months."""
    count = int(os.environ.get("CHAOS_CELLS") or (LONG if full else SHORT))
    cells = sample(count, rng)
    tally, lines = Tally(), Lines()
    with lines.listening():
        for setup, own in by_setup(cells):
            async with stage(setup, lines, rng) as playing:
                for cell in own:
                    tally.add(cell, await playing.play(cell))
    LINES.extend(
        [f"{len(cells)} of {sum(1 for _ in every_cell())} cells, each in one of {len(APIS)} APIs", *tally.table()]
    )
    assert tally.faults == []
