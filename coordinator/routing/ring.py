"""A hash ring: where a number belongs, and who is next; when a worker comes or goes, only its share moves."""

from __future__ import annotations

from bisect import bisect_left
from hashlib import blake2b
from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from coordinator.routing.router import Worker

_POINTS = 64  # of each worker
_BYTES = 8
_BITS = 8 * _BYTES


class Ring:
    """Workers at points of their own, which depend on their URLs alone."""

    def __init__(self) -> None:
        self._points: list[int] = []
        self._owners: list[Worker] = []
        self._divide()

    def use(self, workers: Sequence[Worker]) -> None:
        """Let these be on the ring."""
        there, wanted = set(self._owners), set(workers)
        placed = [entry for entry in zip(self._points, self._owners, strict=True) if entry[1] in wanted]
        placed += [(point, worker) for worker in workers if worker not in there for point in _points(worker.url)]
        placed.sort(key=itemgetter(0))
        self._points = [point for point, _ in placed]
        self._owners = [worker for _, worker in placed]
        self._divide()

    def _divide(self) -> None:
        """Note where each part of the ring begins, of one or two for a point: a choice looks there, and not at many."""
        bits = max(len(self._points).bit_length(), 1)
        self._shift, half = _BITS - bits, 1 << bits - 1
        # A list's places below 0 are its last ones, as the numbers below 0 are here.
        self._parts = [bisect_left(self._points, part << self._shift) for part in (*range(half), *range(-half, 0))]
        owners = [*self._owners, *self._owners[:1]]
        self._firsts = [owners[begin] for begin in self._parts] if owners else []

    def first(self, place: int) -> Worker | None:
        """Return the first worker from a number's part on, without a look at any other."""
        return self._firsts[place >> self._shift] if self._firsts else None

    def after(self, place: int, most: int) -> Iterator[Worker]:
        """Return the first workers from a number's part on, some more than once, and at most once round."""
        owners, first = self._owners, self._parts[place >> self._shift]
        begin = first - len(owners)  # below 0, so that the end goes on with the beginning
        return map(owners.__getitem__, range(begin, min(begin + most, first)))


def _points(url: str) -> list[int]:
    """Return numbers of the range that Python's hashes have."""
    digests = (blake2b(f"{url} {number}".encode(), digest_size=_BYTES).digest() for number in range(_POINTS))
    return [int.from_bytes(digest, signed=True) for digest in digests]
