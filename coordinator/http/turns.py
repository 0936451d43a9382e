"""Who may begin: a few requests each time the loop has looked at its sockets, the others in their order behind them.

Where many requests come at once, all would begin before any stream is served again, and none would be asked of a
worker much before the last. So what is under way goes first: chunks that came meanwhile, and answers that let earlier
requests go on.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

# Where 64 streams begin together beside others, the 99th percentile of a chunk's age is 2.0 ms so, 2.7 at 8, and 4.3
# where all begin at once; the first token comes after 16 ms instead of 24. Whole answers under full load cost 2 % more
# CPU for it.
AT_ONCE = 3


class Turns:
    """
    Args:
        at_once: how many begin between two looks at the sockets.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._begun = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def take(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None] | None:
        """Return what to wait for before one may begin; None where it may at once."""
        if not self._begun:
            loop.call_soon(self._next, loop)
        if self._begun < self._at_once:
            self._begun += 1
            return None
        turn = loop.create_future()
        self._waiting.append(turn)
        return turn

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        self._begun = 0
        while self._waiting and self._begun < self._at_once:
            turn = self._waiting.popleft()
            if not turn.done():  # of a client that has left
                turn.set_result(None)
                self._begun += 1
        if self._begun:
            loop.call_soon(self._next, loop)
