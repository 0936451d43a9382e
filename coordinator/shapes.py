"""Which shape an answer takes on its way to the client: as it came, or rebuilt in the client's own envelope."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from envelope import chat, completions, errors, messages, responses
from envelope.errors import LegFailed
from envelope.formats import Format
from envelope.generate import single_frame
from envelope.json_codec import dumps
from envelope.passthrough import PassThrough, without_transfer_params
from envelope.rebuild import reading
from envelope.shape import Asked

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.context import Answer, RequestContext
    from envelope.errors import ApiError
    from envelope.json_codec import Json
    from envelope.shape import Shape

JSON = "application/json"
EVENT_STREAM = "text/event-stream; charset=utf-8"


class Envelope(Protocol):
    """A module of ``envelope`` that rebuilds one API's answers from the generate route's."""

    def whole(self, reply: Json, asked: Asked) -> Json: ...

    def replay(self, reply: Json, asked: Asked) -> bytes: ...

    def Chunks(self, asked: Asked) -> Shape: ...  # a class, called to make one


ENVELOPES: dict[Format, Envelope] = {
    Format.CHAT: chat,
    Format.COMPLETIONS: completions,
    Format.RESPONSES: responses,
    Format.MESSAGES: messages,
}

# Of a stream in which reasoning and tool calls are told apart; completions are never parsed.
PARSED: dict[Format, Callable[[Asked], Shape]] = {
    Format.CHAT: chat.ParsedChunks,
    Format.RESPONSES: responses.ParsedChunks,
    Format.MESSAGES: messages.ParsedChunks,
}


def asked(ctx: RequestContext, created: int) -> Asked:
    """Return what of a request its rebuilt answer depends on; ``created`` is seconds since the epoch."""
    return Asked(ctx.body, ctx.rendered, ctx.leg_id, created)


def whole_answer(ctx: RequestContext, answer: Answer, created: int) -> tuple[bytes, str]:
    """Return the body and the content type for an answer that has come whole.

    A client that asked for a stream gets one, also where the leg could not be streamed.

    Raises:
        LegFailed: the worker's answer cannot be rebuilt.
    """
    assert isinstance(answer.source, bytes)
    if answer.wrap:
        envelope, wanted = ENVELOPES[ctx.api], asked(ctx, created)
        with reading("decode"):
            if ctx.stream:
                return envelope.replay(answer.body, wanted), EVENT_STREAM
            return dumps(envelope.whole(answer.body, wanted)), JSON
    body = answer.source
    if not answer.expose_transfer_params and _tells_of_workers(answer.body):
        body = dumps(without_transfer_params(answer.body))
    return (single_frame(body), EVENT_STREAM) if ctx.stream else (body, JSON)


def stream_shape(ctx: RequestContext, answer: Answer, created: int) -> Shape:
    """Return the shape for an answer that is still coming."""
    if answer.wrap:
        shape = PARSED[ctx.api] if answer.parsed else ENVELOPES[ctx.api].Chunks
        return shape(asked(ctx, created))
    return PassThrough(answer.format, strip_transfer_params=not answer.expose_transfer_params)


def error_body(api: Format | None, error: ApiError, request_id: str) -> bytes:
    """Return an error answer's body, as the client's API has it."""
    told = messages.error_body if api is Format.MESSAGES else errors.error_body
    return told(error, request_id)


def error_event(api: Format, shape: Shape | None, error: ApiError, request_id: str) -> bytes:
    """Return the event that tells of a failure in a stream that has begun."""
    if (fail := getattr(shape, "fail", None)) is not None:
        with suppress(LegFailed), reading("decode"):  # it may stumble again over what it has just failed of
            return fail(error, request_id)  # type: ignore[no-any-return]  # it knows how far its events have come
    told = {Format.MESSAGES: messages.error_event, Format.RESPONSES: responses.error_event}.get(api, errors.error_event)
    return told(error, request_id)


def _tells_of_workers(body: Any) -> bool:
    return isinstance(body, dict) and any(body.get(name) for name in ("kv_transfer_params", "ec_transfer_params"))
