"""Whether the workers can be reached: asked on a clock of our own, so that a storm of probes costs them nothing.

A role is reachable when one of its workers answers ``GET /health``. Routes that a pipeline needs and that vLLM serves
only with a flag are tried as well, so that a missing flag is named here and not by the first request that fails.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp

from coordinator.logs import log

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sequence

    from coordinator.routing.health import Health
    from coordinator.routing.router import Worker

_PROBE_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class RoleProbe:
    """How one role is asked.

    Attributes:
        known: the workers of now, of which any suffices; they may change.
        scale_out: paths that the pipeline sends this role, of those that need ``--enable-scale-out``.
        gateway: the address is a gateway's, which has no /health of its own: any answer to it will do.
        tls: how https workers are verified; None is by the system's authorities.
        our_key: what the configuration calls the key that these workers want of us; None where clients have one.
        why_none: says why there are no workers, where they are looked up.
        health: is told what every worker answers to /health.
    """

    role: str
    known: Callable[[], Sequence[Worker]]
    scale_out: tuple[str, ...] = ()
    gateway: bool = False
    tls: ssl.SSLContext | None = None
    our_key: str | None = None
    why_none: Callable[[], str] | None = None
    health: Health | None = None


class Readiness:
    """What ``/readyz`` says, renewed every ``interval_s`` seconds by ``run``.

    Args:
        more: each returns what else is not ready just now, and is asked whenever that is wanted.

    Attributes:
        asked: every role has been asked once, whatever it said.
    """

    def __init__(
        self, probes: Sequence[RoleProbe], interval_s: float, more: Sequence[Callable[[], list[str]]] = ()
    ) -> None:
        self._more = tuple(more)
        self._probes = tuple(probes)
        self._interval_s = interval_s
        self._problems = {probe.role: f"{probe.role}: not asked yet" for probe in self._probes}
        self._ready = asyncio.Event()
        self.asked = asyncio.Event()
        self._proven: set[str] = set()  # workers whose scale-out routes are known to be on

    def problems(self) -> list[str]:
        """Return one sentence for each role that has no usable worker; empty means ready."""
        return [*self._problems.values(), *(problem for find in self._more for problem in find())]

    async def until_ready(self) -> None:
        """Return once every role has been found usable."""
        await self._ready.wait()

    async def run(self) -> None:
        """Ask for ever; the owner cancels."""
        # A new connection each time: whether one can be had is the question.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar()) as session:
            while True:
                async with asyncio.TaskGroup() as tasks:
                    for probe in self._probes:
                        tasks.create_task(self._renew(probe, session))
                self.asked.set()
                if not self._problems:
                    self._ready.set()
                await asyncio.sleep(self._interval_s)

    async def _renew(self, probe: RoleProbe, session: aiohttp.ClientSession) -> None:
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(self._fault(probe, worker, session)) for worker in probe.known()]
        faults = [task.result() for task in asked] or [_why_none(probe)]
        before = self._problems.pop(probe.role, None)
        if None not in faults:
            self._problems[probe.role] = f"{probe.role}: {faults[0]}"
        now = self._problems.get(probe.role)
        if now is not None and now != before:
            log.warning("not ready: %s", now)
        elif now is None and before is not None:
            log.info("%s: reachable", probe.role)

    async def _fault(self, probe: RoleProbe, worker: Worker, session: aiohttp.ClientSession) -> str | None:
        """Return why a worker cannot be used, or None."""
        fault = await _health_fault(probe, worker, session)
        if probe.health is not None:
            probe.health.probed(worker, fault)
        if fault is not None:
            self._proven.discard(worker.url)  # it may come back as another server
        elif worker.url not in self._proven:
            for path in probe.scale_out:
                fault = fault or await _route_fault(probe, worker, path, session)
            if fault is None:
                self._proven.add(worker.url)
        return fault


def _why_none(probe: RoleProbe) -> str:
    return "there are no workers" if probe.why_none is None else probe.why_none()


async def _health_fault(probe: RoleProbe, worker: Worker, session: aiohttp.ClientSession) -> str | None:
    try:
        async with (
            asyncio.timeout(_PROBE_TIMEOUT_S),
            session.get(f"{worker.url}/health", **_manner(probe, worker)) as answer,
        ):
            if answer.status == 200 or probe.gateway:
                return None
            return f"{worker.url}/health answers {answer.status}"
    except (aiohttp.ClientError, TimeoutError, OSError):
        return f"{worker.url} cannot be reached"


def _manner(probe: RoleProbe, worker: Worker) -> Any:
    return {"headers": worker.headers, "ssl": probe.tls or True, "allow_redirects": False}


async def _route_fault(probe: RoleProbe, worker: Worker, path: str, session: aiohttp.ClientSession) -> str | None:
    """Send an empty body: a worker that serves the route refuses it with a 400, before any work."""
    try:
        async with (
            asyncio.timeout(_PROBE_TIMEOUT_S),
            session.post(f"{worker.url}{path}", json={}, **_manner(probe, worker)) as answer,
        ):
            status = answer.status
    except (aiohttp.ClientError, TimeoutError, OSError):
        return f"{worker.url} cannot be reached"
    if status == 401 and probe.our_key is not None:
        return f"{worker.url} answers 401 on {path}: {probe.our_key} must be the key that it was started with"
    if status == 403:
        return f"{worker.url} answers 403 on {path}: start vllm serve with --enable-scale-out"
    if status in (404, 405):
        return f"{worker.url} has no {path}: is it the right server, and vllm serve with --enable-scale-out?"
    return None
