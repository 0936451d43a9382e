"""One process that serves: it listens, drains when it is told to, and stops."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from coordinator.app import CERTIFICATES, FRONT, build
from coordinator.config import load
from coordinator.listener import Runner
from coordinator.logs import log
from coordinator.reload import FileWatch, Reloader

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator

    from coordinator.config import Config
    from coordinator.server import Front


async def serve(config: Config, path: str) -> None:
    """Run until SIGTERM or SIGINT: then refuse new requests, let the running ones end, and stop.

    Args:
        path: of the file that the configuration came from, which SIGHUP applies as it is then.
    """
    signals = _signals()
    app = build(config)
    reloader, file = Reloader(app, partial(load, path, os.environ)), FileWatch(path)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloader.ask)
    front, server = app[FRONT], config.server
    runner = Runner(app, server.max_header_size)
    await runner.setup()
    extra = await _metrics_site(config, front, _tls(app, 1))
    try:
        listen = server.listen_addr
        await web.TCPSite(runner, listen.host, listen.port, backlog=2048, ssl_context=_tls(app, 0)).start()
        for host, port, *_ in runner.addresses:
            log.info("listening", extra={"fields": {"address": f"{host}:{port}"}})
        async with _reloading(app, reloader, file):
            await _until_stopped(front, signals)
    finally:
        await runner.cleanup()
        if extra is not None:
            await extra.cleanup()


@asynccontextmanager
async def _reloading(app: web.Application, reloader: Reloader, file: FileWatch) -> AsyncIterator[None]:
    """Apply the file when that is asked for, and when it changes, where the configuration that runs says so."""

    def changed() -> None:
        if app[FRONT].plan.config.config.watch:
            reloader.ask()

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(reloader.run()), tasks.create_task(file.run(changed))]
        yield
        for task in running:
            task.cancel()


def _tls(app: web.Application, port: int) -> ssl.SSLContext | None:
    certificate = app[CERTIFICATES][port]
    return None if certificate is None else certificate.context


async def _metrics_site(config: Config, front: Front, tls: ssl.SSLContext | None) -> web.AppRunner | None:
    port = config.server.metrics_port
    if port is None or port <= 0:
        return None
    app = web.Application()
    app.add_routes([web.get("/metrics", front.metrics_page)])
    runner = web.AppRunner(app, access_log=None, handle_signals=False)
    await runner.setup()
    await web.TCPSite(runner, config.server.listen_addr.host, port, ssl_context=tls).start()
    return runner


def _signals() -> asyncio.Queue[int]:
    """Return the signals to stop, as they come; from here on they no longer end the process by themselves."""
    loop, signals = asyncio.get_running_loop(), asyncio.Queue[int]()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    return signals


async def _until_stopped(front: Front, signals: asyncio.Queue[int]) -> None:
    """Wait for a signal and then for the requests in flight; a second signal ends the waiting."""
    await signals.get()
    front.draining = True
    log.info("draining", extra={"fields": {"in_flight": front.in_flight}})
    try:
        async with asyncio.timeout(front.plan.config.server.shutdown_timeout), asyncio.TaskGroup() as tasks:
            idle = tasks.create_task(front.idle.wait())
            again = tasks.create_task(signals.get())
            await asyncio.wait((idle, again), return_when=asyncio.FIRST_COMPLETED)
            idle.cancel()
            again.cancel()
    except TimeoutError:
        log.warning("stopping with requests unfinished", extra={"fields": {"in_flight": front.in_flight}})
