"""HTTP/1.1 to workers, on asyncio protocols: the hot module of the program.

A general client pays for what a leg does not need (redirects, cookies, sessions, a stream reader and its queue) with
several times the CPU of the exchange itself. Here a request is one write, and what comes back is parsed by llhttp
(httptools) as it arrives and given on in the same call: to a waiting reader, or straight to a ``push`` function, with
no task switch between a worker's bytes and the client's.

It knows nothing of legs, routing or errors of the API; ``upstream`` and ``call`` do.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httptools
from multidict import CIMultiDict

from coordinator.headers import decoded

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sequence

    from envelope.written import Buffer

# Of the reads in a row that brought nothing of a body: a head, interim ones before it, a chunk's extension, a trailer.
_BARREN_CAP = 256 * 1024

# A reader that lags behind this far stops the socket from being read.
_HIGH_WATER = 256 * 1024

# Beyond this, the head and the body of a request are written apart: joining them would copy the body.
_JOIN_UP_TO = 64 * 1024

# How often what is kept is looked through at least: a worker that has left is not asked again, and may never hang up.
_SWEEP_S = 10.0


class ConnectFailed(Exception):
    """No connection was had; the worker has seen nothing."""


class Broken(Exception):
    """The connection ended, or what came is not HTTP, before the answer was whole."""


class Connection(asyncio.Protocol):
    """One connection to a worker, and the one exchange that is on it.

    Attributes:
        status, headers: of the answer, once ``head`` has returned.
        complete: all of the answer has come; what of it was not taken yet is for ``take``.
        reused: the connection has served an exchange before.
        answered: a byte of the answer has come.
    """

    __slots__ = (
        "_barren_bytes",
        "_error",
        "_fields",
        "_head_done",
        "_keeps",
        "_parser",
        "_parts",
        "_paused",
        "_push",
        "_transport",
        "_waiter",
        "answered",
        "complete",
        "headers",
        "idle_since",
        "loop",
        "on_body",
        "reused",
        "status",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.reused = self.answered = False
        self.complete = True  # nothing has been asked
        self.idle_since = 0.0
        self.loop = loop
        self._transport: asyncio.Transport = None  # type: ignore[assignment]  # set before anybody sees the object
        self._parts: list[bytes] = []
        self.on_body = self._parts.append  # called for each chunk, with no frame of Python
        self._parser = httptools.HttpResponseParser(self)
        self._barren_bytes = 0
        self._fields: list[tuple[bytes, bytes]] = []
        self._head_done = self._keeps = self._paused = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._push: Callable[[bytes], bool] | None = None

    # What ``upstream`` does with it.

    def send(self, head: bytes, *body: Buffer) -> None:
        """Write one request; the answer to the one before must have been read."""
        self.status, self._fields, self._barren_bytes = 0, [], 0
        self._head_done = self.complete = self.answered = False
        if len(body) == 1 and len(body[0]) <= _JOIN_UP_TO:
            self._transport.write(head + body[0])
        else:
            self._transport.write(head)
            for part in body:
                self._transport.write(part)

    async def head(self, ends_at: float | None = None) -> None:
        """Wait for the answer's head, until this time of the loop.

        Raises:
            Broken, TimeoutError
        """
        while not self._head_done:
            await self._wait(ends_at)

    async def read(self, ends_at: float | None = None) -> bytes:
        """Return the next bytes of the body, ``b""`` at its end.

        Raises:
            Broken, TimeoutError
        """
        while not self._parts:
            if self.complete:
                return b""
            await self._wait(ends_at)
        return self.take()

    def take(self) -> bytes:
        """Return what has come of the body and was not given to anybody."""
        parts, self._barren_bytes = self._parts, 0
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return data

    async def push(self, take: Callable[[bytes], bool]) -> bool:
        """Give the body to ``take`` as it comes; True at its end.

        False as soon as ``take`` returns False: reading has stopped, and the next ``push`` (or ``read``) goes on.

        Raises:
            Broken, and whatever ``take`` raises.
        """
        if self._parts and not take(self.take()):
            return False
        self._push = take
        try:
            while not self.complete and self._push is not None:
                await self._wait()
            return self._push is not None
        finally:
            self._push = None

    @property
    def alive(self) -> bool:
        return self._error is None and not self._transport.is_closing()

    @property
    def reusable(self) -> bool:
        """Whether the answer was read to its end, the request was written to its own, and the worker keeps it."""
        return (
            self.complete
            and self._keeps
            and not self._parts
            and self._error is None
            and not self._transport.is_closing()
            and not self._transport.get_write_buffer_size()
        )

    def close(self) -> None:
        self._error = Broken("it was closed")  # what was there may have the whole request in its traceback
        self._transport.abort()

    # What the event loop and the parser call.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # a stream's; uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        if self.complete:
            self._fail(Broken("the worker sent what nobody asked for"))
            return
        self.answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail(Broken("the worker has changed to another protocol, unasked"))
        except httptools.HttpParserError as error:
            self._fail(Broken(f"the answer is not HTTP: {error!r}"))  # what came before it is still given on
        if self._parts:
            self._deliver()
            return
        self._barren_bytes += len(data)
        if self._barren_bytes > _BARREN_CAP:
            self._fail(Broken("the answer's head, or what frames its body, is too large"))
        elif self._head_done:
            self._wake()

    def eof_received(self) -> None:
        self.connection_lost(None)

    def connection_lost(self, error: Exception | None) -> None:
        ended = error is None and self._error is None and self._head_done
        if ended and not self.complete and self._ends_with_connection():
            self.complete = True
        self._parser = None  # type: ignore[assignment]  # it has this: a cycle, and nothing more will be parsed
        self._fail(Broken("the connection ended"))

    def on_message_begin(self) -> None:
        if self.complete:  # a second answer behind the first: the next exchange must not take it for its own
            raise Broken("the worker sent what nobody asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields.append((name, value))  # behind the head these are trailers, which nobody reads (RFC 9110, 6.5.1)

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 100:
            raise Broken("the answer's status is none")
        if status < 200:  # 100 Continue, 103 Early Hints: the answer is still to come
            self._fields.clear()
            return
        self.status, self._head_done, self.headers = status, True, CIMultiDict(decoded(self._fields))

    def on_message_complete(self) -> None:
        self.complete = self._head_done
        self._keeps = self._parser.should_keep_alive()  # only here: the parser forgets it with the message

    # How bytes get from there to here.

    def _deliver(self) -> None:
        if self._push is None:
            self._hold()
            return
        parts, self._barren_bytes = self._parts, 0
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        try:
            if not self._push(data):
                self._push = None
                self._pause()
                self._wake()
            elif self.complete:
                self._wake()
        except Exception as error:
            self.complete = False  # else ``push`` would take the end of the answer for the end of its reading
            self._fail(error)

    def _hold(self) -> None:
        if sum(map(len, self._parts)) > _HIGH_WATER:
            self._pause()
        self._wake()

    def _pause(self) -> None:
        if not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def _ends_with_connection(self) -> bool:
        return "Content-Length" not in self.headers and "Transfer-Encoding" not in self.headers

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        self._transport.close()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self, ends_at: float | None = None) -> None:
        if self._error is not None:
            error, self._error = self._error, Broken("it was closed")
            try:
                raise error
            finally:
                del error  # its traceback has this frame: a cycle
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        self._waiter = waiter = self.loop.create_future()
        # A timer of its own: asyncio.timeout_at costs three times as much, and that for every leg.
        timer = None if ends_at is None else self.loop.call_at(ends_at, _expire, waiter)
        try:
            await waiter
        finally:
            self._waiter = None
            del waiter  # it may have an error, whose traceback has this frame: a cycle
            if timer is not None:
                timer.cancel()


class Pool:
    """Connections to the workers of one role, kept for the next leg: the last one kept is the first to be used again.

    Args:
        idle: most idle connections kept to one worker.
        idle_s: how long one is kept, 0 is for ever.
        tls: for https workers; None is the system's authorities.
    """

    def __init__(self, idle: int, idle_s: float, tls: ssl.SSLContext | None = None) -> None:
        self._idle_cap = idle
        self._idle_s = idle_s
        self._tls = tls
        self._idle: dict[str, deque[Connection]] = {}
        self._sweep_s = min(idle_s or _SWEEP_S, _SWEEP_S)
        self._sweeping: asyncio.TimerHandle | None = None

    def kept(self, origin: str, now: float) -> Connection | None:
        """Return a connection that was kept, if there is one.

        Args:
            origin: base URL.
            now: time of the loop.
        """
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            if self._usable(connection, now):
                connection.reused = True
                return connection
            connection.close()
        return None

    async def acquire(
        self, origin: str, connect_s: float | None, *, fresh: bool = False, ends_at: float | None = None
    ) -> Connection:
        """Return a connection to a worker, kept or new.

        Args:
            fresh: take none that was kept.
            ends_at: time of the loop by which there must be one.

        Raises:
            ConnectFailed, TimeoutError
        """
        if not fresh and (connection := self.kept(origin, asyncio.get_running_loop().time())) is not None:
            return connection
        async with asyncio.timeout_at(ends_at):
            return await self._connect(origin, connect_s)

    def release(self, origin: str, connection: Connection) -> None:
        """Take a connection back: keep it when its exchange is over and it can serve another, else close it."""
        if (idle := self._idle.get(origin)) is None:
            idle = self._idle[origin] = deque()
        if self._sweeping is None:
            self._sweeping = connection.loop.call_later(self._sweep_s, self._sweep, connection.loop)
        now = connection.loop.time()
        self._drop(idle, now)
        if connection.reusable and len(idle) < self._idle_cap:
            connection.idle_since = now
            idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
        for idle in self._idle.values():
            for connection in idle:
                connection.close()
        self._idle.clear()

    def _usable(self, connection: Connection, now: float) -> bool:
        return connection.alive and (not self._idle_s or now - connection.idle_since < self._idle_s)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close what has been kept for too long, whether anybody asks these workers again or not."""
        now = loop.time()
        for origin, idle in list(self._idle.items()):
            self._drop(idle, now)
            if not idle:
                del self._idle[origin]
        self._sweeping = loop.call_later(self._sweep_s, self._sweep, loop) if self._idle else None

    def _drop(self, idle: deque[Connection], now: float) -> None:
        """Close those whose time is over: nobody may ever come to them."""
        while idle and not self._usable(idle[0], now):
            idle.popleft().close()

    async def _connect(self, origin: str, connect_s: float | None) -> Connection:
        loop, url = asyncio.get_running_loop(), urlsplit(origin)
        tls = (self._tls or True) if url.scheme == "https" else None
        port = url.port or (443 if tls else 80)
        try:
            async with asyncio.timeout(connect_s):
                make = loop.create_connection(lambda: Connection(loop), str(url.hostname), port, ssl=tls)
                _, connection = await make
        except (OSError, TimeoutError) as error:
            raise ConnectFailed(str(error)) from error
        return connection


def _expire(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError())


def request_head(method: str, origin: str, path: str, headers: Sequence[tuple[str, str]], length: int | None) -> bytes:
    """Return the head of a request, framing included.

    Args:
        length: bytes of the JSON body, or None for a request without one.
    """
    lines = [f"{method} {path} HTTP/1.1\r\nHost: {origin.partition('://')[2]}"]
    lines += [f"{name}: {value}" for name, value in headers]
    if length is not None:
        lines.append(f"Content-Type: application/json\r\nContent-Length: {length}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "surrogateescape")
