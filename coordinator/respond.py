"""The only writer to the client: status, headers, body, or a stream and how it ends."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import web
from multidict import CIMultiDict

from coordinator.relay import pump
from coordinator.shapes import EVENT_STREAM, stream_shape, whole_answer
from envelope.errors import ApiError, ClientGone, error_body, error_event
from envelope.generate import usage_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.context import Answer, Headers, RequestContext
    from envelope.json_codec import Json
    from envelope.shape import Shape

# What keeps proxies on the way from holding a stream back.
_STREAM_HEADERS = {"Content-Type": EVENT_STREAM, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(slots=True)
class Result:
    """What became of an answer, for the log line and the metrics.

    Attributes:
        error: why a stream that had begun is a failure; None when it was whole.
        ttft_s: from the request read to the first content written, streams only.
    """

    response: web.StreamResponse
    usage: Json | None = None
    error: str | None = None
    ttft_s: float | None = None


class Responder:
    """Writes answers.

    Args:
        write_timeout_s: the limit for writing a whole answer; None is no limit. Streams have none.
        clock: monotonic seconds.
        now: seconds since the epoch.
    """

    def __init__(self, write_timeout_s: float | None, clock: Callable[[], float], now: Callable[[], float]) -> None:
        self._write_timeout_s = write_timeout_s
        self._clock = clock
        self._now = now

    async def send(self, request: web.Request, ctx: RequestContext, answer: Answer, read_at: float) -> Result:
        """Write the answer to the client.

        Args:
            read_at: when the request had been read, by ``clock``.

        Raises:
            ApiError: nothing has been written yet; the caller answers with the error.
            ClientGone: the client left.
        """
        created = int(self._now())
        if isinstance(answer.source, bytes):
            body, content_type = whole_answer(ctx, answer, created)
            return await self._whole(request, ctx, answer, body, content_type)
        shape = stream_shape(ctx, answer, created)
        return await self._stream(request, ctx, answer, shape, read_at)

    async def _whole(
        self, request: web.Request, ctx: RequestContext, answer: Answer, body: bytes, content_type: str
    ) -> Result:
        response = web.Response(body=body, headers=_headers(answer.headers, ctx.request_id))
        if content_type == EVENT_STREAM:
            response.headers.update(_STREAM_HEADERS)
        else:
            response.headers["Content-Type"] = content_type
        usage = usage_of(answer.body) if isinstance(answer.body, dict) else None
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await response.prepare(request)
                await response.write_eof()
        except (ConnectionError, TimeoutError) as error:
            hang_up(request)
            raise ClientGone("the client did not take the answer") from error
        return Result(response, usage)

    async def _stream(
        self, request: web.Request, ctx: RequestContext, answer: Answer, shape: Shape, read_at: float
    ) -> Result:
        assert not isinstance(answer.source, bytes)
        response = web.StreamResponse(headers=_headers(answer.headers, ctx.request_id))
        response.headers.update(_STREAM_HEADERS)
        result = Result(response)

        def first_content() -> None:
            result.ttft_s = self._clock() - read_at

        try:
            await response.prepare(request)
            try:
                await pump(answer.source, shape, response, first_content)
                result.error = shape.error
                await response.write_eof()
            except ApiError as error:
                await self._break_off(request, ctx, response, error)
                result.error = error.message
        except ConnectionError as error:
            raise ClientGone("the client left while it was being answered") from error
        finally:
            result.usage = shape.usage
        return result

    async def _break_off(
        self, request: web.Request, ctx: RequestContext, response: web.StreamResponse, error: ApiError
    ) -> None:
        """Tell of a failure in a stream that has begun, then cut the connection.

        The body is left without its last chunk, so that no HTTP client takes what came for the whole.
        """
        await response.write(error_event(error, ctx.request_id))
        hang_up(request)

    async def refuse(self, request: web.Request, request_id: str, error: ApiError) -> web.StreamResponse:
        """Answer with an error body."""
        response = web.Response(
            status=error.status,
            body=error_body(error, request_id),
            headers={"Content-Type": "application/json", "X-Request-Id": request_id, **error.headers},
        )
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await response.prepare(request)
                await response.write_eof()
        except (ConnectionError, TimeoutError) as gone:
            hang_up(request)
            raise ClientGone("the client did not take the answer") from gone
        return response


def hang_up(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.close()


def _headers(headers: Headers, request_id: str) -> CIMultiDict[str]:
    return CIMultiDict((*headers, ("X-Request-Id", request_id)))
