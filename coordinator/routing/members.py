"""The workers of a pool, which may change while requests are under way.

``replace`` is told all of them, by whoever finds workers. A worker that leaves is picked no more and its open legs run
to their end; one that comes back meanwhile is the same object, so that its legs are still counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.routing.router import PoolLoad, Worker
from coordinator.settings.units import origin

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


class Members:
    """
    Args:
        urls: the base URLs of the workers, of which there may be none yet.
        headers: what every leg to them carries.

    Attributes:
        load: what they do together.
        workers: those that may be picked, in the order in which they were named.
        by_origin: the same, each by its base URL with the port, however that was written.
        generation: another number after each change.
    """

    def __init__(self, urls: Iterable[str] = (), headers: Sequence[tuple[str, str]] = ()) -> None:
        self.load = PoolLoad()
        self._headers = headers
        self._leaving: dict[str, Worker] = {}
        self.workers: tuple[Worker, ...] = ()
        self.generation = 0
        self.by_origin: Mapping[str, Worker] = {}
        self.replace(urls)

    @property
    def leaving(self) -> tuple[Worker, ...]:
        """Those that have left with legs still open."""
        return tuple(worker for worker in self._leaving.values() if worker.in_flight)

    def replace(self, urls: Iterable[str]) -> None:
        """Let these be the workers; who is among them already stays as it is."""
        before = {worker.url: worker for worker in (*self.leaving, *self.workers)}
        now = {url: before.get(url) or Worker(url, self._headers, self.load) for url in urls}
        self._leaving = {url: worker for url, worker in before.items() if url not in now}
        if (workers := tuple(now.values())) != self.workers:
            self._be(workers)

    def take_over(self, before: Members) -> bool:
        """Keep the workers that were members before: a new plan takes an old one's place. False: they are others.

        One that is now sent other headers, such as another key, is a new worker: requests of the old plan may still be
        under way, and go on with theirs.
        """
        if list(before._headers) != list(self._headers):
            return False
        asked = {worker.url: worker.lacks for worker in self.workers}
        self._leaving = {worker.url: worker for worker in before.leaving}
        self._be(before.workers)
        self.load.tokens = 0
        for worker in (*before.leaving, *before.workers):
            # From here on these are renewed, and told of the load, and no more the old plan's.
            worker.headers, worker.pool = self._headers, self.load
            self.load.tokens += worker.tokens
            worker.lacks = asked.get(worker.url, worker.lacks)  # what the new plan needs of it
        self.replace(asked)
        return True

    def _be(self, workers: tuple[Worker, ...]) -> None:
        self.workers, self.by_origin = workers, {origin(worker.url): worker for worker in workers}
        self.generation += 1
