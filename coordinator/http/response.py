"""The answer to one request. Nothing here waits but ``drain``; what is written is the transport's at once."""

from __future__ import annotations

import time
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from coordinator.http.connection import Connection
    from coordinator.http.request import Request

_PHRASES = {status.value: status.phrase for status in HTTPStatus} | {499: "Client Closed Request"}

# Beyond this, head and body are written apart: joining them would copy the body.
_JOIN_UP_TO = 64 * 1024

# What begins a chunk of so many bytes: looked up, since to format it costs more where the caches are cold.
_HEADS = 1024
_CHUNK_HEADS = tuple(b"%x\r\n" % size for size in range(_HEADS))


class Response:
    """Written once: whole, or begun, put and ended.

    It says ``Connection: close``, and the connection is closed behind it, where the client wants that, where the
    request has not come to its end yet, and where ``closes`` was set before.

    Attributes:
        status: 0 until it has begun.
        ended: the client has all of it, or will have.
        written: bytes of it so far.
    """

    __slots__ = (
        "_bodiless",
        "_body",
        "_chunked",
        "_connection",
        "_http_1_1",
        "_keep_alive",
        "_waited_for",
        "closes",
        "ended",
        "status",
        "written",
    )

    def __init__(self, request: Request, connection: Connection) -> None:
        self.status = self.written = 0
        self.ended = self.closes = self._waited_for = False
        # Not the request itself: it has this, and a cycle would keep all that it holds until the collector comes.
        self._body, self._http_1_1, self._keep_alive = request.body, request.http_1_1, request.keep_alive
        self._connection = connection
        self._chunked = False
        self._bodiless = request.method == "HEAD"

    def whole(self, status: int, headers: Iterable[tuple[str, str]], body: bytes) -> None:
        """Write all of it; ``drain`` where it is ``behind``.

        Args:
            headers: without framing.

        Raises:
            ConnectionError: the client is gone.
        """
        head = self._head(status, headers, f"Content-Length: {len(body)}\r\n")
        if self._bodiless:
            body = b""
        self.ended = True
        if len(body) <= _JOIN_UP_TO:
            self._connection.write(head + body)
        else:
            self._connection.write(head)
            self._connection.write(body)
        self.written += len(head) + len(body)

    def begin(self, status: int, headers: Iterable[tuple[str, str]]) -> None:
        """Write the head of an answer whose body comes in pieces.

        Args:
            headers: with Content-Length where that is known; else it is chunked, or ends with the connection.

        Raises:
            ConnectionError: the client is gone.
        """
        headers = list(headers)
        self._bodiless = self._bodiless or status in (204, 304)
        measured = self._bodiless or any(name.lower() == "content-length" for name, _ in headers)
        self._chunked = not measured and self._http_1_1
        if not (measured or self._chunked):
            self.closes = True  # to an HTTP/1.0 client that is the end of the body
        head = self._head(status, headers, "Transfer-Encoding: chunked\r\n" if self._chunked else "")
        self._connection.write(head)
        self.written += len(head)

    def put(self, data: bytes) -> bool:
        """Write a piece; False when the client is behind, and ``drain`` should be awaited before there is more.

        Raises:
            ConnectionError: the client is gone.
        """
        if self._bodiless or not data:
            return True
        connection = self._connection
        if self._chunked:
            size = len(data)
            data = (_CHUNK_HEADS[size] if size < _HEADS else b"%x\r\n" % size) + data + b"\r\n"
        connection.write(data)
        self.written += len(data)
        return not connection.behind

    def end(self) -> None:
        """Say that there is no more.

        Raises:
            ConnectionError: the client is gone.
        """
        self.ended = True
        if self._chunked:
            self._connection.write(b"0\r\n\r\n")
            self.written += 5

    @property
    def behind(self) -> bool:
        """Whether more waits for the client than should."""
        return self._connection.behind

    @property
    def unsent(self) -> bool:
        """Whether the client has yet to take some of it, or somebody waits for it to do so and has more."""
        return self._waited_for or self._connection.unsent > 0

    async def drain(self) -> None:
        """Wait until the client has caught up.

        Raises:
            ConnectionError: the client is gone.
        """
        self._waited_for = True
        try:
            await self._connection.drain()
        finally:
            self._waited_for = False

    def hang_up(self) -> None:
        """Close the connection behind what was written: an answer that has not ended is seen to be broken."""
        self._connection.close()

    def go_on(self) -> None:
        """Let a client send the body that it asked about (``Expect: 100-continue``)."""
        self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _head(self, status: int, headers: Iterable[tuple[str, str]], framing: str) -> bytes:
        self.status = status
        if not self._keep_alive or not self._body.complete:
            self.closes = True
        if self.closes:
            framing += "Connection: close\r\n"
        elif not self._http_1_1:
            framing += "Connection: keep-alive\r\n"
        lines = [f"{name}: {value}\r\n" for name, value in headers]
        lines.append(framing)
        fields = "".join(lines)
        if fields.count("\n") != len(lines) - 1 + framing.count("\n") or "\r" in fields.replace("\r\n", ""):
            raise ValueError("a header's value has a line end in it")
        head = f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\nDate: {_date()}\r\n{fields}\r\n"
        return head.encode("utf-8", "surrogateescape")


class _Dates:
    """The ``Date`` of answers, made once a second. Source: RFC 9110, section 6.6.1."""

    def __init__(self) -> None:
        self._second, self._text = 0, ""

    def __call__(self) -> str:
        second = int(time.time())
        if second != self._second:
            self._second, self._text = second, formatdate(second, usegmt=True)
        return self._text


_date = _Dates()
