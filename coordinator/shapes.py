"""Which shape an answer takes on its way to the client: as it came, or rebuilt in the client's own envelope."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envelope import chat
from envelope.generate import single_frame
from envelope.json_codec import dumps
from envelope.passthrough import PassThrough
from envelope.shape import Asked

if TYPE_CHECKING:
    from coordinator.context import Answer, RequestContext
    from envelope.shape import Shape

JSON = "application/json"
EVENT_STREAM = "text/event-stream; charset=utf-8"


def whole_answer(ctx: RequestContext, answer: Answer, created: int) -> tuple[bytes, str]:
    """Return the body and the content type for an answer that has come whole.

    A client that asked for a stream gets one, also where the leg could not be streamed.

    Raises:
        LegFailed: the worker's answer cannot be rebuilt.
    """
    assert isinstance(answer.source, bytes)
    body = answer.source
    if answer.wrap and not ctx.stream:
        body = dumps(chat.whole(answer.body, asked(ctx, created)))
    return (single_frame(body), EVENT_STREAM) if ctx.stream else (body, JSON)


def stream_shape(ctx: RequestContext, answer: Answer, created: int) -> Shape:
    """Return the shape for an answer that is still coming."""
    return PassThrough(answer.format)


def asked(ctx: RequestContext, created: int) -> Asked:
    return Asked(ctx.body, ctx.rendered, ctx.leg_id, created)
