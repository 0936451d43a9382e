"""One leg under way: its worker's permit, its connection, its clock, and what a failure on the wire means."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from coordinator.headers import downstream_headers
from coordinator.workers.inflated import body_of
from coordinator.workers.verdict import event_error, retryable
from coordinator.workers.wire import Broken, ConnectFailed
from envelope.errors import ApiError, LegError, LegFailed, LegRejected, LegTimeout, NoWorker
from envelope.formats import PATHS, Format
from envelope.json_codec import JSONDecodeError, loads_lenient
from envelope.sse import MAX_EVENT_BYTES, Events, EventTooLarge, data_of, event_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from coordinator.context import Headers
    from coordinator.routing.router import Worker
    from coordinator.step import Leg
    from coordinator.telemetry.attempt import Watched
    from coordinator.workers.inflated import Inflated
    from coordinator.workers.wire import Connection, Pool
    from envelope.written import Buffer

_SOON = {"Retry-After": "1"}

_DONE = b"[DONE]"

# Of a whole answer. Rendered video may have some hundred megabytes; an answer without an end would take all memory.
_MOST_BYTES = 1 << 30


class Call:
    """One leg under way: owns its worker's permit and its connection. Implements ``coordinator.context.LiveStream``."""

    __slots__ = (
        "_closed",
        "_first",
        "_head",
        "_heard",
        "_pool",
        "_source",
        "_tokens",
        "attempt",
        "began",
        "connected",
        "connection",
        "ends_at",
        "leg",
        "lingering",
        "report",
        "stale",
        "watched",
        "worker",
    )

    def __init__(
        self, leg: Leg, worker: Worker, pool: Pool, attempt: int = 0, begun: float | None = None, tokens: int = 0
    ) -> None:
        self.leg = leg
        self.worker = worker
        self._pool = pool
        self.attempt = attempt
        self.connected = False  # a connection was had, so the worker may have got the request
        self.lingering = False  # its client has left, and it is held open for a moment
        self.stale = False  # the connection had been kept, and was dead before any byte of the answer
        self.watched: Watched | None = None
        self.report: Callable[[Worker, ApiError | None], None] | None = None
        self.connection: Connection = None  # type: ignore[assignment]  # set by ``open``
        self._source: Connection | Inflated = None  # type: ignore[assignment]  # set by ``open`` or ``head``
        now = asyncio.get_running_loop().time() if attempt or begun is None else begun
        self.began = now
        self.ends_at = (now if begun is None else begun) + leg.limits.request_s if leg.limits.request_s else None
        self._head: list[bytes] = []
        self._first = b""
        self._heard = False  # the worker has begun to answer, or tried to
        self._closed = False
        self._tokens = tokens
        worker.begin(tokens)

    @property
    def headers(self) -> Headers:
        return downstream_headers(self.connection.headers.items())

    @property
    def streamed(self) -> bool:
        return bool(self.leg.body.get("stream"))

    @property
    def took_up(self) -> bool:
        """Whether the worker has read the hand-over that the leg brought, or has told prefill to free the blocks.

        vLLM answers 500 when it tried and could not. Its OpenAI routes tell prefill of a refusal, generate does not.
        """
        status = 0 if self.connection is None else self.connection.status
        if status == 200:
            return not self.streamed or self._heard
        return status == 500 or (status == 400 and self.leg.path != PATHS[Format.GENERATE])

    async def open(
        self, head: bytes, body: Iterable[Buffer], ends_at: float | None = None, *, fresh: bool = False
    ) -> None:
        """Send the request and wait for the head of the answer.

        Args:
            ends_at: time of the loop by which it must have come.
            fresh: on a new connection.

        Raises:
            ConnectFailed, Broken, TimeoutError: ``stale`` says whether the connection had been kept for too long.
        """
        if self.connection is not None:
            self.connection.close()
        url = self.worker.url
        if fresh or (connection := self._pool.kept(url, self.began)) is None:
            connection = await self._pool.acquire(url, self.leg.limits.connect_s, fresh=fresh, ends_at=ends_at)
        self.connection, self.connected = connection, True
        connection.send(head, *body)
        try:
            await connection.head(ends_at)
        except Broken:
            self.stale = connection.reused and not connection.answered
            raise
        self._source = body_of(connection)

    async def head(self) -> None:
        """Wait for the head of the answer where ``open`` was cancelled before it had come.

        Raises:
            Broken
        """
        await self.connection.head()
        self._source = body_of(self.connection)

    @property
    def first_event(self) -> bytes:
        return self._first

    async def read_first_event(self, ends_at: float | None = None) -> None:
        """Read up to the first event that has data; its bytes are kept for whoever iterates.

        Args:
            ends_at: time of the loop by which it must have come.

        Raises:
            LegRejected, LegFailed, LegBusy: the event is an error, the end mark, or never comes.
            Broken, TimeoutError, EventTooLarge.
        """
        events, left = Events(), MAX_EVENT_BYTES
        while True:
            chunk = await self._source.read(ends_at)
            if not chunk:
                raise LegFailed(self.leg.step, "the worker's stream ended before its first event")
            if left < 0:
                raise EventTooLarge("what comes before the first event has no end")
            left -= len(chunk)
            self._head.append(chunk)
            for event in events.feed(chunk):
                if (data := data_of(event)) is not None:
                    return self._accept_first(event, data)

    def _accept_first(self, event: bytes, data: bytes) -> None:
        if data == _DONE:
            raise LegFailed(self.leg.step, "the worker's stream held no answer")
        if event.find(b"error") >= 0 and (error := _error_in(event, data)):
            told = event_error(self.leg, error)
            self._heard = not isinstance(told, LegRejected)
            raise told
        self._first, self._heard = data, True
        self.leg = self.leg.begun()

    async def read_all(self) -> bytes:
        """Return the whole body.

        Raises:
            LegFailed, LegTimeout: the answer broke off or is too large, or nothing came in time.
        """
        if self.connection.complete and self._source is self.connection and not self._head:
            self._heard = True
            return self.connection.take()  # it came with its head, as most do
        parts: list[bytes] = []
        left = _MOST_BYTES

        def keep(data: bytes) -> bool:
            nonlocal left
            left -= len(data)
            if left < 0:
                parts.clear()  # the error's traceback would keep them
                raise EventTooLarge("the answer has no end")
            parts.append(data)
            return True

        await self.push(keep)
        self._heard = True
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def ended(self, error: ApiError | None) -> None:
        if self.report is not None:
            self.report(self.worker, error)
        if self.watched is not None and error is not None:
            self.watched.broke(error)

    async def push(self, take: Callable[[bytes], bool]) -> bool:
        """Give the answer's bytes to ``take`` as they come, the first event's included; see ``LiveStream``."""
        if self._head:
            head, self._head = self._head, []
            room = take(b"".join(head))
            del head  # this lasts as long as the stream
            if not room:
                return False
        try:
            if self.leg.limits.idle_s is None and self.ends_at is None:
                return await self._source.push(take)
            return await self._push_in_time(take)
        except WIRE_FAULTS as error:
            raise wire_error(self.leg, error) from error

    async def _push_in_time(self, take: Callable[[bytes], bool]) -> bool:
        idle_s, loop = self.leg.limits.idle_s, asyncio.get_running_loop()
        heard_at = loop.time()

        def heard(data: bytes) -> bool:
            nonlocal heard_at
            heard_at = loop.time()
            return take(data)

        while True:
            idle_at = heard_at + idle_s if idle_s else None
            try:
                async with asyncio.timeout_at(earliest(idle_at, self.ends_at)):
                    return await self._source.push(heard)
            except TimeoutError:
                now = loop.time()
                if (self.ends_at is not None and now >= self.ends_at) or idle_s is None or now >= heard_at + idle_s:
                    raise
                # Something has come since the limit was set, so it is set anew.

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        """Give the permit back and, unless the answer was read to its end, close the connection: the worker stops."""
        if self._closed:
            return
        self._closed = True
        self.worker.end(self._tokens)
        if self.watched is not None:
            self.watched.close()
        if self.connection is not None:
            self._pool.release(self.worker.url, self.connection)


# What goes wrong on the wire; ``wire_error`` is what the client gets for it.
WIRE_FAULTS = (ConnectFailed, Broken, TimeoutError, EventTooLarge)


def wire_error(leg: Leg, error: Exception, *, reached: bool = True) -> LegError:
    """Return the error that a failed exchange stands for."""
    if isinstance(error, ConnectFailed):
        nobody = NoWorker(leg.step, f"no {leg.role} worker could be reached", headers=_SOON)
        nobody.ailing = True
        return retryable(nobody, reached=False)
    if isinstance(error, TimeoutError):
        return LegTimeout(leg.step, "the worker did not answer in time")
    if isinstance(error, EventTooLarge):
        return LegFailed(leg.step, "the worker's answer is too large, or an event of it is")
    broken = LegFailed(leg.step, "the connection to the worker broke before its answer was whole")
    return retryable(broken, reached=reached)


def earliest(*ends: float | None) -> float | None:
    """Return the first of several points in time, None being never."""
    return min((end for end in ends if end is not None), default=None)


def _error_in(event: bytes, data: bytes) -> Any:
    """Return what an event tells of a failure: its ``error``, or all of it where its name or type says so."""
    named = event_name(event) == "error"
    try:
        body = loads_lenient(data)
    except JSONDecodeError:
        return data.decode("utf-8", "replace") if named else None
    if isinstance(body, dict):
        if error := body.get("error"):
            return error
        named = named or body.get("type") == "error"
    return (body or "no word of why") if named else None
