"""What the chaos tests say at the end: tables, by fault and by kind of leak, and how many inputs were tried."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.chaos.faults import ROWS

if TYPE_CHECKING:
    from tests.chaos.cells import Cell
    from tests.chaos.stage import Verdict

LINES: list[str] = []  # printed by ``conftest`` when all tests have run

_WRONG = ("outcome", "hang")


@dataclass(slots=True)
class Tally:
    """Counts what became of the cells."""

    injected: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    leaks: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def add(self, cell: Cell, verdict: Verdict) -> None:
        self.injected[cell.fault] += 1
        self.left[cell.fault] += verdict.left
        for kind, why in verdict.wrong.items():
            self.faults.append(f"{kind}: {cell}: {why}")
            if kind in _WRONG:
                self.wrong[cell.fault] += 1
            else:
                self.leaks[cell.fault] += 1
                self.kinds[kind] += 1

    def table(self) -> list[str]:
        head = f"{'fault':26} {'requests':>8} {'wrong':>6} {'leaks':>6} {'blocks that nobody could free':>30}"
        rows = [
            f"{name:26} {self.injected[name]:8} {self.wrong[name]:6} {self.leaks[name]:6} {self.left[name]:30}"
            for name in ROWS
        ]
        total = sum(self.injected.values())
        wrong, leaks, left = (sum(counter.values()) for counter in (self.wrong, self.leaks, self.left))
        kinds = ", ".join(f"{kind} {count}" for kind, count in self.kinds.items()) or "none"
        return [head, *rows, f"{'all':26} {total:8} {wrong:6} {leaks:6} {left:30}", f"leaks by kind: {kinds}"]
