"""Bootstrap servers of Mooncake fleets: which engine is behind each data-parallel rank of a prefill worker.

Asked once and remembered for a while: a decode worker waits for an engine that it is told of, and an engine that was
started anew has another id. So whoever sees a pair fail has the answer forgotten.

Source: vLLM 0.33 ``mooncake/mooncake_utils.py`` (``GET /query``).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from coordinator.routing.router import Worker
from coordinator.step import Leg, LegLimits
from envelope.errors import LegFailed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from coordinator.context import RequestContext
    from coordinator.step import Reply

    Ask = Callable[[RequestContext, Leg], Awaitable[Reply]]

_FRESH_S = 30.0
_LIMITS = LegLimits(connect_s=5.0, first_byte_s=5.0, request_s=5.0, attempts=1)
# Where headers name the workers, anybody inside the allow-list may come along.
_REMEMBERED = 4096


class BootstrapServers:
    """Implements ``coordinator.step.Bootstrap``.

    Args:
        ask: sends a GET.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._known: OrderedDict[str, tuple[float, Mapping[int, str]]] = OrderedDict()
        self._asking: dict[str, asyncio.Task[Mapping[int, str]]] = {}

    async def engines(self, ctx: RequestContext, address: str) -> Mapping[int, str]:
        loop = asyncio.get_running_loop()
        until, engines = self._known.get(address, (0.0, {}))
        if loop.time() < until:
            return engines
        asking = self._asking.get(address)
        if asking is None:
            # Its own task: the client who was the first to ask may leave, and others wait for the answer too.
            asking = self._asking[address] = loop.create_task(self._query(ctx, address))
            asking.add_done_callback(lambda task: self._answered(address, task))
        return await asyncio.shield(asking)

    def forget(self, address: str) -> None:
        self._known.pop(address, None)

    async def _query(self, ctx: RequestContext, address: str) -> Mapping[int, str]:
        # Nothing of the client's is that server's business.
        bare = dataclasses.replace(ctx, headers=(), failed=[], carried={})
        leg = Leg("prefill", "prefill", "/query", {}, _LIMITS, to=Worker(address), tied=True)
        reply = await self._ask(bare, leg)
        return _engines(reply.body, address)

    def _answered(self, address: str, task: asyncio.Task[Mapping[int, str]]) -> None:
        del self._asking[address]
        if task.cancelled() or task.exception() is not None:
            return
        self._known[address] = (asyncio.get_running_loop().time() + _FRESH_S, task.result())
        self._known.move_to_end(address)
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)


def _engines(body: Any, address: str) -> Mapping[int, str]:
    """Read ``{"0": {"engine_id": "..", "worker_addr": {..}}}``."""
    entries = body.items() if isinstance(body, dict) else ()
    found = {
        int(rank): entry["engine_id"]
        for rank, entry in entries
        if rank.isdecimal() and isinstance(entry, dict) and isinstance(entry.get("engine_id"), str)
    }
    if not found:
        raise LegFailed("prefill", f"the bootstrap server {address} knows of no engine: is the worker still starting?")
    return found
