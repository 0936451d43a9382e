"""Files that are replaced while we run: keys and certificates, as Kubernetes and cert-manager renew them."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordinator.logs import log

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_EVERY_S = 5.0

Mark = tuple[tuple[int, int, int] | None, ...]
"""Of each file: when it was changed, which one it is, how large; None where there is none."""


@dataclass(slots=True)
class _Watched:
    files: tuple[str, ...]
    read: Callable[[], object]
    seen: Mark


class Watch:
    """Looks at files every few seconds, since mounts that are swapped tell nobody of it."""

    def __init__(self) -> None:
        self._watched: list[_Watched] = []

    def add(self, files: Sequence[str], read: Callable[[], object]) -> None:
        """Call ``read`` whenever one of the files has changed; what it raises (ValueError) is logged, and no more.

        It is called in a thread, and should replace what it renews at once.
        """
        self._watched.append(_Watched(tuple(files), read, mark(files)))

    async def run(self) -> None:
        """Look for ever; the owner cancels."""
        while self._watched:
            await asyncio.sleep(_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Read again what has changed since the last time."""
        await asyncio.to_thread(self._look)

    def _look(self) -> None:
        for watched in self._watched:
            now = mark(watched.files)
            if now == watched.seen:
                continue
            watched.seen = now
            try:
                watched.read()
            except ValueError as error:
                log.warning("%s; what was read before is kept", error)
            else:
                log.info("read again: %s", ", ".join(watched.files))


def mark(files: Sequence[str]) -> Mark:
    return tuple(map(_mark_of, files))


def _mark_of(file: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
