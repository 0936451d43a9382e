"""Questions that are answered without the pipeline: which models there are, how long a prompt is."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from coordinator.context import RequestContext
from coordinator.step import Leg, LegLimits
from envelope import messages
from envelope.errors import BadRequest, LegFailed
from envelope.formats import PATHS, RENDER_PATHS, Format
from envelope.json_codec import dumps
from envelope.kv_transfer import without_transfer_params

if TYPE_CHECKING:
    from typing import Any

    from coordinator.context import Headers
    from coordinator.upstream import HttpUpstream

COUNT_TOKENS_PATH = PATHS[Format.MESSAGES] + "/count_tokens"

_LIMITS = LegLimits(request_s=30.0)


class Questions:
    """Asks one worker, and passes its answer on."""

    def __init__(self, upstream: HttpUpstream) -> None:
        self._upstream = upstream

    async def models(self, headers: Headers, request_id: str) -> bytes:
        """Return a decode worker's own list: it is the truth about what can be asked for.

        Raises:
            LegRejected, LegFailed, LegTimeout, NoWorker.
        """
        leg = Leg("models", "decode", "/v1/models", {}, _LIMITS)
        return (await self._upstream.get(_context(headers, request_id, {}), leg)).raw

    async def count_tokens(self, headers: Headers, request_id: str, body: Any) -> bytes:
        """Return how many tokens an Anthropic request has: counted by render where there is one, else by decode.

        Raises:
            BadRequest: the body is no JSON object.
            LegRejected, LegFailed, LegTimeout, NoWorker.
        """
        if not isinstance(body, dict):
            raise BadRequest("the request body must be a JSON object")
        ctx = _context(headers, request_id, without_transfer_params(body))
        if "render" not in self._upstream.links:
            leg = Leg("count_tokens", "decode", COUNT_TOKENS_PATH, ctx.body, _LIMITS)
            return (await self._upstream.post_json(ctx, leg)).raw
        request = messages.count_request(ctx.body)
        leg = Leg("count_tokens", "render", RENDER_PATHS[Format.MESSAGES], request, _LIMITS)
        rendered = (await self._upstream.post_json(ctx, leg)).body
        if not isinstance(rendered, dict) or not isinstance(rendered.get("token_ids"), list):
            raise LegFailed("count_tokens", "the render service's answer has no token_ids")
        return dumps(messages.count_tokens(rendered))


def _context(headers: Headers, request_id: str, body: dict[str, Any]) -> RequestContext:
    leg_id = f"{request_id}-{secrets.token_hex(4)}"
    return RequestContext(request_id, leg_id, Format.MESSAGES, body, headers, {}, stream=False)
