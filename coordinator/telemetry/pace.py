"""When the frames of one stream went out: the time to the first token, the gaps between tokens, the time of each.

A frame is what one read of the worker became, if it has generated content; it may hold several tokens. To note one
costs a look at the clock: gaps are sorted by their length several at a time, since that code is seldom in the
processor's caches. The metrics take all gaps of a request at once, when it is over.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# From speculative tokens in one burst to a worker that stalls.
GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)

# So many gaps are sorted together.
_TOGETHER = 16


class Pace:
    """The clock points of one stream.

    Args:
        clock: monotonic seconds.
        read_at: when the request had been read.
    """

    __slots__ = ("_clock", "_first_at", "_gaps", "_marks", "_read_at")

    def __init__(self, clock: Callable[[], float], read_at: float) -> None:
        self._clock = clock
        self._read_at = read_at
        self._first_at: float | None = None
        self._gaps = [0] * (len(GAP_SECONDS) + 1)
        self._marks: list[float] = []  # the last one whose gap was sorted, and those after it

    def mark(self) -> None:
        """Note that a frame with content has been written just now."""
        marks = self._marks
        marks.append(self._clock())
        if len(marks) > _TOGETHER:
            self._sort()

    @property
    def gaps(self) -> list[int]:
        """How many gaps were no longer than each of ``GAP_SECONDS`` and longer than the one before it.

        The last are those beyond them all.
        """
        self._sort()
        return self._gaps

    @property
    def ttft_s(self) -> float | None:
        """From the request read to the first frame; None while there is none."""
        self._sort()
        return None if self._first_at is None else self._first_at - self._read_at

    @property
    def lasted_s(self) -> float:
        """From the first frame to the last: the sum of all gaps."""
        self._sort()
        return 0.0 if self._first_at is None else self._marks[-1] - self._first_at

    def per_token_s(self, output_tokens: int) -> float | None:
        """Return the mean time of a token after the first; None where there were not two, or not two frames."""
        return self.lasted_s / (output_tokens - 1) if output_tokens > 1 and any(self.gaps) else None

    def _sort(self) -> None:
        marks = self._marks
        if self._first_at is None and marks:
            self._first_at = marks[0]
        for earlier, later in pairwise(marks):
            self._gaps[bisect_left(GAP_SECONDS, later - earlier)] += 1
        del marks[:-1]
