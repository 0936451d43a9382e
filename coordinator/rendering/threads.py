"""A few threads for work that would hold up the event loop.

They are daemons: a chat template that never ends may hold one, and must not hold up the end of the process too.
"""

from __future__ import annotations

import asyncio
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_Task = tuple["Callable[[], Any]", "asyncio.Future[Any]", asyncio.AbstractEventLoop]


class Threads:
    """Runs calls in the order in which they come, at most ``count`` at a time."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._started = False

    async def run(self, call: Callable[[], T]) -> T:
        """Run a call on a thread. Who no longer waits when its turn comes costs nothing any more."""
        if not self._started:
            self._started = True
            for number in range(self._count):
                threading.Thread(target=self._work, name=f"render-{number}", daemon=True).start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._tasks.put((call, future, loop))
        return await future

    def close(self) -> None:
        """Let each thread end after what it is doing."""
        for _ in range(self._count if self._started else 0):
            self._tasks.put(None)
        self._started = False

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            call, future, loop = task
            if future.cancelled():
                continue
            result, error = None, None
            try:
                result = call()
            except BaseException as raised:  # whatever it is, it is the waiter's
                error = raised
            try:
                loop.call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:
                return  # the loop is closed: nobody waits any more
            del task, call, future, result, error


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
