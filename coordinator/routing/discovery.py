"""Keeps the workers of pools what DNS or Kubernetes say they are.

A look-up that fails changes nothing at first: the workers that were found last go on being used, since who looks up
and who works are different machines. When it has failed for ``keep_s``, addresses may be somebody else's by now, and
the pool is emptied. Who is not named any more is picked no more, and what it is answering runs to its end.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol

from coordinator.background import wait_s
from coordinator.logs import log

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

    from coordinator.routing.members import Members

    class Source(Protocol):
        """Where the workers of one pool are looked up."""

        def found(self) -> AsyncGenerator[Sequence[str], None]:
            """Yield the base URLs of all workers: at once, and whenever that is known anew.

            Raises:
                LookupFailed: it cannot be known for now.
            """

    class DiscoveryEvents(Protocol):
        """The instruments; ``metrics`` implements it."""

        def discovered(self, role: str, workers: int) -> None: ...

        def discovery_succeeded(self, role: str) -> None: ...

        def discovery_failed(self, role: str) -> None: ...


# What has gone well for so long has recovered.
_WELL_AFTER_S = 30.0


class LookupFailed(Exception):
    """The workers cannot be known for now; the text says why, and what to do about it."""


class Finder:
    """Looks up the workers of one role, for ever.

    Args:
        keep_s: how long the last ones are kept while look-ups fail; None is for ever.
        clock: monotonic seconds.

    Attributes:
        answered: set once a look-up has succeeded.
    """

    def __init__(
        self,
        role: str,
        members: Members,
        source: Source,
        keep_s: float | None,
        events: DiscoveryEvents,
        clock: Callable[[], float],
    ) -> None:
        self._role = role
        self._members = members
        self._source = source
        self._keep_s = keep_s
        self._events = events
        self._clock = clock
        self._succeeded_at = clock()
        self._failure: str | None = None
        self.answered = asyncio.Event()

    def why_none(self) -> str:
        """Say why there are no workers."""
        if self._failure is not None:
            return f"no workers were found: {self._failure}"
        return "no workers were found" if self.answered.is_set() else "workers are being looked up"

    async def run(self) -> None:
        """Look up for ever; the owner cancels."""
        failures = 0
        while True:
            begun = self._clock()
            try:
                async with aclosing(self._source.found()) as answers:
                    async for urls in answers:
                        self._succeed(urls)
            except LookupFailed as error:
                self._fail(str(error))
            except Exception as error:
                self._fail(repr(error))
                raise
            # What lists and is then refused the watch has not recovered in between.
            failures = 1 if self._clock() - begun >= _WELL_AFTER_S else failures + 1
            await asyncio.sleep(wait_s(failures))

    def _succeed(self, urls: Sequence[str]) -> None:
        self._succeeded_at = self._clock()
        if self._failure is not None:
            log.info("%s: workers are found again", self._role)
        self._failure = None
        self._events.discovery_succeeded(self._role)
        self._replace(urls)
        self.answered.set()

    def _fail(self, why: str) -> None:
        self._events.discovery_failed(self._role)
        if why != self._failure:
            log.warning("%s: workers cannot be looked up: %s", self._role, why)
        self._failure = why
        stale_s = self._clock() - self._succeeded_at
        if self._keep_s is not None and stale_s >= self._keep_s and self._members.workers:
            log.error("%s: its workers are given up, no look-up has succeeded for %.0f s", self._role, stale_s)
            self._replace(())

    def _replace(self, urls: Iterable[str]) -> None:
        before = {worker.url for worker in self._members.workers}
        self._members.replace(urls)
        now = {worker.url for worker in self._members.workers}
        self._events.discovered(self._role, len(now))
        if now != before or not self.answered.is_set():
            fields = {"workers": len(now), "joined": sorted(now - before), "left": sorted(before - now)}
            log.info("%s: workers found", self._role, extra={"fields": fields})


class Discovery:
    """All finders of one configuration."""

    def __init__(self, finders: Sequence[Finder]) -> None:
        self._finders = tuple(finders)

    async def answered(self, within_s: float) -> bool:
        """Wait for the first workers of every role, but no longer than this; say whether all are known."""
        try:
            async with asyncio.timeout(within_s):
                for finder in self._finders:
                    await finder.answered.wait()
        except TimeoutError:
            return False
        return True
