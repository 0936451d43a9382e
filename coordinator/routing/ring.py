"""A hash ring: where a number belongs, and who is next; when a worker comes or goes, only its share moves."""

from __future__ import annotations

from bisect import bisect_right
from hashlib import blake2b
from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from coordinator.routing.router import Worker

_POINTS = 64  # of each worker
_BYTES = 8


class Ring:
    """Workers at points of their own, which depend on their URLs alone."""

    def __init__(self) -> None:
        self._points: list[int] = []
        self._owners: list[Worker] = []

    def use(self, workers: Sequence[Worker]) -> None:
        """Let these be on the ring."""
        there, wanted = set(self._owners), set(workers)
        placed = [entry for entry in zip(self._points, self._owners, strict=True) if entry[1] in wanted]
        placed += [(point, worker) for worker in workers if worker not in there for point in _points(worker.url)]
        placed.sort(key=itemgetter(0))
        self._points = [point for point, _ in placed]
        self._owners = [worker for _, worker in placed]

    def after(self, place: int) -> Iterator[Worker]:
        """Yield the workers that follow on a number, some of them more than once, once round."""
        owners, first = self._owners, bisect_right(self._points, place)
        for at in range(first, len(owners)):
            yield owners[at]
        for at in range(first):
            yield owners[at]


def _points(url: str) -> list[int]:
    """Return numbers of the range that Python's hashes have."""
    digests = (blake2b(f"{url} {number}".encode(), digest_size=_BYTES).digest() for number in range(_POINTS))
    return [int.from_bytes(digest, signed=True) for digest in digests]
