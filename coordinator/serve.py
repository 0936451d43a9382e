"""One process that serves: it listens, drains when it is told to, and stops."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from functools import partial
from typing import TYPE_CHECKING, Protocol

from aiohttp import web

from coordinator.app import CERTIFICATES, FAULTS, FRONT, build
from coordinator.config import load
from coordinator.listener import Runner
from coordinator.logs import log
from coordinator.reload import FileWatch, Reloader
from coordinator.telemetry.status import Pages, Status
from coordinator.units import ListenAddr

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from coordinator.config import Config
    from coordinator.server import Front
    from coordinator.telemetry.status import Told


class Steering(Protocol):
    """What tells a process to stop, and to reload.

    Attributes:
        shares_port: other processes listen on the same port.
    """

    shares_port: bool

    async def begin(self, app: web.Application, reloader: Reloader, stops: asyncio.Queue[None], status: Status) -> None:
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

    async def begin(self, app: web.Application, reloader: Reloader, stops: asyncio.Queue[None], status: Status) -> None:
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
        faults = self._app[FAULTS]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(faults.keep_up("reload", self._reloader.run))
            tasks.create_task(faults.keep_up("reload", partial(self._file.run, self._changed)))

    def _changed(self) -> None:
        if self._app[FRONT].plan.config.config.watch:
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
    front, server = app[FRONT], config.server
    runner = Runner(app, server.max_header_size)
    await runner.setup()
    extra: web.AppRunner | None = None
    try:
        extra = await _metrics_site(config, front, steering, _tls(app, 1))
        await _listen(runner, server.listen_addr, _tls(app, 0), steering.shares_port, backlog=2048)
        await steering.listening([f"{host}:{port}" for host, port, *_ in runner.addresses])
        _spare_the_collector()
        async with asyncio.TaskGroup() as tasks:
            steered = tasks.create_task(steering.run())
            await _until_stopped(front, stops)
            steered.cancel()
    finally:
        await runner.cleanup()
        if extra is not None:
            await extra.cleanup()
    await steering.end()


def _spare_the_collector() -> None:
    """Let the garbage collector pass over what stays until the end, and run less often: it took 6 % of a request."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


async def _listen(
    runner: web.AppRunner, at: ListenAddr, tls: ssl.SSLContext | None, shared: bool, backlog: int = 128
) -> None:
    site = web.TCPSite(runner, at.host, at.port, backlog=backlog, ssl_context=tls, reuse_port=shared or None)
    await site.start()


def _tls(app: web.Application, port: int) -> ssl.SSLContext | None:
    certificate = app[CERTIFICATES][port]
    return None if certificate is None else certificate.context


async def _metrics_site(
    config: Config, front: Front, steering: Steering, tls: ssl.SSLContext | None
) -> web.AppRunner | None:
    port = config.server.metrics_port
    if port is None or port <= 0:
        return None
    app = web.Application()
    app.add_routes([web.get("/metrics", front.metrics_page)])
    if config.server.shows_status:
        app.add_routes(Pages(steering.statuses, config.server.workers).routes())
    runner = web.AppRunner(app, access_log=None, handle_signals=False)
    await runner.setup()
    try:
        await _listen(runner, ListenAddr(config.server.listen_addr.host, port), tls, steering.shares_port)
    except OSError:
        await runner.cleanup()
        raise
    return runner


async def _until_stopped(front: Front, stops: asyncio.Queue[None]) -> None:
    """Wait for a word to stop and then for the requests in flight; a second word ends the waiting."""
    await stops.get()
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
