"""One process that serves: it listens, drains when it is told to, and stops."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Protocol

from coordinator.app import build
from coordinator.config import load
from coordinator.http.server import Server
from coordinator.logs import log
from coordinator.reload import FileWatch, Reloader
from coordinator.telemetry.status import Pages, Status

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from coordinator.app import App
    from coordinator.config import Config
    from coordinator.http.server import Handler
    from coordinator.security.tls import Certificate
    from coordinator.server import Front
    from coordinator.telemetry.status import Told


class Steering(Protocol):
    """What tells a process to stop, and to reload.

    Attributes:
        shares_port: other processes listen on the same port.
    """

    shares_port: bool

    async def begin(self, app: App, reloader: Reloader, stops: asyncio.Queue[None], status: Status) -> None:
        """Take over, before anything is opened: each word to stop is put into ``stops``."""

    async def listening(self, addresses: Sequence[str]) -> None:
        """Take note that clients can come."""

    async def statuses(self) -> Sequence[Told]:
        """Return what each process tells of itself.

        Raises:
            TimeoutError: who knows the others does not answer.
        """

    async def run(self) -> None:
        """Do what there is to do meanwhile; cancelled at the end."""

    async def end(self) -> None:
        """Take note that the last request is over."""


class Alone:
    """Steers the only process, by signals. Implements ``Steering``."""

    shares_port = False

    def __init__(self, path: str) -> None:
        self._file = FileWatch(path)

    async def begin(self, app: App, reloader: Reloader, stops: asyncio.Queue[None], status: Status) -> None:
        self._app, self._reloader, self._status = app, reloader, status
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stops.put_nowait, None)
        loop.add_signal_handler(signal.SIGHUP, reloader.ask)

    async def listening(self, addresses: Sequence[str]) -> None:
        for address in addresses:
            log.info("listening", extra={"fields": {"address": address}})

    async def statuses(self) -> Sequence[Told]:
        return [self._status.told()]

    async def run(self) -> None:
        faults = self._app.faults
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(faults.keep_up("reload", self._reloader.run))
            tasks.create_task(faults.keep_up("reload", partial(self._file.run, self._changed)))

    def _changed(self) -> None:
        if self._app.front.plan.config.config.watch:
            self._reloader.ask()

    async def end(self) -> None:
        pass


async def serve(config: Config, path: str, steering: Steering) -> None:
    """Run until told to stop: then refuse new requests, let the running ones end, and stop.

    Args:
        path: of the file that the configuration came from.
    """
    stops = asyncio.Queue[None]()
    app = build(config)
    reloader = Reloader(app, partial(load, path, os.environ))
    await steering.begin(app, reloader, stops, Status(app, reloader, path))
    shared, (tls, metrics_tls) = steering.shares_port, map(_context, app.certificates)
    async with AsyncExitStack() as stack:
        metrics = _metrics_server(config, app, steering)
        stack.push_async_callback(metrics.close)
        await stack.enter_async_context(app.running())
        address = config.server.listen_addr
        if (port := config.server.metrics_port) is not None and port > 0:
            await metrics.listen(address.host, port, metrics_tls, shared=shared)
        await app.server.listen(address.host, address.port, tls, backlog=2048, shared=shared)
        await steering.listening(app.server.addresses)
        async with asyncio.TaskGroup() as tasks:
            steered = tasks.create_task(steering.run())
            await _until_stopped(app.front, stops)
            steered.cancel()
    await steering.end()


def _context(certificate: Certificate | None) -> ssl.SSLContext | None:
    return None if certificate is None else certificate.context


def _metrics_server(config: Config, app: App, steering: Steering) -> Server:
    """Return what answers on the metrics' own port."""
    routes: dict[str, dict[str, Handler]] = {"/metrics": {"GET": app.front.metrics_page}}
    if config.server.shows_status:
        routes |= Pages(steering.statuses, config.server.workers).routes()
    return Server(routes, patience=app.server.patience, max_field_bytes=config.server.max_header_size)


async def _until_stopped(front: Front, stops: asyncio.Queue[None]) -> None:
    """Wait for a word to stop and then for the requests in flight; a second word ends the waiting."""
    await stops.get()
    if (turn := front.turns.take(asyncio.get_running_loop())) is not None:
        await turn  # requests that came before the word begin before it, and none of them is refused
    front.draining = True
    log.info("draining", extra={"fields": {"in_flight": front.in_flight}})
    try:
        async with asyncio.timeout(front.plan.config.server.shutdown_timeout), asyncio.TaskGroup() as tasks:
            idle = tasks.create_task(front.idle.wait())
            again = tasks.create_task(stops.get())
            await asyncio.wait((idle, again), return_when=asyncio.FIRST_COMPLETED)
            idle.cancel()
            again.cancel()
    except TimeoutError:
        log.warning("stopping with requests unfinished", extra={"fields": {"in_flight": front.in_flight}})
