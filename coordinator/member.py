"""One of several serving processes, as its supervisor steers it."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

from coordinator.app import FRONT, METRICS
from coordinator.channel import Channel
from coordinator.logs import log
from coordinator.totals import families, page

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from aiohttp import web

    from coordinator.config import Config
    from coordinator.reload import Reloader
    from coordinator.totals import Families

_TOTAL_WITHIN_S = 10.0


class Member:
    """Implements ``serve.Steering``.

    Args:
        end: of the pair whose other end the supervisor has.
    """

    shares_port = True

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._asking: list[asyncio.Future[Families]] = []
        self._drains = False
        self._configs: asyncio.Queue[Config] = asyncio.Queue()

    async def begin(self, app: web.Application, reloader: Reloader, stops: asyncio.Queue[None]) -> None:
        self._app, self._reloader, self._stops = app, reloader, stops
        # More than one may come, as from systemd to each process and from the supervisor: to drain is all they mean.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._drain)
        self._channel = await Channel.open(self._end)
        app[FRONT].page = self._page

    async def listening(self, addresses: Sequence[str]) -> None:
        await self._channel.send("listening", tuple(addresses))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._apply())
            await self._obey()

    async def _obey(self) -> None:
        """Do as the supervisor says, until it is gone: without it nobody would end this process."""
        async for word, what in self._channel.messages():
            match word:
                case "count":
                    await self._count()
                case "total":
                    for asking in self._asking:
                        asking.set_result(what)
                    self._asking.clear()
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

    async def end(self) -> None:
        await self._count()

    async def _count(self) -> None:
        await self._channel.send("counted", families(self._app[METRICS].registry))

    async def _page(self) -> tuple[bytes, str]:
        """Return the exposition of all processes together."""
        asking = asyncio.get_running_loop().create_future()
        self._asking.append(asking)
        if len(self._asking) == 1:
            await self._channel.send("total")
        async with asyncio.timeout(_TOTAL_WITHIN_S):
            return page(await asking)

    async def _apply(self) -> None:
        """Apply what the supervisor has found good; it takes a while, in which other words are heeded."""
        while True:
            config = await self._configs.get()
            try:
                await self._reloader.apply(config)
                self._reloader.problems = []
            except Exception:  # whatever it is, a new process is the way out
                log.exception("the configuration was not reloaded here; this process ends, and another is started")
                self._drain()

    def _drain(self) -> None:
        if not self._drains:
            self._drains = True
            self._stops.put_nowait(None)
