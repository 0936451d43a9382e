"""Whether the workers can be reached: asked on a clock of our own, so that a storm of probes costs them nothing.

A role is reachable when one of its workers answers ``GET /health`` and can do what the pipeline needs of it
(``capability``).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp

from coordinator.logs import log
from coordinator.workers.capability import PROBE_TIMEOUT_S, Asker, Unanswered, manner

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping, Sequence

    from coordinator.background import Faults
    from coordinator.routing.health import Health
    from coordinator.routing.router import Worker

# A worker may be replaced by another version at the same address, between two questions after its health.
_AGAIN_S = 60.0


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
        modes: output modes that the pipeline asks of this role.
        texts: routes that it is asked in text, or answers in, for which it needs a tokenizer.
        learn: is told what each worker cannot do: routes and modes, and why.
    """

    role: str
    known: Callable[[], Sequence[Worker]]
    scale_out: tuple[str, ...] = ()
    gateway: bool = False
    tls: ssl.SSLContext | None = None
    our_key: str | None = None
    why_none: Callable[[], str] | None = None
    health: Health | None = None
    modes: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    learn: Callable[[Worker, Mapping[str, str]], None] | None = None


@dataclass(frozen=True, slots=True)
class _Told:
    """What a worker has told of itself: why it does not fit, if so, and until when that is taken as it is."""

    misfit: str | None
    until: float


class Readiness:
    """What ``/readyz`` says, renewed every ``interval_s`` seconds by ``run``.

    Args:
        more: each returns what else is not ready just now, and is asked whenever that is wanted.

    Attributes:
        asked: every role has been asked once, whatever it said.
    """

    def __init__(
        self,
        probes: Sequence[RoleProbe],
        interval_s: float,
        faults: Faults,
        more: Sequence[Callable[[], list[str]]] = (),
    ) -> None:
        self._faults = faults
        self._more = tuple(more)
        self._probes = tuple(probes)
        self._interval_s = interval_s
        self._problems = {probe.role: f"{probe.role}: not asked yet" for probe in self._probes}
        self._ready = asyncio.Event()
        self.asked = asyncio.Event()
        self._told: dict[Worker, _Told] = {}
        self._notes: dict[str, list[str]] = {}

    def problems(self) -> list[str]:
        """Return one sentence for each role that has no usable worker; empty means ready."""
        return [*self._problems.values(), *(problem for find in self._more for problem in find())]

    def notes(self) -> list[str]:
        """Return one sentence for each worker that is left out, of roles that others can be used of."""
        return [f"{role}: {note}" for role, notes in self._notes.items() for note in notes]

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
                here = {worker for probe in self._probes for worker in probe.known()}
                self._told = {worker: told for worker, told in self._told.items() if worker in here}
                self.asked.set()
                if not self._problems:
                    self._ready.set()
                await asyncio.sleep(self._interval_s)

    async def _renew(self, probe: RoleProbe, session: aiohttp.ClientSession) -> None:
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(self._ask(probe, worker, session)) for worker in probe.known()]
        faults = [task.result() for task in asked] or [_why_none(probe)]
        before = self._problems.pop(probe.role, None)
        if None not in faults:
            self._problems[probe.role] = f"{probe.role}: {faults[0]}"
        self._note(probe.role, [fault for fault in faults if fault is not None] if None in faults else [])
        now = self._problems.get(probe.role)
        if now is not None and now != before:
            log.warning("not ready: %s", now)
        elif now is None and before is not None:
            log.info("%s: reachable", probe.role)

    def _note(self, role: str, notes: list[str]) -> None:
        new, self._notes[role] = set(notes).difference(self._notes.get(role, ())), notes
        for misfit in new.intersection(told.misfit for told in self._told.values() if told.misfit is not None):
            log.warning("%s: %s", role, misfit)

    async def _ask(self, probe: RoleProbe, worker: Worker, session: aiohttp.ClientSession) -> str | None:
        """Return why a worker cannot be used, or None."""
        try:
            return await self._fault(probe, worker, session)
        except Exception as error:  # the others are to be asked all the same
            self._faults.tell("probes", error)
            return f"asking {worker.url} failed by a fault of the coordinator; its log has the details"

    async def _fault(self, probe: RoleProbe, worker: Worker, session: aiohttp.ClientSession) -> str | None:
        fault = await _health_fault(probe, worker, session)
        if probe.health is not None:
            probe.health.probed(worker, fault)
        if fault is not None:
            self._told.pop(worker, None)  # it may come back as another server
            return fault
        return await self._misfit(probe, worker, session)

    async def _misfit(self, probe: RoleProbe, worker: Worker, session: aiohttp.ClientSession) -> str | None:
        """Return why a worker that is well cannot do what the pipeline needs, or None; asked of it now and then."""
        now = asyncio.get_running_loop().time()
        told = self._told.get(worker)
        if told is None or now >= told.until:
            asker = Asker(session, probe.scale_out, probe.modes, probe.texts, probe.tls, probe.our_key)
            try:
                lacks = await asker.lacks(worker)
            except Unanswered as unanswered:
                return str(unanswered) if told is None else told.misfit
            misfit = next(iter(lacks.values()), None)
            if probe.learn is not None:
                probe.learn(worker, lacks)
            self._told[worker] = told = _Told(misfit, now + (_AGAIN_S if misfit is None else 0.0))
        return told.misfit


def _why_none(probe: RoleProbe) -> str:
    return "there are no workers" if probe.why_none is None else probe.why_none()


async def _health_fault(probe: RoleProbe, worker: Worker, session: aiohttp.ClientSession) -> str | None:
    try:
        async with (
            asyncio.timeout(PROBE_TIMEOUT_S),
            session.get(f"{worker.url}/health", **manner(worker, probe.tls)) as answer,
        ):
            if answer.status == 200 or probe.gateway:
                return None
            return f"{worker.url}/health answers {answer.status}"
    except (aiohttp.ClientError, TimeoutError, OSError):
        return f"{worker.url} cannot be reached"
