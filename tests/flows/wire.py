"""HTTP by hand, for requests that no client library would send: bytes to a port, and the answers one by one."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tests.bounds import HANG_S
from tests.flows.client import Got, Live

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Wire:
    """One connection, kept open."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, *parts: bytes) -> None:
        self._writer.write(b"".join(parts))
        await self._writer.drain()

    async def answer(self, *, bodiless: bool = False) -> Got:
        """Return the next answer, which may be a 1xx.

        Args:
            bodiless: no body follows whatever the head says, as after HEAD and in every 1xx.
        """
        live = Live(self._reader, self._writer)
        await live.head()
        if bodiless or live.status < 200:
            return Got(live.status, live.headers, b"", whole=True)
        return await live.rest()

    async def is_closed(self) -> bool:
        """Say that the other side has hung up; waits for it."""
        try:
            return await self._reader.read(1) == b""
        except ConnectionError:
            return True


@asynccontextmanager
async def connect(url: str) -> AsyncIterator[Wire]:
    host, _, port = url.removeprefix("http://").partition(":")
    async with asyncio.timeout(HANG_S):
        reader, writer = await asyncio.open_connection(host, int(port), limit=2**22)
        try:
            yield Wire(reader, writer)
        finally:
            writer.transport.abort()


def head(path: str, *headers: str, method: str = "POST", version: str = "1.1") -> bytes:
    """Return a request's head. ``Host`` is there; everything else stands in ``headers``."""
    return "\r\n".join((f"{method} {path} HTTP/{version}", "Host: here", *headers, "", "")).encode("latin-1")


def post(path: str, raw: bytes, *headers: str, version: str = "1.1") -> bytes:
    """Return a whole POST of a JSON body."""
    own = ("Content-Type: application/json", f"Content-Length: {len(raw)}")
    return head(path, *own, *headers, version=version) + raw


def chunked(*parts: bytes) -> bytes:
    """Frame a body in chunks, with its end."""
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
