"""All wiring: a configuration becomes a web application, and the application a running server."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import CollectorRegistry

from coordinator import registry
from coordinator.admission import Admission
from coordinator.credentials import Closed, Credentials
from coordinator.fetch import HttpMediaFetcher
from coordinator.headers import CREDENTIALS
from coordinator.health import Readiness, RoleProbe
from coordinator.intake import Intake
from coordinator.listener import PATIENCE, Patience, Runner, json_errors
from coordinator.logs import log
from coordinator.metrics import Metrics
from coordinator.pipeline import Pipeline
from coordinator.problems import Path, show_path
from coordinator.questions import Questions
from coordinator.release import Releaser
from coordinator.respond import Manner
from coordinator.routing.gateway import GatewayRouter
from coordinator.routing.header import HeaderRouter
from coordinator.routing.members import Members
from coordinator.routing.pool import PoolRouter
from coordinator.rules import ROLES
from coordinator.server import Front
from coordinator.units import megabytes_to_bytes
from coordinator.upstream import HttpUpstream, RoleLink
from coordinator.watch import Watch
from envelope.formats import PATHS, RENDER_PATHS, Format
from steps.decode import Decode
from steps.render import Render

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from coordinator.admission import Place
    from coordinator.config import Config
    from coordinator.context import RequestContext
    from coordinator.outbound import Outbound
    from coordinator.pools import Pool
    from coordinator.routing.router import Router
    from coordinator.step import Step
    from coordinator.tls import Certificate

FRONT = web.AppKey("front", Front)
READINESS = web.AppKey("readiness", Readiness)
WATCH = web.AppKey("watch", Watch)
# Of the main port and of that of the metrics; None is plain HTTP.
CERTIFICATES: web.AppKey[tuple[Certificate | None, Certificate | None]] = web.AppKey("certificates", tuple)

SERVED = tuple(Format)


def build(config: Config) -> web.Application:
    """Return the application that a configuration describes; nothing is opened before it starts.

    Raises:
        ConfigError: the steps do not fit together, or not with the rest of the file; or a key or a certificate that
            the file names cannot be read.
    """
    metrics = Metrics(CollectorRegistry())
    steps = registry.build(config, metrics)
    credentials = Credentials(os.environ, config.sources)
    server, media = config.server, HttpMediaFetcher()
    carry = config.pipeline.forward_response_headers
    upstream = HttpUpstream(links(config, steps, credentials), carry, metrics, media)
    keys = credentials.client_keys(server)
    main = credentials.certificate(server, "cert_path") if server.secure_serving else None
    certificates = main, credentials.certificate(server, "metrics_cert_dir")
    credentials.check()
    decode = next(step for step in steps if isinstance(step, Decode))
    releaser = Releaser(decode.release_leg, upstream, metrics)
    readiness = Readiness(probes(steps, upstream.links), config.server.readiness_interval)
    front = Front(
        apis=SERVED,
        keys=keys,
        admission=Admission(
            server.max_concurrency,
            places(config, upstream.links),
            queue_size=server.queue_size,
            queue_timeout_s=server.queue_timeout or None,
            events=metrics,
            clock=time.monotonic,
        ),
        pipeline=Pipeline(steps, upstream, metrics, time.monotonic),
        releaser=releaser,
        intake=Intake(megabytes_to_bytes(config.server.max_request_body_size), config.server.read_timeout or None),
        manner=Manner(
            config.server.write_timeout or None,
            config.server.heartbeat_after or None,
            config.server.heartbeat_interval,
            time.monotonic,
            time.time,
        ),
        readiness=readiness,
        questions=Questions(upstream),
        metrics=metrics,
        routing_headers=routing_headers(config),
        discard=discarded(config),
        clock=time.monotonic,
    )
    # Sizes are ours to check, with an error body that aiohttp's own 413 does not have.
    app = web.Application(client_max_size=0, middlewares=[json_errors])
    app[FRONT] = front
    app[READINESS] = readiness
    app[PATIENCE] = Patience(
        server.write_stall_timeout or None,
        server.read_header_timeout or None,
        server.idle_timeout or None,
    )
    app[WATCH] = credentials.watch
    app[CERTIFICATES] = certificates
    app.add_routes(front.routes(metrics=server.metrics_port is None))
    app.cleanup_ctx.append(_media(media))
    app.cleanup_ctx.append(_watching(credentials.watch))
    app.cleanup_ctx.append(_workers(upstream, readiness, releaser))
    return app


def links(config: Config, steps: Sequence[Step], credentials: Credentials | Closed) -> dict[str, RoleLink]:
    """Return how each role that the steps use is reached."""
    found: dict[str, RoleLink] = {}
    for role in ROLES:
        pool: Pool | None = getattr(config.pools, role)
        if pool is not None:
            at: Path = ("pools", role)
            found[role] = RoleLink(
                _pool_router(config, pool, credentials.headers(pool, at)),
                pool.max_idle_conns_per_host,
                pool.idle_conn_timeout,
                tls=credentials.verification(pool, at),
                our_key=_our_key(config, pool, at),
            )
        elif config.gateway is not None:
            gateway, at = config.gateway, ("gateway",)
            found[role] = RoleLink(
                GatewayRouter(gateway.address, credentials.headers(gateway, at, ("EPP-Profile", role))),
                gateway.max_idle_conns_per_host,
                gateway.idle_conn_timeout,
                gateway.timeout or None,
                tls=credentials.verification(gateway, at),
                our_key=_our_key(config, gateway, at),
            )
    for index, step in enumerate(steps):
        if isinstance(step, Render):
            params, at = step.params, ("pipeline", "steps", index, "params")
            found["render"] = RoleLink(
                PoolRouter(Members((params.address,), credentials.headers(params, at)), "round_robin"),
                params.max_idle_conns_per_host,
                params.idle_conn_timeout,
                tls=credentials.verification(params, at),
                our_key=_our_key(config, params, at),
            )
    return found


def _our_key(config: Config, of: Outbound, at: Path) -> str | None:
    """Return the name of the key that these servers get from us; None where they get the client's own."""
    ours = of.api_key is not None or not config.server.forwards_authorization
    return show_path((*at, "api_key")) if ours else None


def discarded(config: Config) -> list[str]:
    """Return the names of headers that go no further than here when a client sends them."""
    known_here = () if config.server.forwards_authorization else CREDENTIALS
    return [*config.pipeline.forward_response_headers, *known_here]


def probes(steps: Sequence[Step], links: Mapping[str, RoleLink]) -> list[RoleProbe]:
    """Return what readiness asks of each role: reachable, and serving the routes that its legs use."""
    paths: dict[str, set[str]] = {}
    for step in steps:
        for api in SERVED:
            row = step.plan(api)
            if row.role is not None and row.path is not None:
                paths.setdefault(row.role, set()).add(row.path)
    # A generate client alone does not make the route required: its own requests would be told.
    needed = {PATHS[Format.GENERATE]} if _tokens_in(steps) else set()
    needed |= set(RENDER_PATHS.values())
    return [
        RoleProbe(
            role,
            links[role].router.known,
            () if gateway else tuple(sorted(paths[role] & needed)),
            gateway=gateway,
            tls=links[role].tls,
            our_key=links[role].our_key,
        )
        for role in paths
        if not isinstance(links[role].router, HeaderRouter)  # its workers are known to the router in front
        for gateway in [isinstance(links[role].router, GatewayRouter)]
    ]


def _tokens_in(steps: Sequence[Step]) -> bool:
    return any(step.plan(Format.CHAT).format is Format.GENERATE for step in steps)


def routing_headers(config: Config) -> list[str]:
    pools = (config.pools.encode, config.pools.prefill, config.pools.decode)
    return [pool.header for pool in pools if pool and pool.header]


def places(config: Config, links: Mapping[str, RoleLink]) -> dict[str, Place]:
    """Return what a request takes a place of at each role whose pool has a limit: the pool, or the worker it names."""
    found: dict[str, Place] = {}
    for role, link in links.items():
        pool: Pool | None = getattr(config.pools, role, None)
        if pool is not None and pool.max_inflight:
            found[role] = _place(role, link.router, pool.max_inflight)
    return found


def _place(role: str, router: Router, limit: int) -> Place:
    def of(ctx: RequestContext) -> tuple[str, int] | None:
        if known := router.known():
            return role, limit * len(known)
        worker = router.pick(ctx) if router.serves(ctx) else None
        return None if worker is None else (f"{role} {worker.url}", limit)

    return of


def _pool_router(config: Config, pool: Pool, headers: Sequence[tuple[str, str]]) -> PoolRouter | HeaderRouter:
    if pool.endpoints is not None:
        return PoolRouter(Members(pool.endpoints, headers), pool.policy, pool.max_inflight)
    assert pool.header is not None and pool.allow is not None
    if pool is config.pools.encode:
        return HeaderRouter(pool.header, pool.allow, spread=True, headers=headers)
    others = [other for other in (config.pools.prefill, config.pools.decode) if other not in (None, pool)]
    # A worker cannot hand its blocks to itself: named for both legs, it does both at once.
    never = [url for other in others if other is not None for url in other.endpoints or ()]
    required = pool is config.pools.decode
    return HeaderRouter(pool.header, pool.allow, never, required=required, headers=headers)


def _media(media: HttpMediaFetcher) -> Callable[[web.Application], AsyncIterator[None]]:
    async def opened(app: web.Application) -> AsyncIterator[None]:
        await media.start()
        yield
        await media.close()

    return opened


def _watching(watch: Watch) -> Callable[[web.Application], AsyncIterator[None]]:
    async def opened(app: web.Application) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch.run())
            yield
            watching.cancel()

    return opened


def _workers(
    upstream: HttpUpstream, readiness: Readiness, releaser: Releaser
) -> Callable[[web.Application], AsyncIterator[None]]:
    async def opened(app: web.Application) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(readiness.run())
            yield
            asking.cancel()
        await upstream.settle()
        await releaser.close()
        await upstream.close()

    return opened


async def serve(config: Config) -> None:
    """Run until SIGTERM or SIGINT: then refuse new requests, let the running ones end, and stop."""
    signals = _signals()
    app = build(config)
    front, server = app[FRONT], config.server
    runner = Runner(app, server.max_header_size)
    await runner.setup()
    extra = await _metrics_site(config, front, _tls(app, 1))
    try:
        listen = server.listen_addr
        await web.TCPSite(runner, listen.host, listen.port, backlog=2048, ssl_context=_tls(app, 0)).start()
        for host, port, *_ in runner.addresses:
            log.info("listening", extra={"fields": {"address": f"{host}:{port}"}})
        await _until_stopped(front, signals, server.shutdown_timeout)
    finally:
        await runner.cleanup()
        if extra is not None:
            await extra.cleanup()


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


async def _until_stopped(front: Front, signals: asyncio.Queue[int], shutdown_timeout_s: float) -> None:
    """Wait for a signal and then for the requests in flight; a second signal ends the waiting."""
    await signals.get()
    front.draining = True
    log.info("draining", extra={"fields": {"in_flight": front.in_flight}})
    try:
        async with asyncio.timeout(shutdown_timeout_s), asyncio.TaskGroup() as tasks:
            idle = tasks.create_task(front.idle.wait())
            again = tasks.create_task(signals.get())
            await asyncio.wait((idle, again), return_when=asyncio.FIRST_COMPLETED)
            idle.cancel()
            again.cancel()
    except TimeoutError:
        log.warning("stopping with requests unfinished", extra={"fields": {"in_flight": front.in_flight}})
