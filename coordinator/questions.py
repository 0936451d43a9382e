"""Questions that are answered without the pipeline: which models there are, how long a prompt is."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from coordinator.context import RequestContext
from coordinator.headers import leg_id
from coordinator.step import Leg, LegLimits
from coordinator.workers.wire import Broken, ConnectFailed, Pool, request_head
from envelope import messages
from envelope.errors import BadRequest, LegUnreadable
from envelope.formats import PATHS, RENDER_PATHS, Format
from envelope.json_codec import dumps
from envelope.kv_transfer import without_transfer_params

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable
    from typing import Any

    from coordinator.context import Headers
    from coordinator.routing.router import Worker
    from coordinator.telemetry.model_names import ModelNames
    from coordinator.upstream import HttpUpstream
    from envelope.json_codec import Json

    Render = Callable[[Format, Json, str, float | None], Awaitable[Json]]

COUNT_TOKENS_PATH = PATHS[Format.MESSAGES] + "/count_tokens"

_LIMITS = LegLimits(request_s=30.0)
_LISTED_S = 5.0


class Questions:
    """Asks one worker, and passes its answer on.

    Args:
        names: learns from the lists of models that clients are given.
        render: makes the prompts of this pipeline (``Renderer.render``); None where a service does, or nobody.
    """

    def __init__(self, upstream: HttpUpstream, names: ModelNames, render: Render | None) -> None:
        self._upstream = upstream
        self._names = names
        self._render = render

    async def models(self, headers: Headers, request_id: str) -> bytes:
        """Return a decode worker's own list: it is the truth about what can be asked for.

        Raises:
            LegRejected, LegFailed, LegTimeout, NoWorker.
        """
        leg = Leg("models", "decode", "/v1/models", {}, _LIMITS)
        listing = (await self._upstream.get(_context(headers, request_id, {}), leg)).raw
        self._names.learn(listing)
        return listing

    async def listed(self) -> bytes | None:
        """Return some decode worker's list, asked for ourselves; None where none can be had.

        No client waits for it, so it goes past the pool: it takes no turn, and no connection that a leg could use.
        """
        link = self._upstream.links["decode"]
        for worker in link.router.known():
            try:
                async with asyncio.timeout(_LISTED_S):
                    return await _get(worker, "/v1/models", link.tls)
            except (Broken, ConnectFailed, TimeoutError, OSError):
                continue
        return None

    async def count_tokens(self, headers: Headers, request_id: str, body: Any) -> bytes:
        """Return how many tokens an Anthropic request has: counted by what renders prompts, else by decode.

        Raises:
            BadRequest: the body is no JSON object, or what renders here refuses it.
            LegRejected, LegFailed, LegTimeout, NoWorker.
        """
        if not isinstance(body, dict):
            raise BadRequest("the request body must be a JSON object")
        ctx = _context(headers, request_id, without_transfer_params(body))
        if self._render is not None:
            asked = messages.count_request(ctx.body)
            rendered = await self._render(Format.MESSAGES, asked, request_id, _LIMITS.request_s)
            return dumps(messages.count_tokens(rendered))
        if "render" not in self._upstream.links:
            leg = Leg("count_tokens", "decode", COUNT_TOKENS_PATH, ctx.body, _LIMITS)
            return (await self._upstream.post_json(ctx, leg)).raw
        request = messages.count_request(ctx.body)
        leg = Leg("count_tokens", "render", RENDER_PATHS[Format.MESSAGES], request, _LIMITS)
        rendered = (await self._upstream.post_json(ctx, leg)).body
        if not isinstance(rendered, dict) or not isinstance(rendered.get("token_ids"), list):
            raise LegUnreadable("count_tokens", "the render service's answer has no token_ids")
        return dumps(messages.count_tokens(rendered))


async def _get(worker: Worker, path: str, tls: ssl.SSLContext | None) -> bytes | None:
    pool, parts = Pool(0, 0.0, tls), list[bytes]()

    def keep(data: bytes) -> bool:
        parts.append(data)
        return True

    connection = await pool.acquire(worker.url, None)
    try:
        connection.send(request_head("GET", worker.url, path, [*worker.headers], None), b"")
        await connection.head()
        await connection.push(keep)
    finally:
        connection.close()
    return b"".join(parts) if connection.status == 200 else None


def _context(headers: Headers, request_id: str, body: dict[str, Any]) -> RequestContext:
    return RequestContext(request_id, leg_id(request_id), Format.MESSAGES, body, headers, {}, stream=False)
