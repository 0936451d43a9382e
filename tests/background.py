"""Faults of what runs beside requests, as tests count them."""

from __future__ import annotations

from collections import Counter

from coordinator.background import Faults


class FaultsTold(Faults):
    """
    Attributes:
        counts: how often each task has failed.
    """

    def __init__(self) -> None:
        super().__init__(self)
        self.counts: Counter[str] = Counter()

    def background_failed(self, task: str) -> None:
        self.counts[task] += 1
