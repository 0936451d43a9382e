"""``GET /v1/models``, asked of a decode worker: its list is the truth about what can be asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.context import RequestContext
from coordinator.step import Leg, LegLimits
from envelope.formats import Format

if TYPE_CHECKING:
    from coordinator.context import Headers
    from coordinator.upstream import HttpUpstream

_LIMITS = LegLimits(request_s=10.0)


class Models:
    """Asks the decode role for its models."""

    def __init__(self, upstream: HttpUpstream) -> None:
        self._upstream = upstream

    async def listing(self, headers: Headers, request_id: str) -> bytes:
        """Return a decode worker's own answer.

        Raises:
            LegRejected, LegFailed, LegTimeout, NoWorker.
        """
        ctx = RequestContext(request_id, request_id, Format.CHAT, {}, headers, {}, stream=False)
        reply = await self._upstream.get(ctx, Leg("models", "decode", "/v1/models", {}, _LIMITS))
        return reply.raw
