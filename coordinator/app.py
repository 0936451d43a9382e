"""The web application that a configuration describes: routes, certificates, and what runs as long as it does."""

from __future__ import annotations

import asyncio
import os
import time
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import CollectorRegistry

from coordinator.background import Faults
from coordinator.credentials import Credentials
from coordinator.derender.held import ParserPools
from coordinator.links import healths
from coordinator.listener import PATIENCE, REFUSED, Patience, json_errors
from coordinator.logs import log
from coordinator.metrics import Metrics
from coordinator.outcome import Recorder
from coordinator.passage import Passage
from coordinator.plan import Plan, Plans
from coordinator.planning import SERVED, asked_once, plan
from coordinator.problems import ConfigError
from coordinator.server import Front
from coordinator.telemetry.model_names import ModelNames
from coordinator.telemetry.recent import Recent
from coordinator.telemetry.tracing import PASSING
from coordinator.watch import Watch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from coordinator.config import Config
    from coordinator.telemetry.otel import OtelTracing
    from coordinator.tls import Certificate

FRONT = web.AppKey("front", Front)
PLANS = web.AppKey("plans", Plans)
FAULTS = web.AppKey("faults", Faults)
# Makes the plan of another configuration, to take the place of the one it is given.
PLAN_OF: web.AppKey[partial[Plan]] = web.AppKey("plan_of", partial)
METRICS = web.AppKey("metrics", Metrics)
RECENT = web.AppKey("recent", Recent)
# Of the main port and of that of the metrics; None is plain HTTP.
CERTIFICATES: web.AppKey[tuple[Certificate | None, Certificate | None]] = web.AppKey("certificates", tuple)
# The certificates' files: they are the listener's, and outlive a plan.
WATCH = web.AppKey("watch", Watch)


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
    faults = Faults(metrics)
    plan_of = partial(plan, metrics, faults, names, ParserPools(faults, metrics.parser_ended))
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
    metrics.watch_pools(lambda: healths(front.plan.upstream.links))
    app[FRONT] = front
    app[REFUSED] = recorder.refused
    app[PLAN_OF] = plan_of
    app[METRICS] = metrics
    app[RECENT] = recent
    app[FAULTS] = faults
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
        from coordinator.telemetry.otel import OtelTracing

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


async def _running(app: web.Application) -> AsyncIterator[None]:
    """Run what the front answers by, and what the listener needs, as long as the application runs."""
    async with app[PLANS], asyncio.TaskGroup() as tasks:
        if not await asked_once(app[FRONT].plan.discovery):
            log.warning("starting before all workers could be looked up")
        watching = tasks.create_task(app[FAULTS].keep_up("certificates", app[WATCH].run))
        yield
        watching.cancel()
