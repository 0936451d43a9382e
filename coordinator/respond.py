"""The only writer to the client: status, headers, body, or a stream and how it ends."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import web
from multidict import CIMultiDict

from coordinator.relay import ClientSink, pump
from coordinator.shapes import EVENT_STREAM, error_body, error_event, stream_shape, whole_answer
from coordinator.telemetry.pace import Pace
from coordinator.telemetry.server_timing import server_timing
from envelope.errors import ApiError, ClientGone, LegFailed
from envelope.generate import usage_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from coordinator.context import Answer, Headers, RequestContext
    from envelope.formats import Format
    from envelope.json_codec import Json
    from envelope.shape import Shape

# What keeps proxies on the way from holding a stream back.
_STREAM_HEADERS = {"Content-Type": EVENT_STREAM, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

_HEARTBEAT = b": keep-alive\n\n"


@dataclass(frozen=True, slots=True)
class Manner:
    """How answers are written; times in seconds.

    Attributes:
        write_timeout_s: the limit for writing a whole answer; None is no limit. Streams have none.
        heartbeat_after_s: silence after which a streaming client is sent a comment line, None is never. The first one
            spends the status line: an error that comes later reaches the client as an event.
        heartbeat_every_s: between comment lines.
        clock: monotonic seconds.
        now: seconds since the epoch.
        server_timing: tell how long each leg took.
    """

    write_timeout_s: float | None
    heartbeat_after_s: float | None
    heartbeat_every_s: float
    clock: Callable[[], float]
    now: Callable[[], float]
    server_timing: bool = False


@dataclass(slots=True)
class Result:
    """What became of an answer, for the log line and the metrics.

    Attributes:
        error: why a stream that had begun is a failure; None when it was whole.
        pace: when its frames with content were written, streams only.
    """

    response: web.StreamResponse
    usage: Json | None = None
    error: str | None = None
    pace: Pace | None = None


class Exchange:
    """One request's way back to its client. Enter it before the pipeline runs, so that the heart can beat meanwhile."""

    def __init__(self, request: web.Request, ctx: RequestContext, manner: Manner) -> None:
        self._request = request
        self._ctx = ctx
        self._manner = manner
        self._read_at = manner.clock()
        self._stream: web.StreamResponse | None = None
        self._shape: Shape | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._heart: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Exchange:
        if self._ctx.stream and self._manner.heartbeat_after_s is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._manner.heartbeat_after_s, self._start_heart, loop)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_heart()
        if self._heart is not None:
            await asyncio.wait((self._heart,))

    async def send(self, answer: Answer) -> Result:
        """Write the answer.

        Raises:
            ApiError: nothing has been written yet; ``fail`` answers with it.
            ClientGone: the client left.
        """
        created = int(self._manner.now())
        if isinstance(answer.source, bytes):
            return await self._send_whole(answer, created)
        self._shape = stream_shape(self._ctx, answer, created)
        return await self._relay(answer, self._shape)

    async def fail(self, error: ApiError) -> Result:
        """Tell of a failure: with its own status where that is still to be had, else as an event and a broken end."""
        if self._stream is None:
            if self._manner.server_timing and self._ctx.legs:
                error.headers = {**error.headers, "Server-Timing": server_timing(self._ctx)}
            return Result(await refuse(self._request, self._ctx.api, self._ctx.request_id, error, self._manner))
        await self._break_off(self._stream, error)
        return Result(self._stream, error=error.message)

    async def _send_whole(self, answer: Answer, created: int) -> Result:
        body, content_type = whole_answer(self._ctx, answer, created)
        usage = usage_of(answer.body) if isinstance(answer.body, dict) else None
        if content_type == EVENT_STREAM:
            stream, pace = await self._begin(answer.headers), Pace(self._manner.clock, self._read_at)
            pace.mark()
            await self._write_out(stream, body)
            return Result(stream, usage, pace=pace)
        headers = self._headers(answer.headers)
        headers["Content-Type"] = content_type
        response = web.Response(body=body, headers=headers)
        await write_whole(self._request, response, self._manner)
        return Result(response, usage)

    async def _relay(self, answer: Answer, shape: Shape) -> Result:
        assert not isinstance(answer.source, bytes)
        stream = await self._begin(answer.headers)
        pace = Pace(self._manner.clock, self._read_at)
        result = Result(stream, pace=pace)
        try:
            await pump(answer.source, shape, ClientSink(self._request, stream), pace.mark)
            if shape.error is not None:
                result.error = "the worker failed in mid-stream"  # its own words may quote the prompt
            answer.source.ended(None if result.error is None else LegFailed("decode", result.error))
            if result.error is None:
                await self._end(stream)
            else:
                hang_up(self._request)  # the worker told of its failure; the end is broken all the same
        except ApiError as error:
            answer.source.ended(error)
            await self._break_off(stream, error)
            result.error = error.message
        except ConnectionError as error:
            raise ClientGone("the client left while it was being answered") from error
        finally:
            result.usage = shape.usage
        return result

    async def _write_out(self, stream: web.StreamResponse, body: bytes) -> None:
        try:
            await stream.write(body)
            await self._end(stream)
        except ConnectionError as error:
            raise ClientGone("the client left while it was being answered") from error

    async def _end(self, stream: web.StreamResponse) -> None:
        """Write the last chunk. A slow client makes this wait, and nothing may follow it meanwhile."""
        self._stop_heart()
        await stream.write_eof()

    async def _begin(self, headers: Headers = ()) -> web.StreamResponse:
        """Send the head of a stream, unless the heart has done it."""
        if self._stream is None:
            self._stream = web.StreamResponse(headers=self._headers(headers))
            self._stream.headers.update(_STREAM_HEADERS)
            try:
                await self._stream.prepare(self._request)
            except ConnectionError as error:
                raise ClientGone("the client left before its answer began") from error
        return self._stream

    async def _break_off(self, stream: web.StreamResponse, error: ApiError) -> None:
        """Send the error as an event, then cut the connection.

        The body is left without its last chunk, so that no HTTP client takes what came for the whole.
        """
        try:
            await stream.write(error_event(self._ctx.api, self._shape, error, self._ctx.request_id))
        except ConnectionError as gone:
            raise ClientGone("the client left while it was being answered") from gone
        finally:
            hang_up(self._request)

    def _headers(self, headers: Headers) -> CIMultiDict[str]:
        made = CIMultiDict((*headers, ("X-Request-Id", self._ctx.request_id)))
        if self._manner.server_timing and self._ctx.legs:
            made.add("Server-Timing", server_timing(self._ctx))
        return made

    def _start_heart(self, loop: asyncio.AbstractEventLoop) -> None:
        self._heart = loop.create_task(self._beat())  # owned: __aexit__ cancels and awaits it

    def _stop_heart(self) -> None:
        for owned in (self._timer, self._heart):
            if owned is not None:
                owned.cancel()

    def _unsent(self) -> bool:
        """Say whether the client has yet to take what was written; to it, that is no silence."""
        transport = self._request.transport
        return transport is not None and transport.get_write_buffer_size() > 0

    async def _beat(self) -> None:
        """Write a comment line whenever nothing has been written for a while; whole events are never interrupted."""
        try:
            stream, written = await self._begin(), -1
            while True:
                size = self._request.writer.output_size
                if written < 0 or (size == written and not self._unsent()):
                    await stream.write(_HEARTBEAT)
                    size = self._request.writer.output_size
                written = size
                await asyncio.sleep(self._manner.heartbeat_every_s)
        except (ClientGone, ConnectionError):
            pass  # the request's own task is cancelled by the same event


async def refuse(
    request: web.Request, api: Format | None, request_id: str, error: ApiError, manner: Manner
) -> web.StreamResponse:
    """Answer with an error body, before anything else was written.

    Raises:
        ClientGone: the client left.
    """
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id, **error.headers}
    response = web.Response(status=error.status, body=error_body(api, error, request_id), headers=headers)
    if "Connection" in error.headers:
        response.force_close()  # the header alone is sent, and the connection kept
    await write_whole(request, response, manner)
    return response


async def write_whole(request: web.Request, response: web.Response, manner: Manner) -> None:
    try:
        async with asyncio.timeout(manner.write_timeout_s):
            await response.prepare(request)
            await response.write_eof()
    except (ConnectionError, TimeoutError) as error:
        hang_up(request)
        raise ClientGone("the client did not take the answer") from error


def hang_up(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.close()
