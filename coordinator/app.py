"""All wiring: a configuration becomes a plan, and a web application that answers by it."""

from __future__ import annotations

import asyncio
import os
import time
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import CollectorRegistry

from coordinator import registry
from coordinator.admission import Admission
from coordinator.credentials import Closed, Credentials
from coordinator.derender.held import HeldParsers, ParserPools
from coordinator.derender.pool import ParserSettings
from coordinator.fetch import HttpMediaFetcher
from coordinator.headers import CREDENTIALS
from coordinator.health import Readiness, RoleProbe
from coordinator.intake import Intake
from coordinator.listener import PATIENCE, REFUSED, Patience, json_errors
from coordinator.logs import log
from coordinator.metrics import Metrics
from coordinator.model_names import ModelNames
from coordinator.outcome import Recorder
from coordinator.passage import Passage
from coordinator.pipeline import Pipeline
from coordinator.plan import Plan, Plans
from coordinator.problems import ConfigError, Path, show_path
from coordinator.questions import Questions
from coordinator.recent import Recent
from coordinator.release import Releaser
from coordinator.respond import Manner
from coordinator.routing.choice import pool_router
from coordinator.routing.discovery import Discovery, Finder
from coordinator.routing.gateway import GatewayRouter
from coordinator.routing.header import HeaderRouter
from coordinator.routing.members import Members
from coordinator.routing.policies import RoundRobin
from coordinator.routing.pool import PoolRouter
from coordinator.rules import ROLES
from coordinator.server import Front
from coordinator.tracing import PASSING
from coordinator.units import megabytes_to_bytes
from coordinator.upstream import HttpUpstream, RoleLink
from coordinator.watch import Watch
from envelope.derender import derender_path
from envelope.errors import NoWorker
from envelope.formats import PATHS, RENDER_PATHS, Format
from envelope.generate import TOKENS
from envelope.legs import mode_for
from steps.decode import Decode
from steps.derender import Derender
from steps.prefill_decode import PrefillDecode
from steps.render import Render

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
    from typing import Any

    from coordinator.admission import Place
    from coordinator.config import Config
    from coordinator.context import RequestContext
    from coordinator.otel import OtelTracing
    from coordinator.outbound import Outbound
    from coordinator.pools import Pool
    from coordinator.routing.discovery import Source
    from coordinator.routing.health import Health
    from coordinator.routing.router import Router
    from coordinator.step import Step
    from coordinator.tls import Certificate

FRONT = web.AppKey("front", Front)
PLANS = web.AppKey("plans", Plans)
# Makes the plan of another configuration, to take the place of the one it is given.
PLAN_OF: web.AppKey[partial[Plan]] = web.AppKey("plan_of", partial)
METRICS = web.AppKey("metrics", Metrics)
RECENT = web.AppKey("recent", Recent)
# Of the main port and of that of the metrics; None is plain HTTP.
CERTIFICATES: web.AppKey[tuple[Certificate | None, Certificate | None]] = web.AppKey("certificates", tuple)
# The certificates' files: they are the listener's, and outlive a plan.
WATCH = web.AppKey("watch", Watch)

SERVED = tuple(Format)


def build(config: Config) -> web.Application:
    """Return the application that a configuration describes; nothing is opened before it starts.

    Raises:
        ConfigError: the steps do not fit together, or not with the rest of the file; or a key or a certificate that
            the file names cannot be read.
    """
    metrics, watch = Metrics(CollectorRegistry()), Watch()
    server, credentials = config.server, Credentials(os.environ, config.sources)
    main = credentials.certificate(server, "cert_path", watch) if server.secure_serving else None
    certificates = main, credentials.certificate(server, "metrics_cert_dir", watch)
    names = ModelNames()
    tracing = _spans(config) if config.tracing else None
    recent = Recent(time.monotonic, time.time)
    recorder = Recorder(metrics, names, tracing or PASSING, recent if server.shows_status else None)
    plan_of = partial(plan, metrics, names, ParserPools())
    passage = Passage()
    front = Front(
        plan_of(config, credentials),
        apis=SERVED,
        metrics=metrics,
        recorder=recorder,
        clock=time.monotonic,
        proxied=server.proxied_routes,
        passage=passage,
    )
    # Sizes are ours to check, with an error body that aiohttp's own 413 does not have.
    app = web.Application(client_max_size=0, middlewares=[json_errors])
    metrics.watch_pools(lambda: _healths(front.plan.upstream.links))
    app[FRONT] = front
    app[REFUSED] = recorder.refused
    app[PLAN_OF] = plan_of
    app[METRICS] = metrics
    app[RECENT] = recent
    app[PLANS] = Plans(front.plan, partial(setattr, front, "plan"))
    app[PATIENCE] = Patience(
        server.write_stall_timeout or None,
        server.read_header_timeout or None,
        server.idle_timeout or None,
    )
    app[WATCH] = watch
    app[CERTIFICATES] = certificates
    app.add_routes(front.routes(metrics=server.metrics_port is None))
    if tracing is not None:
        app.cleanup_ctx.append(tracing.running)  # the first to begin is the last to end
    if server.proxied_routes:
        app.cleanup_ctx.append(partial(_passing, passage))
    app.cleanup_ctx.append(_running)
    for route in server.proxied_routes:
        if route.danger is not None:
            log.warning("server.proxied_routes: %s %s, and whoever may ask here may call it", route, route.danger)
    return app


def _spans(config: Config) -> OtelTracing:
    """
    Raises:
        ConfigError: OpenTelemetry is not installed, or the environment asks it for what it cannot do.
    """
    try:
        from coordinator.otel import OtelTracing

        return OtelTracing(os.environ)
    except ImportError:
        fault = "needs OpenTelemetry: pip install 'pd-coordinator[otel]', or write false"
    except ValueError as wrong:
        fault = str(wrong)
    raise ConfigError([config.sources.problem(("tracing",), fault)])


async def _passing(passage: Passage, app: web.Application) -> AsyncIterator[None]:
    await passage.start()
    yield
    await passage.close()


def plan(
    metrics: Metrics,
    names: ModelNames,
    pools: ParserPools,
    config: Config,
    credentials: Credentials,
    before: Plan | None = None,
) -> Plan:
    """Return what requests are answered by; nothing is opened before it runs.

    Args:
        pools: of parser processes, which plans with the same parsers share.
        before: the plan whose place it will take, and with which it shares the places that requests hold.

    Raises:
        ConfigError: as ``build``.
    """
    steps = registry.build(config, metrics)
    renderers = open_renderers(config, steps)
    parsers = parsers_of(config, steps, pools)
    server, media = config.server, HttpMediaFetcher()
    carry = config.pipeline.forward_response_headers
    pool = None if parsers is None else parsers.pool
    upstream = HttpUpstream(links(config, steps, credentials), carry, metrics, media, pool)
    keys = credentials.client_keys(server)
    credentials.check()
    decode = next(step for step in steps if isinstance(step, (Decode, PrefillDecode)))
    found = finders(config, upstream.links, metrics, before)
    discovery = Discovery(list(found.values()))
    more = () if pool is None else (pool.problems,)
    readiness = Readiness(probes(steps, upstream.links, found), server.readiness_interval, more)
    questions = Questions(upstream, names)
    names.add(server.metrics_models)
    routing = routing_headers(config)
    return Plan(
        config=config,
        keys=keys,
        admission=Admission(
            server.max_concurrency,
            places(config, upstream.links),
            queue_size=server.queue_size,
            queue_timeout_s=server.queue_timeout or None,
            events=metrics,
            clock=time.monotonic,
            after=None if before is None else before.admission,
        ),
        pipeline=Pipeline(steps, upstream, metrics, time.monotonic),
        releaser=Releaser(decode.release_leg, upstream, metrics),
        intake=Intake(megabytes_to_bytes(server.max_request_body_size), server.read_timeout or None),
        manner=Manner(
            server.write_timeout or None,
            server.heartbeat_after or None,
            server.heartbeat_interval,
            time.monotonic,
            time.time,
            server.server_timing,
        ),
        readiness=readiness,
        questions=questions,
        upstream=upstream,
        media=media,
        watch=credentials.watch,
        routing_headers=tuple(routing),
        drop=frozenset((*routing, *discarded(config))),
        discovery=discovery,
        background=(
            credentials.watch.run,
            discovery.run,
            partial(_ask_who_is_found, discovery, readiness),
            partial(names.run, questions.listed),
            *_watches(upstream.links),
            *renderers,
        ),
        parsers=parsers,
    )


# Long enough for a cluster's DNS or API server to answer, short enough for a start-up probe to wait for.
_FIRST_ANSWER_S = 5.0


async def _ask_who_is_found(discovery: Discovery, readiness: Readiness) -> None:
    await discovery.answered(_FIRST_ANSWER_S)
    await readiness.run()


async def _running(app: web.Application) -> AsyncIterator[None]:
    """Run what the front answers by, and what the listener needs, as long as the application runs."""
    async with app[PLANS], asyncio.TaskGroup() as tasks:
        if not await app[FRONT].plan.discovery.answered(_FIRST_ANSWER_S):
            log.warning("starting before all workers could be looked up")
        watching = tasks.create_task(app[WATCH].run())
        yield
        watching.cancel()


def parsers_of(config: Config, steps: Sequence[Step], pools: ParserPools) -> HeldParsers | None:
    """Return the parsers that decode is to use, not yet started; None where it uses none.

    Raises:
        ConfigError: what they need is not installed, or not there.
    """
    for index, step in enumerate(steps):
        if isinstance(step, (Decode, PrefillDecode)) and step.params.derender == "coordinator":
            params, at = step.params, ("pipeline", "steps", index, "params")
            assert params.tokenizer is not None, "a rule asks for it"
            settings = ParserSettings(
                params.tokenizer,
                params.tool_parser,
                params.reasoning_parser,
                params.parser_processes,
                params.parser_timeout,
            )
            held = HeldParsers(pools.of(settings), partial(_problem, config, at))
            held.check()
            return held
    return None


def _problem(config: Config, at: Path, key: str, sentence: str) -> ConfigError:
    return ConfigError([config.sources.problem((*at, key), sentence)])


def open_renderers(config: Config, steps: Sequence[Step]) -> list[Callable[[], Coroutine[Any, Any, None]]]:
    """Load the models whose prompts are rendered in this process; return what runs as long as they are used.

    Raises:
        ConfigError: their files are not what they should be, or what renders them is not installed.
    """
    running: list[Callable[[], Coroutine[Any, Any, None]]] = []
    for index, step in enumerate(steps):
        if isinstance(step, Render) and step.role is None:
            try:
                renderer = step.open()
            except ValueError as error:
                at: Path = ("pipeline", "steps", index, "params", "tokenizer")
                raise ConfigError([config.sources.problem(at, str(error))]) from None
            log.info("prompts are rendered here", extra={"fields": renderer.facts})
            running.append(renderer.run)
    return running


def links(config: Config, steps: Sequence[Step], credentials: Credentials | Closed) -> dict[str, RoleLink]:
    """Return how each role that the steps use is reached."""
    found: dict[str, RoleLink] = {}
    for role in (*ROLES, "render"):
        pool: Pool | None = getattr(config.pools, role, None)
        if pool is not None:
            at: Path = ("pools", role)
            headers, tls = credentials.headers(pool, at), credentials.verification(pool, at)
            found[role] = RoleLink(
                _pool_router(config, role, pool, headers, tls),
                pool.max_idle_conns_per_host,
                pool.idle_conn_timeout,
                tls=tls,
                our_key=_our_key(config, pool, at),
            )
        elif config.gateway is not None and role in ROLES:
            gateway, at = config.gateway, ("gateway",)
            found[role] = RoleLink(
                GatewayRouter(gateway.address, credentials.headers(gateway, at, (gateway.profile_header, role))),
                gateway.max_idle_conns_per_host,
                gateway.idle_conn_timeout,
                gateway.timeout or None,
                tls=credentials.verification(gateway, at),
                our_key=_our_key(config, gateway, at),
            )
    for index, step in enumerate(steps):
        address = step.params.address if isinstance(step, (Render, Derender)) else None
        if isinstance(step, (Render, Derender)) and address is not None and step.role is not None:
            params, at = step.params, ("pipeline", "steps", index, "params")
            found[step.role] = RoleLink(
                PoolRouter(Members((address,), credentials.headers(params, at)), RoundRobin()),
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


def finders(
    config: Config, links: Mapping[str, RoleLink], metrics: Metrics, before: Plan | None = None
) -> dict[str, Finder]:
    """Return who looks up the workers of each role that has them looked up.

    Where the plan before looks them up alike, those that it knows are there from the start: a file may be changed while
    nothing can be looked up.
    """
    found: dict[str, Finder] = {}
    for role, link in links.items():
        pool: Pool | None = getattr(config.pools, role, None)
        if pool is not None and pool.lookup is not None and isinstance(link.router, PoolRouter):
            earlier: Pool | None = getattr(before.config.pools, role) if before is not None else None
            if before is not None and earlier is not None and earlier.lookup == pool.lookup:
                link.router.members.replace([worker.url for worker in before.upstream.links[role].router.known()])
            keep_s = pool.lookup.keep or None
            found[role] = Finder(role, link.router.members, _source(pool), keep_s, metrics, time.monotonic)
    return found


def _source(pool: Pool) -> Source:
    # Each needs a package of its own, which is an extra, and takes a moment to import.
    if pool.dns is not None:
        from coordinator.routing.dns import DnsSource

        return DnsSource(pool.dns)
    from coordinator.routing.kubernetes import KubernetesSource

    assert pool.kubernetes is not None
    return KubernetesSource(pool.kubernetes)


def probes(
    steps: Sequence[Step], links: Mapping[str, RoleLink], finders: Mapping[str, Finder] | None = None
) -> list[RoleProbe]:
    """Return what readiness asks of each role: reachable, and serving the routes that its legs use."""
    paths: dict[str, set[str]] = {}
    for step in steps:
        for api in SERVED:
            row = step.plan(api)
            for role in (row.role, *row.also):
                if role is not None and row.path is not None:
                    paths.setdefault(role, set()).add(row.path)
    # A generate client alone does not make the route required: its own requests would be told.
    needed = {PATHS[Format.GENERATE]} if _tokens_in(steps) else set()
    needed |= {*RENDER_PATHS.values(), *map(derender_path, SERVED)}
    return [
        RoleProbe(
            role,
            router.known,
            () if gateway else tuple(sorted(paths[role] & needed)),
            gateway=gateway,
            tls=links[role].tls,
            our_key=links[role].our_key,
            why_none=finders[role].why_none if finders and role in finders else None,
            health=router.health if isinstance(router, PoolRouter) else None,
            modes=_modes(steps) if role == "decode" else (),
            learn=router.learn if isinstance(router, PoolRouter) else None,
        )
        for role in paths
        for router in [links[role].router]
        if not isinstance(router, HeaderRouter)  # its workers are known to the router in front
        for gateway in [isinstance(router, GatewayRouter)]
    ]


def _modes(steps: Sequence[Step]) -> tuple[str, ...]:
    """Return the output modes, other than token ids, that decode is asked for by clients of any API but generate."""
    asked = {
        mode_for(api, step.params.mode)
        for step in steps
        if isinstance(step, (Decode, PrefillDecode))
        for api in SERVED
        if api is not Format.GENERATE and step.plan(api).format is Format.GENERATE
    }
    return tuple(sorted(asked - {TOKENS}))


def _tokens_in(steps: Sequence[Step]) -> bool:
    return any(step.plan(Format.CHAT).format is Format.GENERATE for step in steps)


def routing_headers(config: Config) -> list[str]:
    pools = (config.pools.encode, config.pools.prefill, config.pools.decode)
    return [pool.header for pool in pools if pool and pool.header]


def places(config: Config, links: Mapping[str, RoleLink]) -> dict[str, Place]:
    """Return what a request takes a place of at each role whose pool has a limit: the pool, or the worker it names.

    A decode pool whose workers are looked up has a place too, which only says whether there are any.
    """
    found: dict[str, Place] = {}
    for role, link in links.items():
        pool: Pool | None = getattr(config.pools, role, None)
        if pool is not None and (pool.max_inflight or (pool.lookup is not None and role == "decode")):
            found[role] = _place(role, link.router, pool.max_inflight)
    return found


def _place(role: str, router: Router, limit: int) -> Place:
    def of(ctx: RequestContext) -> tuple[str, int] | None:
        if known := router.known():
            return (role, limit * len(known)) if limit else None
        if role == "decode" and isinstance(router, PoolRouter):
            # Told here and not at its leg: by then the prompt would have been computed for nobody.
            raise NoWorker(role, f"there is no {role} worker", headers={"Retry-After": "1"})
        worker = router.pick(ctx) if router.serves(ctx) else None
        return None if worker is None else (f"{role} {worker.url}", limit)

    return of


def _healths(links: Mapping[str, RoleLink]) -> dict[str, Health]:
    """Return what is known of the workers of each pool."""
    routers = ((role, link.router) for role, link in links.items())
    return {role: router.health for role, router in routers if isinstance(router, PoolRouter) and router.health}


def _watches(links: Mapping[str, RoleLink]) -> list[Callable[[], Coroutine[Any, Any, None]]]:
    """Return what keeps up to date what policies go by."""
    routers = (link.router for link in links.values())
    return [router.watch.run for router in routers if isinstance(router, PoolRouter) and router.watch is not None]


def _pool_router(
    config: Config, role: str, pool: Pool, headers: Sequence[tuple[str, str]], tls: ssl.SSLContext | None
) -> PoolRouter | HeaderRouter:
    if pool.header is None:
        return pool_router(role, pool, Members(pool.endpoints or (), headers), tls)
    assert pool.allow is not None
    if pool is config.pools.encode:
        return HeaderRouter(pool.header, pool.allow, spread=True, headers=headers)
    others = [other for other in (config.pools.prefill, config.pools.decode) if other not in (None, pool)]
    # A worker cannot hand its blocks to itself: named for both legs, it does both at once.
    never = [url for other in others if other is not None for url in other.endpoints or ()]
    required = pool is config.pools.decode
    return HeaderRouter(pool.header, pool.allow, never, required=required, headers=headers)
