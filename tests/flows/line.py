"""The order in which requests begin, in a test's hands."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio


class Line:
    """Who may begin, one after another, once the line is let go on. Stands for ``http.turns.Turns``."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[None]] = []

    def take(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        self.waiting.append(loop.create_future())
        return self.waiting[-1]

    def go_on(self) -> None:
        for turn in self.waiting:
            if not turn.done():
                turn.set_result(None)
