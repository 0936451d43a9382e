"""A client's end of one connection, in memory: bytes in, bytes out, and nothing on the wire."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

from multidict import CIMultiDict

from coordinator.http.connection import Connection, Patience
from coordinator.http.request import Request
from coordinator.http.server import Server

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from envelope.errors import ApiError


class Transport:
    """What a connection writes to.

    Attributes:
        written: all of it, in one piece.
        waiting: bytes that the client has yet to take.
    """

    def __init__(self) -> None:
        self.written = b""
        self.waiting = 0
        self.closing = self.aborted = self.paused = self.half_closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = self.aborted = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.half_closed = True

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


class Peer:
    """A client of a server whose one route notes each request and answers with its body.

    Attributes:
        seen: method, target, headers and body of each request that reached the route.
        refused: what was told of those that did not.
    """

    def __init__(
        self,
        answer: Callable[[Request], Awaitable[None]] | None = None,
        patience: Patience | None = None,
        **limits: int,
    ) -> None:
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []
        self.refused: list[ApiError] = []
        route = answer or self._echo
        self.server = Server(
            {"/": {"GET": route, "POST": route}},
            patience=patience or Patience(),
            refused=lambda _, error: self.refused.append(error),
            **limits,
        )
        self.transport = Transport()
        self.connection = Connection(self.server, asyncio.get_running_loop())
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]  # the part of one that is used

    async def _echo(self, request: Request) -> None:
        body = b"".join([part async for part in request.body.parts()])
        self.seen.append((request.method, request.target, dict(request.headers), body))
        request.response.whole(200, (), body)

    async def send(self, data: bytes) -> None:
        """Send, as far as the connection reads, and let what follows from it happen."""
        if not self.transport.closing:
            self.connection.data_received(data)
        for _ in range(6):
            await asyncio.sleep(0)

    @property
    def answers(self) -> list[int]:
        """The statuses of what was written."""
        return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", self.transport.written)]


def asked(headers: Mapping[str, str] | Iterable[tuple[str, str]], method: str = "POST", **framing: Any) -> Request:
    """Return a request that came with these headers, on no connection."""
    return Request(None, method, "/", CIMultiDict(headers), **framing)  # type: ignore[arg-type]  # nothing is read
