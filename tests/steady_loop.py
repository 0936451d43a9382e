"""An event loop whose clock stands still while the machine does.

What a test and all that it runs in its loop call half a second is half a second in which the loop could run: a stall
counts as one short step, so that no limit is reached and nothing is late because of it. Other processes and threads
have clocks of their own.
"""

from __future__ import annotations

import asyncio
import selectors
import time

_STEP_S = 0.01


class SteadyLoop(asyncio.SelectorEventLoop):
    """Its time goes on by a step at most between two looks at it; it looks at least twice a step."""

    def __init__(self) -> None:
        self._looked_at = self._now = time.monotonic()
        super().__init__(_Brief())

    def time(self) -> float:
        before, self._looked_at = self._looked_at, time.monotonic()
        self._now += min(self._looked_at - before, _STEP_S)
        return self._now


class _Brief(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        longest = _STEP_S / 2
        return super().select(longest if timeout is None else min(timeout, longest))
