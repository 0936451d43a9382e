"""What runs beside the requests for as long as they are answered: probes, look-ups, watches.

A fault of ours in one of these is no reason to end those who are being served. It is logged and counted, and what
failed is begun anew after a while.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, NamedTuple, Protocol

from coordinator.logs import log

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    class FaultEvents(Protocol):
        """The instrument; ``metrics`` implements it."""

        def background_failed(self, task: str) -> None: ...


_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 30.0
# What fails for one worker fails for a thousand, again and again: the log need not say so each time.
_QUIET_S = 10.0


class Background(NamedTuple):
    """
    Attributes:
        task: its name, in the log and in the metric.
        run: does it for ever; whoever owns it cancels.
    """

    task: str
    run: Callable[[], Coroutine[Any, Any, None]]


class Faults:
    """Keeps faults of ours from everybody whom they do not concern."""

    def __init__(self, events: FaultEvents) -> None:
        self._events = events
        self._quiet_until: dict[str, float] = {}

    def tell(self, task: str, error: Exception) -> None:
        """Count a fault, and log it with its traceback unless one of the same task was logged a moment ago."""
        self._events.background_failed(task)
        now = asyncio.get_running_loop().time()
        if now >= self._quiet_until.get(task, now):
            self._quiet_until[task] = now + _QUIET_S
            log.error("%s failed by a fault of the coordinator", task, exc_info=error)

    async def keep_up(self, task: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run something until it returns; after a fault again, later each time."""
        failures, loop = 0, asyncio.get_running_loop()
        while True:
            begun = loop.time()
            try:
                return await run()
            except Exception as error:
                self.tell(task, error)
            failures = 1 if loop.time() - begun >= _LONGEST_WAIT_S else failures + 1
            await asyncio.sleep(wait_s(failures))


def wait_s(failures: int) -> float:
    """Return how long to wait after so many failures in a row."""
    return longer_each_time(failures, _FIRST_WAIT_S, _LONGEST_WAIT_S)


def longer_each_time(times: int, first_s: float, longest_s: float) -> float:
    """Return how long to wait after the first time, the second, ...: twice as long, and never in step with others."""
    longest: float = min(longest_s, first_s * 2.0 ** min(times - 1, 10))
    return random.uniform(longest / 2, longest)
