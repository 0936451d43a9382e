"""aiohttp's server with the manners that a proxy needs towards clients: limits in time, and errors in JSON.

A client that takes nothing of what is written to it is hung up, which frees its workers. The clock runs only while
the transport is over its high-water mark, so a client that keeps up costs nothing, per chunk or otherwise. A head that
does not come to its end is hung up too; its clock runs only on a new connection, and where a head came in pieces.

A client that is answered before its body was read may still be sending: its connection is closed for it to see, and
what comes until it has seen that is thrown away as it is, neither parsed nor inflated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import web
from aiohttp.http import HttpVersion11
from aiohttp.http_exceptions import ContentEncodingError, LineTooLong
from aiohttp.web_protocol import RequestHandler

from coordinator.headers import request_id
from coordinator.logs import log
from envelope.errors import (
    ApiError,
    BadRequest,
    ClientGone,
    HeadersTooLarge,
    InternalError,
    MethodNotAllowed,
    NotSupported,
    UnknownPath,
    UnsupportedMedia,
    error_body,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a connection may be of no use, in seconds; None is no limit.

    Attributes:
        write_stall_s: over the high-water mark, without a byte taken.
        head_s: from a head's first byte, or from the connection's start, to the head's end.
        idle_s: between two requests.
    """

    write_stall_s: float | None = None
    head_s: float | None = None
    idle_s: float | None = None


PATIENCE = web.AppKey("patience", Patience)
# Told of every request that is refused before a route has it: its id, and why. (To mypy, Callable is not a class.)
REFUSED: web.AppKey[Callable[[str, ApiError], None]] = web.AppKey("refused", Callable)  # type: ignore[arg-type]  # no class

_FOR_EVER_S = 1e9  # aiohttp takes 0 for "no second request"

# Closed with something unread, a connection is reset, and the client may never read its answer. So what still comes is
# taken for so long in all, or until nothing came for a while. Source: nginx, lingering_close.
_LINGERS_S = 10.0
_SILENT_S = 1.0

# A head that comes in pieces may be as large as so many of the largest fields.
_FIELDS = 4

_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"X-Request-Id: %s\r\nContent-Length: %d\r\n\r\n"
)


class _Handler(RequestHandler):
    """One connection."""

    __slots__ = (
        "_discarded_bytes",
        "_head_bytes",
        "_head_timer",
        "_max_head_bytes",
        "_patience",
        "_refused",
        "_stall_timer",
        "_unsent",
        "stalled",
    )

    def __init__(self, server: _Server, **kwargs: Any) -> None:
        super().__init__(server, **kwargs)
        self.stalled = False
        self._patience = server.patience
        self._refused = server.refused
        self._max_head_bytes = _FIELDS * self.max_field_size
        self._head_bytes = 0
        self._discarded_bytes: int | None = None  # None is while everything is read
        self._stall_timer: asyncio.TimerHandle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._unsent = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._watch_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_watching_writing()
        self._stop_watching_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._discarded_bytes is not None:
            self._discarded_bytes += len(data)
            return
        heads = self._request_count
        super().data_received(data)
        if self._request_count != heads:
            self._head_bytes = 0
            self._stop_watching_head()
        elif self._waiter is not None and not self._waiter.done():  # a piece of a head
            self._head_bytes += len(data)
            if self._head_bytes > self._max_head_bytes:
                self._refuse_head()
            elif self._head_timer is None:
                self._watch_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching_writing()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Write the answer; of a body that is left unread then, aiohttp would inflate the rest to throw it away."""
        unread = not request.content.is_eof()
        if unread and "Content-Encoding" in request.headers:
            resp.force_close()
        done = await super().finish_response(request, resp, start_time)
        if unread and not resp.keep_alive:
            await self._linger()
        return done

    async def _linger(self) -> None:
        """Close the connection, once the client has stopped sending."""
        transport = self.transport
        if transport is None:
            return
        self._discarded_bytes, seen = 0, -1
        if transport.can_write_eof():
            transport.write_eof()
        if not transport.is_closing():
            transport.resume_reading()
        ends_at = self._loop.time() + _LINGERS_S
        while seen != self._discarded_bytes and self._loop.time() < ends_at:
            seen = self._discarded_bytes
            await asyncio.sleep(_SILENT_S)
        self.force_close()

    def _watch_head(self) -> None:
        if self._patience.head_s is not None:
            self._head_timer = self._loop.call_later(self._patience.head_s, self._head_is_late)

    def _stop_watching_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        self.force_close()

    def _refuse_head(self) -> None:
        """Answer a head that is too large as a whole, which aiohttp has no limit for, and hang up."""
        if self.transport is not None:
            new_id = request_id(None)
            error = HeadersTooLarge(f"the head is larger than {self._max_head_bytes} bytes")
            body = error_body(error, new_id)
            self._refused(new_id, error)
            self.transport.write(_TOO_LARGE % (new_id.encode(), len(body)) + body)
        self.force_close()

    def _watch_writing(self) -> None:
        if self._patience.write_stall_s is not None and self.transport is not None:
            self._unsent = self.transport.get_write_buffer_size()
            self._stall_timer = self._loop.call_later(self._patience.write_stall_s, self._look_at_writing)

    def _stop_watching_writing(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _look_at_writing(self) -> None:
        self._stall_timer = None
        if self.transport is None:
            return
        # What is unsent may also have grown, until the writer met the mark: that is no sign of a stall either.
        if self.transport.get_write_buffer_size() != self._unsent:
            self._watch_writing()
            return
        self.stalled = True
        self.transport.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Tell of requests that are no HTTP, or too much of it, in JSON; aiohttp's own text is for people."""
        if status == 500:
            return super().handle_error(request, status, exc, message)
        response = _error_response(_malformed(exc, message), request, self._refused)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """Tell of faults, and not of bodies that cannot be read: their client has been told, and may send many."""
        if not isinstance(kwargs.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kwargs)


def stalled(request: web.Request) -> bool:
    """Say whether the client was hung up because it took nothing."""
    return bool(getattr(request.protocol, "stalled", False))


def _malformed(exc: BaseException | None, message: str | None) -> ApiError:
    """Return what a request that could not be read gets told; what it held is not repeated."""
    if isinstance(exc, LineTooLong):
        return HeadersTooLarge("the request line or a header is longer than server.max_header_size allows")
    if isinstance(exc, ContentEncodingError):  # aiohttp's parser meets it before a route does
        return UnsupportedMedia("this Content-Encoding is not understood; send gzip, deflate, or none")
    reason = (message or "").partition("\n")[0].rstrip(": ")[:200]
    if reason.startswith("Too many headers"):
        return HeadersTooLarge("the request has more headers than are taken")
    return BadRequest(f"this is no valid HTTP/1.1 request: {reason or 'unreadable'}")


class _Server(web.Server):
    patience: Patience
    refused: Callable[[str, ApiError], None]

    def __call__(self) -> RequestHandler:
        return _Handler(self, loop=self._loop, **self._kwargs)


class Runner(web.AppRunner):
    """Runs an application; how patient it is with connections, the application says (``PATIENCE``)."""

    def __init__(self, app: web.Application, max_header_size: int) -> None:
        self._patience = app.get(PATIENCE, Patience())
        self._refused = app.get(REFUSED, _untold)
        super().__init__(
            app,
            access_log=None,
            handle_signals=False,
            handler_cancellation=True,  # a client that leaves frees its workers
            keepalive_timeout=self._patience.idle_s or _FOR_EVER_S,
            max_line_size=max_header_size,
            max_field_size=max_header_size,
            shutdown_timeout=0.5,  # draining is done before, by ``serve``
        )

    async def _make_server(self) -> Any:
        server: Any = await super()._make_server()
        server.__class__ = _Server  # aiohttp has no public way to choose the request handler's class
        server.patience = self._patience
        server.refused = self._refused
        return server


@web.middleware
async def json_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Give aiohttp's own 404 and 405 an OpenAI error body, and refuse framings that others may read otherwise."""
    try:
        if "Transfer-Encoding" in request.headers:
            _check_coding(request)
        return await handler(request)
    except ClientGone as gone:  # it left while it was told of something else, which has been counted
        return web.Response(status=gone.status)  # never written: the connection is closed
    except ApiError as told:
        error = told
    except web.HTTPMethodNotAllowed as refused:
        allowed = ", ".join(sorted(refused.allowed_methods))
        error = MethodNotAllowed(f"{request.path} takes {allowed}, not {request.method}", headers={"Allow": allowed})
    except web.HTTPNotFound:
        error = UnknownPath(f"{request.path} is not served here")
    except Exception:
        log.exception("%s failed by a fault of the coordinator", request.path)
        error = InternalError("the coordinator failed; its log has the details")
    return _error_response(error, request, request.app.get(REFUSED, _untold))


def _check_coding(request: web.Request) -> None:
    """Refuse a transfer coding beside chunked, which aiohttp leaves in the body, and any before HTTP/1.1.

    Source: RFC 9112, section 6.1.

    Raises:
        BadRequest, NotSupported.
    """
    if request.version < HttpVersion11:
        raise BadRequest("HTTP/1.0 has no Transfer-Encoding; send Content-Length", headers=_CLOSE)
    if request.headers["Transfer-Encoding"].strip().lower() != "chunked":
        raise NotSupported("Transfer-Encoding may only be chunked", headers=_CLOSE)


_CLOSE = {"Connection": "close"}


def _untold(request_id: str, error: ApiError) -> None:
    """Stand for the recorder where there is none: the simulated workers run on this listener too."""


def _error_response(
    error: ApiError, request: web.BaseRequest, refused: Callable[[str, ApiError], None]
) -> web.Response:
    client_id = request_id(request.headers.get("X-Request-Id"))
    refused(client_id, error)
    headers = {"Content-Type": "application/json", "X-Request-Id": client_id, **error.headers}
    response = web.Response(status=error.status, body=error_body(error, client_id), headers=headers)
    if "Connection" in error.headers:
        response.force_close()
    return response
