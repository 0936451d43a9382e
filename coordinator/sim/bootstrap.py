"""The bootstrap server beside a Mooncake prefill worker, which says which engine each of its ranks is.

Source: vLLM 0.33 ``mooncake/mooncake_utils.py`` (MooncakeBootstrapServer).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from coordinator.sim.pairs import engine_of
from coordinator.sim.plug import plug

if TYPE_CHECKING:
    import socket

    from coordinator.sim.pairs import PairStore


class BootstrapServer:
    """
    Attributes:
        queries: how often it was asked.
        port: where it listens, once it has been started.
    """

    def __init__(self, store: PairStore, engine_id: str, dp_size: int) -> None:
        self.queries = 0
        self._store = store
        self._engines = {rank: engine_of(engine_id, rank, dp_size) for rank in range(dp_size)}
        app = web.Application()
        app.router.add_get("/query", self._tell)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        self._plug: socket.socket | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def rename(self, engine_id: str) -> None:
        """Be an engine that was started anew."""
        self._engines = self._store.servers[self.url] = {0: engine_id}

    async def start(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]
        self._store.servers[self.url] = self._engines

    async def stop(self) -> None:
        await self._runner.cleanup()
        if self._plug is not None:
            self._plug.close()

    async def refuse_connections(self) -> None:
        """Be a server that is gone; what is connected is cut."""
        await self._runner.cleanup()
        self._plug = plug(self.port)

    async def _tell(self, request: web.Request) -> web.StreamResponse:
        self.queries += 1
        address = {"0": {"0": "tcp://127.0.0.1:1"}}  # by tensor-parallel rank and pipeline stage
        entries = {str(rank): {"engine_id": id, "worker_addr": address} for rank, id in self._engines.items()}
        return web.json_response(entries)
