"""A split fleet in one process: a render server, prefill workers and decode workers that share one store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from coordinator.sim.faults import Behaviour
from coordinator.sim.handover import HandoverStore
from coordinator.sim.settings import Settings
from coordinator.sim.worker import SimWorker

if TYPE_CHECKING:
    from types import TracebackType


class SimFleet:
    """
    Args:
        prefills: how many prefill workers.
        decodes: how many decode workers.
        itl_s: seconds between two tokens of a decode worker.
        settings: of every worker, unless its role has its own.

    Attributes:
        render: the render server.
        prefill: the first prefill worker.
        decode: the first decode worker.
        store: what the workers hand over; ``violations`` and ``unread`` are what a test asserts on.
    """

    def __init__(
        self,
        *,
        prefills: int = 1,
        decodes: int = 1,
        itl_s: float = 0.0,
        settings: Settings | None = None,
        render_settings: Settings | None = None,
        prefill_settings: Settings | None = None,
        decode_settings: Settings | None = None,
        store: HandoverStore | None = None,
    ) -> None:
        self.store = store or HandoverStore()
        settings = settings or Settings()
        self.render = SimWorker("render", settings=render_settings or settings, store=self.store)
        self.prefills = [
            SimWorker("prefill", settings=prefill_settings or settings, store=self.store) for _ in range(prefills)
        ]
        self.decodes = [
            SimWorker("decode", settings=decode_settings or settings, store=self.store, behave=Behaviour(itl_s=itl_s))
            for _ in range(decodes)
        ]

    @property
    def prefill(self) -> SimWorker:
        return self.prefills[0]

    @property
    def decode(self) -> SimWorker:
        return self.decodes[0]

    @property
    def workers(self) -> list[SimWorker]:
        return [self.render, *self.prefills, *self.decodes]

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
