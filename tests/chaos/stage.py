"""Plays one cell and looks at everything it left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from coordinator.config import Config
from coordinator.logs import access
from coordinator.sim import Fault, SimFleet
from coordinator.workers import release
from coordinator.workers.retry import RetryBudget
from tests.bounds import HANG_S
from tests.chaos.client import PATHS, body_of, read, wrong
from tests.chaos.oracle import expect
from tests.flows.chaos import hang_up
from tests.flows.client import Got, exchange
from tests.flows.conftest import Running, config_tree, listening, poll

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Callable, Sequence

    from coordinator.sim import SimWorker
    from tests.chaos.cells import Cell, Setup
    from tests.chaos.oracle import Expected
    from tests.flows.client import Live

LIMIT = "300ms"
GONE = "client_gone"


@dataclass(slots=True)
class Verdict:
    """What was wrong, by kind; empty is what everybody hopes for. ``left``: blocks that nobody could have freed."""

    wrong: dict[str, str] = field(default_factory=dict)
    left: int = 0

    def blame(self, kind: str, why: Any) -> None:
        self.wrong.setdefault(kind, str(why))


class Lines(logging.Handler):
    """Keeps the access log's lines, and whatever else has a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.access: list[dict[str, Any]] = []
        self.tracebacks: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or record.name == "asyncio":
            text = logging.Formatter().format(record)
            if "coordinator/sim/" not in text:  # a simulated worker may well stumble over a connection that is gone
                self.tracebacks.append(text)

    @contextlib.contextmanager
    def listening(self) -> Any:
        root, level = logging.getLogger(), logging.getLogger("coordinator.access")
        before = level.level
        root.addHandler(self)
        level.setLevel(logging.INFO)
        access.put = lambda line: self.access.append(json.loads(line))
        try:
            yield self
        finally:
            access.put = None
            root.removeHandler(self)
            level.setLevel(before)


class Stage:
    """A fleet, a coordinator in front of it, and what is played on them one after the other."""

    def __init__(self, setup: Setup, fleet: SimFleet, at: Running, lines: Lines, rng: random.Random) -> None:
        self._setup = setup
        self._fleet = fleet
        self._at = at
        self._lines = lines
        self._rng = rng
        self._played = 0
        self._roles: dict[str, list[SimWorker]] = {
            "render": [fleet.render],
            "encode": fleet.encodes,
            "prefill": fleet.prefills,
            "decode": fleet.decodes,
            "probe": fleet.decodes,
        }
        for workers in filter(None, self._roles.values()):
            shared = workers[0].behave._next  # so that a fault that happens once meets whichever worker is asked
            for worker in workers:
                worker.behave._next = shared

    async def play(self, cell: Cell) -> Verdict:
        self._played += 1
        text = f"cell {self._played}: " + " ".join(f"word {n}" for n in range(6))
        await self._prepare(cell)
        before, verdict = self._outcomes(), Verdict()
        try:
            async with asyncio.timeout(HANG_S):
                got = await self._client(cell, text)
        except TimeoutError:
            verdict.blame("hang", f"no answer within {HANG_S} s")
            got = None
        await self._settle(verdict)
        await self._restore(cell)
        self._judge(cell, text, got, before, verdict)
        return verdict

    async def _prepare(self, cell: Cell) -> None:
        self._lines.access.clear()
        self._lines.tracebacks.clear()
        # A budget that earlier cells have spent would decide this one.
        self._at.upstream._budget = RetryBudget()
        workers = self._roles[cell.phase]
        if self._setup.probes:
            for worker in self._fleet.decodes:
                worker.behave.cache_rule = "always_hit" if cell.hits else "always_miss"
        if cell.row.kept:
            for _ in workers:
                await self._at.post(PATHS["chat"], body_of(replace(cell, api="chat"), "OK."))
            self._lines.access.clear()
        elif cell.row.fault is not None and cell.row.fault.drop:
            await hang_up(*workers)
        probe = [Fault()] if self._setup.probes and cell.phase == "decode" else []
        await spoil(workers, cell, *probe)

    async def _restore(self, cell: Cell) -> None:
        for role in ("render", "encode", "prefill", "decode"):
            for worker in self._roles[role]:
                worker.behave.clear()
                if cell.row.fault is None and worker._site is None:
                    await worker.accept_connections()

    async def _client(self, cell: Cell, text: str) -> Got | None:
        """Ask, and do what this cell's client does; None is a client who left."""
        headers = [("X-Request-Id", f"cell-{self._played}")]
        window = 2048 if cell.client == "reads slowly" else None
        async with exchange(self._at.url, PATHS[cell.api], body_of(cell, text), headers=headers, window=window) as live:
            if cell.leaves:
                left = asyncio.create_task(self._leave(cell, live))
                try:
                    return await read(live, slowly=False)
                finally:
                    if not left.done():
                        left.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await left
            return await read(live, slowly=window is not None)

    async def _leave(self, cell: Cell, live: Live) -> None:
        """Wait for the moment, and for a few turns of the loop more, then go."""
        seen = self._moment(cell, live)
        while not seen():
            await asyncio.sleep(0)
        for _ in range(self._rng.randrange(12)):
            await asyncio.sleep(0)
        live.cut()

    def _moment(self, cell: Cell, live: Live) -> Callable[[], bool]:
        """Return what a client who leaves waits for: its own moment, or silence that would never end."""
        store = self._fleet.store
        at_start = {id(w): len(w.received) for w in self._fleet.workers}

        def asked(role: str) -> bool:
            return any(len(w.received) > at_start[id(w)] for w in self._roles[role])

        if cell.row.hangs:
            silent = cell.row.early or cell.row.at_once or cell.client != "leaves in the stream"
            return lambda: asked(cell.phase) and (silent or live.raw != b"")
        if cell.client == "leaves in the stream":
            return lambda: live.raw != b""
        if cell.client == "leaves after prefill":
            return lambda: bool(store.unread)
        return lambda: asked(cell.client.removeprefix("leaves at "))

    async def _settle(self, verdict: Verdict) -> None:
        """Wait until nothing is under way any more; what still is after a while has leaked."""
        workers = self._fleet.workers
        try:
            await poll(lambda: not self._at.in_flight())
            await self._at.upstream.settle()
            await poll(lambda: not self._at.front.plan.releaser._tasks and not self._at.in_flight())
        except AssertionError:
            verdict.blame("permits", self._at.in_flight())
        try:
            await poll(lambda: not any(w.in_flight or w.core.running for w in workers))
        except AssertionError:
            verdict.blame("workers busy", [w.role for w in workers if w.in_flight])
        try:
            await poll(lambda: all(w.connections <= self._kept(w) for w in workers))
        except AssertionError:
            verdict.blame("connections", {w.role: (w.connections, self._kept(w)) for w in workers})
        gauges = {s.labels["route"]: s.value for s in _samples(self._at.front._metrics.in_flight) if s.value}
        if gauges:
            verdict.blame("gauges", gauges)

    def _kept(self, worker: SimWorker) -> int:
        """Return how many connections to a worker are kept for the next leg."""
        return sum(len(pool._idle.get(worker.url, ())) for pool in self._at.upstream._pools.values())

    def _judge(self, cell: Cell, text: str, got: Got | None, before: dict[str, float], verdict: Verdict) -> None:
        expected = expect(cell)
        allowed = {expected.word}
        if cell.leaves:
            allowed.add(GONE)
        if got is not None and got.status:
            if why := wrong(cell, text, got, expected):
                verdict.blame("outcome", why)
        elif not cell.leaves and "hang" not in verdict.wrong:
            verdict.blame("outcome", "no answer at all")
        self._judge_records(allowed, before, verdict)
        self._judge_store(cell, expected, verdict)

    def _judge_records(self, allowed: set[str], before: dict[str, float], verdict: Verdict) -> None:
        after = self._outcomes()
        counted = {word: n - before.get(word, 0) for word, n in after.items() if n != before.get(word, 0)}
        if sum(counted.values()) != 1 or not allowed >= set(counted):
            verdict.blame("metric", f"{counted} and not one of {allowed}")
        lines = [line for line in self._lines.access if line["request_id"] == f"cell-{self._played}"]
        if len(lines) != 1 or len(self._lines.access) != 1:
            verdict.blame("log", f"{len(self._lines.access)} lines")
        elif [lines[0]["outcome"]] != list(counted):
            verdict.blame("log", f"{lines[0]['outcome']} in the log, {counted} in the metrics")
        if self._lines.tracebacks:
            verdict.blame("traceback", self._lines.tracebacks[0])

    def _judge_store(self, cell: Cell, expected: Expected, verdict: Verdict) -> None:
        store = self._fleet.store
        if store.violations:
            verdict.blame("violation", store.violations[0].reason)
        if store.unread:
            verdict.left = len(store.unread)
            if not (expected.left or (cell.leaves and (self._cut_off(cell) or self._met_by_the_release(cell)))):
                verdict.blame("unread", f"{len(store.unread)}; legs {self._legs()}")
        if self._fleet.encodings.violations:
            verdict.blame("violation", self._fleet.encodings.violations[0])
        self._fleet.encodings.violations.clear()
        store.violations.clear()
        store.unread.clear()

    def _cut_off(self, cell: Cell) -> bool:
        """Say whether the client left while a worker's word about the hand-over was still on its way."""
        cut = {step for step, leg in self._legs().items() if leg["outcome"] == "cancelled"}
        return bool(cut & {"prefill", "decode"}) and cell.meets("decode") and cell.lasting and cell.row.dawdles

    def _met_by_the_release(self, cell: Cell) -> bool:
        """Say whether the client left before decode had read its leg: the fault was there for the leg that frees."""
        asked = self._legs().get("decode", {}).get("outcome", "cancelled") != "cancelled"
        return cell.phase == "decode" and not asked and cell.row.ends_a_release

    def _legs(self) -> dict[str, Any]:
        return self._lines.access[-1].get("legs", {}) if self._lines.access else {}

    def _outcomes(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for sample in _samples(self._at.front._metrics.requests):
            if sample.name.endswith("_total") and sample.labels["route"] in PATHS:
                outcome = sample.labels["outcome"]
                found[outcome] = found.get(outcome, 0) + sample.value
        return found


def _samples(metric: Any) -> list[Any]:
    return [sample for family in metric.collect() for sample in family.samples]


async def spoil(workers: Sequence[SimWorker], cell: Cell, *before: Fault) -> None:
    """Have legs meet a cell's fault: all of them, or one, behind those that meet ``before``."""
    fault = cell.row.fault
    if fault is None:
        for worker in workers if cell.lasting else workers[:1]:
            await worker.refuse_connections()
    elif cell.lasting:
        for worker in workers:
            worker.behave.fault = fault
    else:
        workers[0].behave.next(*before, fault)


@asynccontextmanager
async def stage(setup: Setup, lines: Lines, rng: random.Random) -> AsyncIterator[Stage]:
    """Start the fleet and the coordinator of a set-up."""
    async with AsyncExitStack() as stack:
        # A delivery may meet a worker that hangs, and nobody here has ten seconds for each.
        stack.enter_context(patch.object(release, "_DEADLINE_S", 0.5))
        stack.enter_context(patch.object(release, "_AGAIN_AFTER_S", (0.01, 0.05)))
        encodes = setup.workers if setup.encodes else 0
        fleet = await stack.enter_async_context(
            SimFleet(encodes=encodes, prefills=setup.workers, decodes=setup.workers)
        )
        at = await listening(stack, Config.model_validate(_tree(setup, fleet)))
        yield Stage(setup, fleet, at, lines, rng)


def _tree(setup: Setup, fleet: SimFleet) -> dict[str, Any]:
    steps: dict[str, Any] = {"conditional-decode": {}} if setup.probes else {}
    if setup.encodes:
        steps["encode"] = {}
    for phase in setup.limited:
        kind = "conditional-decode" if phase == "probe" else phase
        if kind != "conditional-decode" or setup.probes:
            limits = {"timeout": LIMIT} if phase == "render" else {"first_byte_timeout": LIMIT, "idle_timeout": LIMIT}
            steps[kind] = limits
    names = ("on_missing_handover", "on_prefill_failure", "on_encode_failure")
    policies = {name: getattr(setup, name) for name in names}
    # A worker that was left out would decide the next cells.
    roles = ("encode", "prefill", "decode") if setup.encodes else ("prefill", "decode")
    pools = {role: {"health": {"failures": 0}} for role in roles}
    # Asked once, so that no probe of health takes a fault that is meant for a leg.
    changes = {"pipeline": policies, "server": {"readiness_interval": "1h"}, "pools": pools}
    return config_tree(fleet, setup.format, steps, changes)
