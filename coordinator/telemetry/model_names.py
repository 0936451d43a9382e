"""Which models a metric may name: those that the configuration or a worker's own ``/v1/models`` lists.

A client can ask for any name, so one that nobody lists is ``other``. Workers are asked when the coordinator starts, and
again, a while later at the soonest, when one of them has answered for a name that is not known (an adapter that was
loaded meanwhile). What a client gets for its own ``GET /v1/models`` is read too.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from coordinator.metrics import OTHER
from envelope.json_codec import JSONDecodeError, loads_lenient

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

# A fleet may list thousands of adapters, and each name is as many series as there are routes, outcomes and buckets.
_MOST = 100
_ASK_AGAIN_S = 30.0


class ModelNames:
    """The names that are known. They are never forgotten: their series go on."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._wanted = asyncio.Event()
        self._wanted.set()

    def label(self, name: object, *, answered: bool = False) -> str:
        """Return the label for what a client called its model.

        Args:
            answered: a worker has answered for it.
        """
        if isinstance(name, str) and name in self._known:
            return name
        if answered:
            self._wanted.set()
        return OTHER

    def add(self, configured: Iterable[str]) -> None:
        """Take names that are known without asking."""
        self._known.update(configured)

    def learn(self, listing: bytes) -> None:
        """Take the names of a worker's list; what is none is passed over."""
        try:
            found: Any = loads_lenient(listing)
        except (JSONDecodeError, RecursionError):
            return
        entries = found.get("data") if isinstance(found, dict) else None
        for entry in entries if isinstance(entries, list) else ():
            name = entry.get("id") if isinstance(entry, dict) else None
            if isinstance(name, str) and name and len(self._known) < _MOST:
                self._known.add(name)

    async def run(self, ask: Callable[[], Awaitable[bytes | None]]) -> None:
        """Ask whenever there is a reason to; the owner cancels.

        Args:
            ask: fetches a list; None where none could be had.
        """
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            listing = None
            try:
                listing = await ask()
            finally:
                if listing is None:
                    self._wanted.set()
            if listing is not None:
                self.learn(listing)
            await asyncio.sleep(_ASK_AGAIN_S if listing is not None else 1.0)
