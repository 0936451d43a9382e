"""The coordinator that a configuration describes: its front, its listener, and what runs as long as it does."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from coordinator.background import Faults
from coordinator.derender.held import ParserPools
from coordinator.http.connection import Patience
from coordinator.http.server import Server
from coordinator.links import healths
from coordinator.logs import log
from coordinator.metrics import Metrics
from coordinator.outcome import Recorder
from coordinator.passage import Passage
from coordinator.plan import Plan, Plans
from coordinator.planning import SERVED, asked_once, plan
from coordinator.security.credentials import Credentials
from coordinator.security.watch import Watch
from coordinator.server import Front
from coordinator.settings.problems import ConfigError
from coordinator.telemetry.model_names import ModelNames
from coordinator.telemetry.recent import Recent
from coordinator.telemetry.tracing import PASSING
from coordinator.version import version

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from coordinator.config import Config
    from coordinator.security.tls import Certificate
    from coordinator.telemetry.otel import OtelTracing


@dataclass
class App:
    """One coordinator: what takes its connections, what answers, and what runs as long as it does.

    Attributes:
        plan_of: makes the plan of another configuration, to take the place of the one it is given.
        watch: over the certificates' files: they are the listener's, and outlive a plan.
        certificates: of the main port and of that of the metrics; None is plain HTTP.
    """

    server: Server
    front: Front
    plans: Plans
    plan_of: partial[Plan]
    metrics: Metrics
    recent: Recent
    faults: Faults
    watch: Watch
    certificates: tuple[Certificate | None, Certificate | None]
    passage: Passage | None
    tracing: OtelTracing | None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run what the front answers by, and what the listener needs; at the end, close every connection first."""
        raised: Exception | None = None
        async with AsyncExitStack() as stack:
            if self.tracing is not None:  # the first to begin is the last to end
                await stack.enter_async_context(self.tracing.running())
            if self.passage is not None:
                await self.passage.start()
                stack.push_async_callback(self.passage.close)
            await stack.enter_async_context(self.plans)
            if not await asked_once(self.front.plan.discovery):
                log.warning("starting before all workers could be looked up")
            watching = asyncio.create_task(self.faults.keep_up("certificates", self.watch.run))
            stack.push_async_callback(_cancelled, watching)
            stack.push_async_callback(self.server.close)
            try:
                yield
            except Exception as error:  # a port that is taken, say: task groups here would wrap it up
                raised = error
        if raised is not None:
            raise raised


def build(config: Config) -> App:
    """Return the coordinator that a configuration describes; nothing is opened before it runs and listens.

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
    recent = Recent(time.time)
    recorder = Recorder(metrics, names, tracing or PASSING, recent if server.shows_status else None)
    faults = Faults(metrics)
    plan_of = partial(plan, metrics, faults, names, ParserPools(faults, metrics.parser_ended))
    passage = Passage()
    front = Front(
        plan_of(config, credentials),
        apis=SERVED,
        metrics=metrics,
        recorder=recorder,
        proxied=server.proxied_routes,
        passage=passage,
    )
    metrics.watch_process(version())
    metrics.watch_pools(lambda: healths(front.plan.upstream.links))
    patience = Patience(
        server.write_stall_timeout or None,
        server.read_header_timeout or None,
        server.idle_timeout or None,
    )
    listener = Server(
        front.routes(metrics=server.metrics_port is None),
        patience=patience,
        max_field_bytes=server.max_header_size,
        refused=recorder.refused,
    )
    for route in server.proxied_routes:
        if route.danger is not None:
            log.warning("server.proxied_routes: %s %s, and whoever may ask here may call it", route, route.danger)
    return App(
        server=listener,
        front=front,
        plans=Plans(front.plan, partial(setattr, front, "plan")),
        plan_of=plan_of,
        metrics=metrics,
        recent=recent,
        faults=faults,
        watch=watch,
        certificates=certificates,
        passage=passage if server.proxied_routes else None,
        tracing=tracing,
    )


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


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait((task,))
