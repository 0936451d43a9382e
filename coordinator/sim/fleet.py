"""A split fleet in one process: a render server, and encode, prefill and decode workers that share their stores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from coordinator.sim.encodings import EncodingStore
from coordinator.sim.faults import Behaviour
from coordinator.sim.handover import HandoverStore
from coordinator.sim.pairs import PairStore
from coordinator.sim.settings import Settings
from coordinator.sim.worker import Role, SimWorker

if TYPE_CHECKING:
    from types import TracebackType


class SimFleet:
    """
    Args:
        encodes: how many encode workers.
        prefills: how many prefill workers.
        decodes: how many decode workers.
        itl_s: seconds between two tokens of a decode worker.
        settings: of every worker, unless its role has its own.

    Attributes:
        render: the render server.
        encode: the first encode worker.
        prefill: the first prefill worker.
        decode: the first decode worker.
        store: what the workers hand over; ``violations`` and ``unread`` are what a test asserts on.
        encodings: the encoder cache; it has ``violations`` too.
        pairs: where legs in flight together meet; the same.
    """

    def __init__(
        self,
        *,
        encodes: int = 0,
        prefills: int = 1,
        decodes: int = 1,
        itl_s: float = 0.0,
        settings: Settings | None = None,
        render_settings: Settings | None = None,
        encode_settings: Settings | None = None,
        prefill_settings: Settings | None = None,
        decode_settings: Settings | None = None,
        store: HandoverStore | None = None,
    ) -> None:
        self.store = store or HandoverStore()
        self.encodings = EncodingStore()
        self.pairs = PairStore()
        settings = settings or Settings()

        def some(role: Role, count: int, own: Settings | None, itl_s: float = 0.0) -> list[SimWorker]:
            return [
                SimWorker(
                    role,
                    settings=own or settings,
                    store=self.store,
                    encodings=self.encodings,
                    pairs=self.pairs,
                    behave=Behaviour(itl_s=itl_s),
                )
                for _ in range(count)
            ]

        (self.render,) = some("render", 1, render_settings)
        self.encodes = some("encode", encodes, encode_settings)
        self.prefills = some("prefill", prefills, prefill_settings)
        self.decodes = some("decode", decodes, decode_settings, itl_s)

    @property
    def encode(self) -> SimWorker:
        return self.encodes[0]

    @property
    def prefill(self) -> SimWorker:
        return self.prefills[0]

    @property
    def decode(self) -> SimWorker:
        return self.decodes[0]

    @property
    def workers(self) -> list[SimWorker]:
        return [self.render, *self.encodes, *self.prefills, *self.decodes]

    async def start(self) -> None:
        """Start all workers, or none."""
        try:
            for worker in self.workers:
                await worker.start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        for worker in self.workers:
            await worker.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
