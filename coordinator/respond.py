"""The only writer to the client: status, headers, body, or a stream and how it ends."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordinator.http.server import refusal_headers
from coordinator.relay import pump
from coordinator.shapes import EVENT_STREAM, error_body, error_event, stream_shape, whole_answer
from coordinator.telemetry.pace import Pace
from coordinator.telemetry.server_timing import server_timing
from envelope.errors import ApiError, ClientGone, ClientStalled, LegFailed
from envelope.generate import usage_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from coordinator.context import Answer, Headers, RequestContext
    from coordinator.http.request import Request
    from envelope.formats import Format
    from envelope.json_codec import Json
    from envelope.shape import Shape

# What keeps proxies on the way from holding a stream back.
_STREAM_HEADERS = (("Content-Type", EVENT_STREAM), ("Cache-Control", "no-cache"), ("X-Accel-Buffering", "no"))

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

    status: int
    usage: Json | None = None
    error: str | None = None
    pace: Pace | None = None


class Exchange:
    """One request's way back to its client. Enter it before the pipeline runs, so that the heart can beat meanwhile."""

    def __init__(self, request: Request, ctx: RequestContext, manner: Manner) -> None:
        self._request = request
        self._response = request.response
        self._ctx = ctx
        self._manner = manner
        self._read_at = manner.clock()
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
        try:
            if isinstance(answer.source, bytes):
                return await self._send_whole(answer, created)
            self._shape = stream_shape(self._ctx, answer, created)
            return await self._relay(answer, self._shape)
        except ConnectionError as error:
            raise ClientGone("the client left while it was being answered") from error

    async def fail(self, error: ApiError) -> Result:
        """Tell of a failure: with its own status where that is still to be had, else as an event and a broken end."""
        if not self._response.status:
            if self._manner.server_timing and self._ctx.legs:
                error.headers = {**error.headers, "Server-Timing": server_timing(self._ctx)}
            await refuse(self._request, self._ctx.api, self._ctx.request_id, error, self._manner)
            return Result(error.status)
        self._break_off(error)
        return Result(self._response.status, error=error.message)

    async def _send_whole(self, answer: Answer, created: int) -> Result:
        body, content_type = whole_answer(self._ctx, answer, created)
        usage = usage_of(answer.body) if isinstance(answer.body, dict) else None
        if content_type == EVENT_STREAM:
            self._begin(answer.headers)
            pace = Pace(self._manner.clock, self._read_at)
            pace.mark()
            if not self._response.put(body):
                await self._response.drain()
            await self._end()
            return Result(200, usage, pace=pace)
        headers = [*self._headers(answer.headers), ("Content-Type", content_type)]
        await write_whole(self._request, 200, headers, body, self._manner)
        return Result(200, usage)

    async def _relay(self, answer: Answer, shape: Shape) -> Result:
        assert not isinstance(answer.source, bytes)
        self._begin(answer.headers)
        pace = Pace(self._manner.clock, self._read_at)
        result = Result(200, pace=pace)
        try:
            await pump(answer.source, shape, self._response, pace.mark)
            if shape.error is not None:
                result.error = "the worker failed in mid-stream"  # its own words may quote the prompt
            answer.source.ended(None if result.error is None else LegFailed("decode", result.error))
            if result.error is None:
                await self._end()
            else:
                self._response.hang_up()  # the worker told of its failure; the end is broken all the same
        except ApiError as error:
            answer.source.ended(error)
            self._break_off(error)
            result.error = error.message
        finally:
            result.usage = shape.usage
        return result

    async def _end(self) -> None:
        """Write the last chunk. A slow client makes this wait, and nothing may follow it meanwhile."""
        self._stop_heart()
        self._response.end()
        if self._response.behind:
            await self._response.drain()

    def _begin(self, headers: Headers = ()) -> None:
        """Send the head of a stream, unless the heart has done it."""
        if not self._response.status:
            self._response.begin(200, [*self._headers(headers, _STREAM_HEADERS), *_STREAM_HEADERS])

    def _break_off(self, error: ApiError) -> None:
        """Send the error as an event, then cut the connection.

        The body is left without its last chunk, so that no HTTP client takes what came for the whole.
        """
        try:
            self._response.put(error_event(self._ctx.api, self._shape, error, self._ctx.request_id))
        except ConnectionError as gone:
            raise ClientGone("the client left while it was being answered") from gone
        finally:
            self._response.hang_up()

    def _headers(self, headers: Headers, ours: Headers = ()) -> list[tuple[str, str]]:
        """Return a worker's headers, but for those that we set ourselves, and the request's own."""
        names = {name.lower() for name, _ in ours}
        made = [pair for pair in headers if pair[0].lower() not in names] if names else list(headers)
        made.append(("X-Request-Id", self._ctx.request_id))
        if self._manner.server_timing and self._ctx.legs:
            made.append(("Server-Timing", server_timing(self._ctx)))
        return made

    def _start_heart(self, loop: asyncio.AbstractEventLoop) -> None:
        self._heart = loop.create_task(self._beat())  # owned: __aexit__ cancels and awaits it

    def _stop_heart(self) -> None:
        for owned in (self._timer, self._heart):
            if owned is not None:
                owned.cancel()

    async def _beat(self) -> None:
        """Write a comment line whenever nothing has been written for a while; whole events are never interrupted."""
        response = self._response
        try:
            if not response.status:
                self._begin()
                response.put(_HEARTBEAT)
            while True:
                written = response.written
                await asyncio.sleep(self._manner.heartbeat_every_s)
                if response.written == written and not response.unsent:  # what it has yet to take is no silence to it
                    response.put(_HEARTBEAT)
        except ConnectionError:
            pass  # the request's own task is cancelled by the same event


async def refuse(request: Request, api: Format | None, request_id: str, error: ApiError, manner: Manner) -> None:
    """Answer with an error body, before anything else was written.

    Raises:
        ClientGone: the client left.
    """
    headers = refusal_headers(request, error, request_id)
    await write_whole(request, error.status, headers, error_body(api, error, request_id), manner)


async def write_whole(
    request: Request, status: int, headers: Sequence[tuple[str, str]], body: bytes, manner: Manner
) -> None:
    """
    Raises:
        ClientGone: the client left, or did not take it in time and was hung up.
    """
    response = request.response
    try:
        response.whole(status, headers, body)
        if response.behind:
            async with asyncio.timeout(manner.write_timeout_s):
                await response.drain()
    except TimeoutError as error:
        request.connection.drop()
        raise ClientStalled("the client did not take the answer in time") from error
    except ConnectionError as error:
        response.hang_up()
        raise ClientGone("the client left before it had the answer") from error
