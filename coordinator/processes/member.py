"""One of several serving processes, as its supervisor steers it."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any

from coordinator.logs import log
from coordinator.processes.channel import COUNTS, STATUS, Channel
from coordinator.processes.totals import families, page

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from coordinator.app import App
    from coordinator.config import Config
    from coordinator.reload import Reloader
    from coordinator.telemetry.status import Status, Told

_ALL_WITHIN_S = 10.0


class Member:
    """Implements ``serve.Steering``.

    Args:
        end: of the pair whose other end the supervisor has.
    """

    shares_port = True

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._asking: dict[str, list[asyncio.Future[Any]]] = {}
        self._drains = False
        self._configs: asyncio.Queue[Config] = asyncio.Queue()

    async def begin(self, app: App, reloader: Reloader, stops: asyncio.Queue[None], status: Status) -> None:
        self._app, self._reloader, self._stops, self._status = app, reloader, stops, status
        # More than one may come, as from systemd to each process and from the supervisor: to drain is all they mean.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._drain)
        self._channel = await Channel.open(self._end)
        app.front.page = self._page

    async def listening(self, addresses: Sequence[str]) -> None:
        await self._channel.send("listening", tuple(addresses))

    async def run(self) -> None:
        faults = self._app.faults
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(faults.keep_up("reload", self._apply))
            await faults.keep_up("supervisor", self._obey)

    async def _obey(self) -> None:
        """Do as the supervisor says, until it is gone: without it nobody would end this process."""
        async for word, what in self._channel.messages():
            match word:
                case "tell":
                    await self._tell(what)
                case "all":
                    subject, told = what
                    for asking in self._asking.pop(subject, ()):
                        if not asking.done():
                            asking.set_result(told)
                case "reload":
                    self._configs.put_nowait(what)
                case "refused":
                    self._reloader.problems = what
                case "drain":
                    self._drain()
                case "stop":
                    self._drain()
                    self._stops.put_nowait(None)
        log.error("the supervisor is gone")
        self._drain()

    async def statuses(self) -> Sequence[Told]:
        told: list[Told] = await self._of_all(STATUS)
        return told

    async def end(self) -> None:
        await self._tell(COUNTS)

    async def _tell(self, subject: str) -> None:
        told = families(self._app.metrics.registry) if subject == COUNTS else self._status.told()
        await self._channel.send("told", (subject, told))

    async def _page(self) -> tuple[bytes, str]:
        return page(await self._of_all(COUNTS))

    async def _of_all(self, subject: str) -> Any:
        """Return what the supervisor makes of what every process tells; who asks meanwhile gets the same.

        Raises:
            TimeoutError: the supervisor does not answer.
        """
        asking = asyncio.get_running_loop().create_future()
        waiting = self._asking.setdefault(subject, [])
        waiting.append(asking)
        try:
            if len(waiting) == 1:
                await self._channel.send("all", subject)
            async with asyncio.timeout(_ALL_WITHIN_S):
                return await asking
        finally:
            if asking in waiting:  # whoever waited has left, or waited for too long
                waiting.remove(asking)

    async def _apply(self) -> None:
        """Apply what the supervisor has read, and say how that went; meanwhile other words are heeded."""
        while True:
            problems = await self._reloader.attempt(await self._configs.get())
            await self._channel.send("reloaded", problems)

    def _drain(self) -> None:
        if not self._drains:
            self._drains = True
            self._stops.put_nowait(None)
