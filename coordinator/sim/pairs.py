"""Legs that meet while both are in flight: Mooncake's transfers, SGLang's rooms.

The store stands for the GPUs' memory and the wire between them, so all workers of a fleet share one. As the real ones
do, a leg whose partner never comes waits for ever, and it is the store that remembers who was left waiting.

Source: vLLM 0.33 ``mooncake/mooncake_connector.py``; SGLang 0.5.23 ``srt/disaggregation`` and
``srt/managers/scheduler.py``.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from coordinator.sim.refusals import Refusal, failed

if TYPE_CHECKING:
    from coordinator.sim.core import Job

Tokens = tuple[int, ...]


class Side(Protocol):
    """What a worker's engine does about the other leg of a job."""

    async def meet(self, job: Job) -> None:
        """Do what comes before the first token.

        Raises:
            Refusal: the job ends with this.
        """

    def ended(self, job: Job, finish: str) -> None:
        """Note how a job ended: ``abort`` for one that was given up."""


@dataclass(slots=True)
class Room:
    """One room of an SGLang fleet: both legs come in, and leave together."""

    tokens: dict[str, Tokens] = field(default_factory=dict)
    full: asyncio.Event = field(default_factory=asyncio.Event)
    broken: bool = False


@dataclass(slots=True)
class PairStore:
    """
    Attributes:
        met: what the legs of each pair had in common, in the order in which they met.
        unsent: transfers whose prefill holds blocks that no decode has come for.
        stranded: transfers for which a decode holds room although nobody will send: it would for minutes.
        rooms: by host, port and number.
        servers: engine ids by data-parallel rank, by address of the bootstrap server.
        violations: breaches of the protocol, in order.
    """

    met: list[Any] = field(default_factory=list)
    unsent: dict[str, tuple[str, Tokens]] = field(default_factory=dict)
    stranded: set[str] = field(default_factory=set)
    rooms: dict[tuple[Any, Any, int], Room] = field(default_factory=dict)
    servers: dict[str, dict[int, str]] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    _known: set[str] = field(default_factory=set)
    _waiting: dict[str, asyncio.Event] = field(default_factory=dict)

    def begun(self, transfer_id: str) -> None:
        """Note that a prefill has begun."""
        if transfer_id in self._known:
            self.violations.append("transfer_id used twice")
        self._known.add(transfer_id)

    def send(self, transfer_id: str, engine_id: str, tokens: Tokens) -> None:
        """Hold blocks for a decode, or give them to the one that waits or has waited for them."""
        if transfer_id in self.stranded:
            self.stranded.discard(transfer_id)
            return
        self.unsent[transfer_id] = (engine_id, tokens)
        if transfer_id in self._waiting:
            self._waiting[transfer_id].set()

    async def fetch(self, params: dict[str, Any], tokens: Tokens) -> None:
        """Wait for the blocks, and take them.

        Raises:
            Refusal: 500, there is no such engine.
        """
        if any(not params.get(name) for name in ("transfer_id", "remote_engine_id", "remote_bootstrap_addr")):
            self.violations.append("incomplete")
            await asyncio.Event().wait()
        transfer_id = params["transfer_id"]
        if params["remote_engine_id"] not in self.servers.get(params["remote_bootstrap_addr"], {}).values():
            raise failed()
        waiting = self._waiting[transfer_id] = asyncio.Event()
        try:
            if transfer_id not in self.unsent:
                await waiting.wait()
        except asyncio.CancelledError:
            self.stranded.add(transfer_id)
            raise
        finally:
            del self._waiting[transfer_id]
        engine_id, sent = self.unsent.pop(transfer_id)
        if engine_id != params["remote_engine_id"]:
            self.violations.append("another engine")
        self._judge(sent, tokens)
        self.met.append(transfer_id)

    async def enter(self, role: str, params: dict[str, Any], tokens: Tokens) -> None:
        """Wait in a room for the other leg.

        Raises:
            Refusal: there is no room, or the other leg was given up.
        """
        number = params.get("bootstrap_room")
        if number is None:
            message = "Invalid request: Disaggregated request received without bootstrap room id."
            raise Refusal(message, late=True)
        key = (params.get("bootstrap_host"), params.get("bootstrap_port"), number)
        room = self.rooms.setdefault(key, Room())
        if role in room.tokens:
            self.violations.append("room used twice")
        room.tokens[role] = tokens
        if len(room.tokens) == 2:
            room.full.set()
            self._judge(*room.tokens.values())
            self.met.append(number)
        try:
            await room.full.wait()
        except asyncio.CancelledError:
            room.broken = True
            room.full.set()
            raise
        if room.broken:
            raise failed("Decode transfer failed")

    def _judge(self, sent: Tokens, wanted: Tokens) -> None:
        if sent != wanted:
            self.violations.append("other tokens")


@dataclass(frozen=True, slots=True)
class Mooncake:
    """A vLLM worker with the MooncakeConnector. Implements ``Side``."""

    store: PairStore
    engine_id: str
    dp_size: int = 1

    async def meet(self, job: Job) -> None:
        params = dict(job.kv_params or {})
        if params.get("do_remote_prefill"):
            await self.store.fetch(params, tuple(job.prompt_ids))
        elif params.get("do_remote_decode") and params.get("transfer_id"):
            self.store.begun(params["transfer_id"])

    def ended(self, job: Job, finish: str) -> None:
        params = job.kv_params or {}
        # Only what ended by length is kept; of anything else a decode that waits hears nothing.
        if params.get("do_remote_decode") and params.get("transfer_id") and finish == "length":
            rank = int(job.dp_rank or 0)
            self.store.send(params["transfer_id"], engine_of(self.engine_id, rank, self.dp_size), tuple(job.prompt_ids))


@dataclass(frozen=True, slots=True)
class Sglang:
    """An SGLang worker. Implements ``Side``."""

    store: PairStore
    role: str

    async def meet(self, job: Job) -> None:
        await self.store.enter(self.role, dict(job.kv_params or {}), tuple(job.prompt_ids))

    def ended(self, job: Job, finish: str) -> None:
        pass


def engine_of(engine_id: str, rank: int, dp_size: int) -> str:
    """Return the id of one data-parallel rank's engine."""
    return f"{engine_id}_dp{rank}" if dp_size > 1 else engine_id
