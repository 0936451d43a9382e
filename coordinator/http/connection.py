"""One client's connection: its requests are answered one by one, in their order.

A client that takes nothing of what is written to it is hung up, which frees its workers. The clock runs only while
the transport is over its high-water mark, so a client that keeps up costs nothing, per chunk or otherwise. A head that
does not come to its end is hung up too, and so is a connection that nobody uses. No connection has a timer of its own:
the server looks at all of them, now and then.

A client that is answered before its body was read may still be sending: its connection is closed for it to see, and
what comes until it has seen that is thrown away as it is, neither parsed nor inflated.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

import httptools
from multidict import CIMultiDict

from coordinator.headers import decoded
from coordinator.http.request import Request
from coordinator.http.response import Response
from envelope.errors import ApiError, BadRequest, HeadersTooLarge, NotSupported

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.http.server import Server

# Closed with something unread, a connection is reset, and the client may never read its answer. So what still comes is
# taken for so long in all, or until nothing came for a while. Source: nginx, lingering_close.
_LINGERS_S = 10.0
_SILENT_S = 1.0

# A head may be as large as so many of the largest fields, and have so many of any size.
_LARGEST_FIELDS = 4
_FIELDS = 128

_FRAMING = ("Content-Length", "Transfer-Encoding")
_NO_HTTP = "this is no valid HTTP/1.1 request: "

# So many requests may wait behind the one that is being answered, before the client is stopped.
_WAITING = 16


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a connection may be of no use, in seconds; None is no limit.

    Attributes:
        write_stall_s: over the high-water mark, without a byte taken.
        head_s: from a head's first byte, or from the connection's start, to the head's end; in the TLS handshake.
        idle_s: between two requests.
    """

    write_stall_s: float | None = None
    head_s: float | None = None
    idle_s: float | None = None


class Connection(asyncio.Protocol):
    """One connection.

    Attributes:
        behind: more is written than the client has taken, and what follows should wait.
        given_up: the server stops, and does not wait for what is being answered.
        stalled: the client was hung up because it did not take its answer.
        task: answers a request; None between two of them.
        write: takes bytes for the client; raises ConnectionResetError when that is gone, or hung up. It is the
            transport's own while that is open, since a stream calls it for every chunk.
    """

    __slots__ = (
        "_declining",
        "_discarded_bytes",
        "_drained",
        "_ends_at",
        "_fault",
        "_fields",
        "_head_bytes",
        "_loop",
        "_parser",
        "_paused",
        "_reading",
        "_server",
        "_stalls_at",
        "_standing_bytes",
        "_target",
        "_transport",
        "_unsent",
        "_waiting",
        "behind",
        "given_up",
        "stalled",
        "task",
        "write",
    )

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self.behind = self.given_up = self.stalled = False
        self._server = server
        self._loop = loop
        self._transport: asyncio.Transport = None  # type: ignore[assignment]  # set before anything else is called
        self.write: Callable[[bytes], None] = _gone
        self._parser = httptools.HttpRequestParser(self)
        self._reading: Request | None = None  # whose body is coming
        self._waiting: deque[Request | ApiError] = deque()
        self.task: asyncio.Task[None] | None = None
        self._target, self._head_bytes = b"", 0
        self._fields: list[tuple[bytes, bytes]] = []
        self._standing_bytes = 0  # in reads that brought no head to its end, and nothing of a body
        self._fault: ApiError | None = None  # nothing more is parsed
        self._paused = self._declining = False
        self._discarded_bytes: int | None = None  # None is while everything is read
        self._ends_at = self._stalls_at = inf
        self._unsent = 0
        self._drained: asyncio.Future[None] | None = None

    # What a response calls.

    @property
    def unsent(self) -> int:
        """How many bytes wait for the client."""
        return self._transport.get_write_buffer_size()

    async def drain(self) -> None:
        if self.behind:
            if self._drained is None:
                self._drained = self._loop.create_future()
            await asyncio.shield(self._drained)
        if self._transport.is_closing():
            raise ConnectionResetError("the client is gone")

    def close(self) -> None:
        """Close behind what was written, if the client takes it; requests that wait are not answered any more."""
        self._waiting.clear()
        if self.unsent:
            self._watch_writing()
        self.write = _gone
        self._transport.close()

    def drop(self) -> None:
        """Close at once on a client that does not take what is written to it, and keep nothing for it."""
        self.stalled = True
        self._abort()

    # What a body calls.

    def pause_reading(self) -> None:
        if not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._paused and len(self._waiting) < _WAITING and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    # What the server calls.

    def look(self, now: float) -> None:
        """Hang up where a time is over."""
        if now >= self._ends_at:
            self._abort()
        elif now >= self._stalls_at:
            # What is unsent may also have grown, until the writer met the mark: that is no sign of a stall either.
            if self.unsent == self._unsent:
                self.drop()
            else:
                self._watch_writing()

    def give_up(self) -> asyncio.Task[None] | None:
        """Stop answering; return the task that is being stopped."""
        self.given_up = True
        if self.task is not None:
            self.task.cancel()
        self.close()
        return self.task

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # a stream's; uvloop's is no subclass of asyncio's
        self.write = self._transport.write
        self._server.connections.add(self)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        if self._discarded_bytes is not None:
            self._discarded_bytes += len(data)
            return
        try:
            while data and self._fault is None:
                data = self._read(data)
        except httptools.HttpParserError as error:
            self._end_reading(_fault_of(error))
        except ApiError as fault:
            self._end_reading(fault)

    def _read(self, data: bytes) -> bytes:
        """Parse some bytes; return those behind a head that offers another protocol."""
        self._standing_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline_upgrade()
            return data[offer.args[0] :]
        self._check_head_size(self._standing_bytes)
        return b""

    def eof_received(self) -> None:
        self.write = _gone  # the transport closes itself now

    def connection_lost(self, error: Exception | None) -> None:
        self.write = _gone
        self._server.connections.discard(self)
        self._ends_at = self._stalls_at = inf
        self._waiting.clear()
        self._parser = None  # type: ignore[assignment]  # it has this: a cycle, and nothing more will be parsed
        gone = ConnectionResetError("the client is gone")
        if self._reading is not None:
            self._reading.body.fail(gone)
        if self.task is not None:
            self.task.cancel()
        self.resume_writing()

    def pause_writing(self) -> None:
        self.behind = True
        self._watch_writing()

    def resume_writing(self) -> None:
        self.behind = False
        if not self._transport.is_closing():
            self._stalls_at = inf
        if self._drained is not None:
            self._drained.set_result(None)
            self._drained = None

    # What the parser calls.

    def on_message_begin(self) -> None:
        self._target, self._fields, self._head_bytes = b"", [], 1
        if self.task is None:
            self._wait_for_head()

    def on_url(self, part: bytes) -> None:
        self._target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        self._fields.append((name, value))  # behind the head these are trailers, which nobody reads (RFC 9110, 6.5.1)

    def on_headers_complete(self) -> None:
        self._check_head()
        self._head_bytes = self._standing_bytes = 0
        self._ends_at = inf
        if self._declining:
            return
        parser = self._parser
        if (version := parser.get_http_version()) not in ("1.1", "1.0"):
            raise BadRequest(f"{_NO_HTTP}its version is {version}")
        request = Request(
            self,
            parser.get_method().decode(),
            self._target.decode("utf-8", "surrogateescape"),
            CIMultiDict(decoded(self._fields)),
            http_1_1=version == "1.1",
            keep_alive=parser.should_keep_alive(),
        )
        request.response = Response(request, self)
        _check_framing(request)
        self._reading = request
        if self.task is None:
            self._begin(request)
        else:
            self._waiting.append(request)
            if len(self._waiting) >= _WAITING:
                self.pause_reading()

    def on_body(self, data: bytes) -> None:
        self._standing_bytes = 0
        if self._reading is not None:
            self._reading.body.feed(data)

    def on_message_complete(self) -> None:
        self._head_bytes = self._standing_bytes = 0
        if self._reading is not None and not self._parser.should_upgrade():
            self._reading.body.end()
            self._reading = None

    def _decline_upgrade(self) -> None:
        """Read on in HTTP/1.1, where the parser has stopped at the end of a head that offers another protocol.

        An offer may be ignored (RFC 9110, section 7.8). Java's own client offers HTTP/2 with the first request of each
        connection, and sends the body as if it had not. The new parser is told where that ends.
        """
        assert self._reading is not None, "a head that was refused raises another error"
        headers = self._reading.headers
        framing = "".join(f"{name}: {headers[name]}\r\n" for name in _FRAMING if name in headers)
        self._parser, self._declining = httptools.HttpRequestParser(self), True
        self._parser.feed_data(f"POST / HTTP/1.1\r\n{framing}\r\n".encode())
        self._declining = False

    # How one request follows another.

    def _begin(self, request: Request) -> None:
        request.begun = monotonic()
        self.task = self._loop.create_task(self._answer(request))

    async def _answer(self, request: Request) -> None:
        response = request.response
        try:
            await self._server.answer(request)
            if response.closes and response.ended and not request.body.complete:
                await self._linger()
            elif self.behind and not self._transport.is_closing():  # who takes no answers is given no more of them
                with suppress(ConnectionError):
                    await self.drain()
        finally:
            self.task = None
            self._go_on(response)

    def _go_on(self, response: Response) -> None:
        """Take up the next request, if there is one and the answer before it has come to its end."""
        if self._transport.is_closing():
            return
        if response.closes or not response.ended:
            self.close()
            return
        if self._waiting:
            self._take_up(self._waiting.popleft())
        elif self._fault is not None:
            self.close()
        elif self._head_bytes:
            self._wait_for_head()
        elif self._server.patience.idle_s is not None:
            self._ends_at = self._loop.time() + self._server.patience.idle_s
        self.resume_reading()  # a body that nobody has taken may have stopped it

    def _take_up(self, next_one: Request | ApiError) -> None:
        if isinstance(next_one, Request):
            self._begin(next_one)
        else:
            self.task = self._loop.create_task(self._refuse(next_one))

    async def _refuse(self, fault: ApiError) -> None:
        """Answer what is no request that we could read, and hang up."""
        request = Request(self, "", "", CIMultiDict(decoded(self._fields)), keep_alive=False)
        request.response = Response(request, self)
        try:
            self._server.refuse(request, fault)
            await self._linger()
        finally:
            self.task = None
            self.close()

    def _end_reading(self, fault: ApiError) -> None:
        """Parse nothing more: who is being read gets to know, and whoever would be next."""
        self._fault, self._ends_at = fault, inf
        if self._reading is not None:
            self._reading.body.fail(fault)
            self._reading = None
        elif self.task is None:
            self._take_up(fault)
        else:
            self._waiting.append(fault)

    async def _linger(self) -> None:
        """Close the connection, once the client has stopped sending."""
        transport = self._transport
        if transport.is_closing():
            return
        self._discarded_bytes, seen = 0, -1
        if transport.can_write_eof():
            try:
                transport.write_eof()
            except OSError:  # it has left, and nothing was read that would have told us
                return
        if self._paused:
            self._paused = False
            transport.resume_reading()
        ends_at = self._loop.time() + _LINGERS_S
        while seen != self._discarded_bytes and self._loop.time() < ends_at:
            seen = self._discarded_bytes
            await asyncio.sleep(_SILENT_S)

    # Limits.

    def _abort(self) -> None:
        self.write = _gone
        self._transport.abort()

    def _wait_for_head(self) -> None:
        head_s = self._server.patience.head_s
        self._ends_at = inf if head_s is None else self._loop.time() + head_s

    def _watch_writing(self) -> None:
        stall_s = self._server.patience.write_stall_s
        if stall_s is not None:
            self._unsent, self._stalls_at = self.unsent, self._loop.time() + stall_s

    def _check_head(self) -> None:
        most = self._server.max_field_bytes
        if len(self._fields) > _FIELDS:
            raise HeadersTooLarge(f"the request has more than {_FIELDS} headers")
        if self._head_bytes <= most and len(self._target) <= most:
            return
        if max(len(self._target), *(len(name) + len(value) for name, value in self._fields)) > most:
            raise HeadersTooLarge("the request line or a header is longer than server.max_header_size allows")
        self._check_head_size(self._head_bytes)

    def _check_head_size(self, size: int) -> None:
        """What no field's limit bounds: fields that are many, or do not come to their end; of a trailer too."""
        limit = _LARGEST_FIELDS * self._server.max_field_bytes
        if size > limit:
            raise HeadersTooLarge(f"the head is larger than {limit} bytes")


def _gone(data: bytes) -> None:
    raise ConnectionResetError("the client is gone")


def _check_framing(request: Request) -> None:
    """Refuse what llhttp lets pass, and others may read otherwise.

    Source: RFC 9112, sections 3.2 and 6.1.

    Raises:
        BadRequest, NotSupported.
    """
    hosts = request.headers.getall("Host", ())
    if len(hosts) > 1 or (request.http_1_1 and not hosts):
        raise BadRequest(f"{_NO_HTTP}it has {len(hosts)} Host headers, send one")
    lengths = request.headers.getall("Content-Length", ())
    codings = request.headers.getall("Transfer-Encoding", ())
    if len(lengths) > 1 or (lengths and codings):
        raise BadRequest(f"{_NO_HTTP}send one Content-Length, or Transfer-Encoding and none")
    if codings:
        _check_codings([coding.strip(" \t").lower() for value in codings for coding in value.split(",")], request)


def _check_codings(codings: list[str], request: Request) -> None:
    if codings[-1] != "chunked" or codings.count("chunked") > 1:
        raise BadRequest(f"{_NO_HTTP}Transfer-Encoding must end in chunked, so that the body has an end")
    if len(codings) > 1:
        raise NotSupported("Transfer-Encoding may only be chunked")
    if not request.http_1_1:
        raise BadRequest("HTTP/1.0 has no Transfer-Encoding; send Content-Length")


def _fault_of(error: httptools.HttpParserError) -> ApiError:
    """Return what a request that could not be read gets told; what it held is not repeated."""
    cause = error.__context__
    if isinstance(cause, ApiError):  # raised by us, inside of the parser
        return cause
    return BadRequest(f"{_NO_HTTP}{str(error).partition(chr(10))[0][:200]}")
