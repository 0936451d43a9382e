"""A request from a client: its head, whole when a route sees it, and its body as it comes."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from httptools import HttpParserInvalidURLError, parse_url

from coordinator.inflate import BodyBroken, Inflater

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from multidict import CIMultiDict

    from coordinator.http.connection import Connection
    from coordinator.http.response import Response

# So much of a body may wait for its reader before the client is stopped.
_HIGH_WATER = 256 * 1024


class Body:
    """What follows a head, up to the end that the head's framing gives it.

    Attributes:
        complete: the last byte has come.
    """

    __slots__ = ("_connection", "_error", "_parts", "_size", "_waiter", "complete")

    def __init__(self, connection: Connection) -> None:
        self.complete = False
        self._connection = connection
        self._parts: list[bytes] = []
        self._size = 0
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    # What the connection calls.

    def feed(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        if self._size > _HIGH_WATER:
            self._connection.pause_reading()
        self._wake()

    def end(self) -> None:
        self.complete = True
        self._wake()

    def fail(self, error: Exception) -> None:
        if not self.complete and self._error is None:
            self._error = error
            self._wake()

    # What routes call.

    def take(self) -> bytes:
        """Return what has come and was not taken yet; all of it, where the body is complete."""
        parts = self._parts
        if not parts:
            return b""
        self._parts, self._size = [], 0
        self._connection.resume_reading()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def parts(self, encoding: str = "") -> AsyncIterator[bytes]:
        """Yield the body as it comes.

        Args:
            encoding: of ``inflate.PACKED``, to be undone; "" is none.

        Raises:
            BodyBroken
        """
        read = partial(Inflater(encoding).read, self._next) if encoding else self._next
        while part := await read():
            yield part

    async def _next(self) -> bytes:
        while not self._parts:
            if self.complete:
                return b""
            if self._error is not None:
                raise BodyBroken from self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.take()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Request:
    """One request.

    Attributes:
        target: as it was sent: ``/v1/models?a=b``, or with scheme and host before it.
        path, query: of the target, as they were sent; ``query`` is without its question mark.
        http_1_1: not HTTP/1.0.
        keep_alive: the client will send another request on this connection, if we let it.
        begun: when it was the first on its connection to be answered, monotonic seconds; its turn may come later.
        response: the answer to it.
    """

    __slots__ = (
        "begun",
        "body",
        "connection",
        "headers",
        "http_1_1",
        "keep_alive",
        "method",
        "path",
        "query",
        "response",
        "target",
    )
    begun: float
    response: Response

    def __init__(
        self,
        connection: Connection,
        method: str,
        target: str,
        headers: CIMultiDict[str],
        *,
        http_1_1: bool = True,
        keep_alive: bool = True,
    ) -> None:
        self.connection = connection
        self.method = method
        self.target = target
        self.path, _, self.query = (target if target.startswith("/") else _origin_form(target)).partition("?")
        self.headers = headers
        self.http_1_1 = http_1_1
        self.keep_alive = keep_alive
        self.body = Body(connection)

    @property
    def content_length(self) -> int | None:
        """The length of the body, where the head says it; the parser has seen that it is a number."""
        length = self.headers.get("Content-Length")
        return None if length is None else int(length)

    @property
    def content_type(self) -> str:
        """The media type in lower case, without parameters; "" where there is none."""
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    @property
    def expects_100(self) -> bool:
        # RFC 9110, section 10.1.1: HTTP/1.0 knows no interim answers, and a client of it would take one for the answer.
        return self.http_1_1 and self.headers.get("Expect", "").lower() == "100-continue"

    @property
    def stalled(self) -> bool:
        """Whether the client was hung up because it did not take its answer."""
        return self.connection.stalled

    @property
    def given_up(self) -> bool:
        """Whether the server stops, and did not wait for the answer."""
        return self.connection.given_up


def _origin_form(target: str) -> str:
    """Return path and query of a target in absolute form. Source: RFC 9112, section 3.2.2."""
    if "://" not in target:
        return target
    try:
        url = parse_url(target.encode("utf-8", "surrogateescape"))
    except HttpParserInvalidURLError:
        return target
    path, query = (url.path or b"/").decode("utf-8", "surrogateescape"), url.query
    return path if query is None else f"{path}?{query.decode('utf-8', 'surrogateescape')}"
