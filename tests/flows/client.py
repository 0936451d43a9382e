"""A client that sees every byte of an answer: whole, or piece by piece while it comes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from multidict import CIMultiDict

from tests.bounds import HANG_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence


@dataclass
class Got:
    """An answer that was read to its end.

    Attributes:
        raw: the body, without its framing.
        whole: the framing says that the body is complete; a broken chunked body is not.
    """

    status: int
    headers: CIMultiDict[str]
    raw: bytes
    whole: bool

    @property
    def body(self) -> Any:
        return json.loads(self.raw)

    @property
    def error(self) -> Any:
        return self.body["error"]

    @property
    def blocks(self) -> list[bytes]:
        """The raw events and comments of a stream, without their blank lines; half of one at the end included."""
        return [block for block in self.raw.split(b"\n\n") if block]

    @property
    def events(self) -> list[Any]:
        """The data of each event, parsed; ``[DONE]`` as a string."""
        return [data for block in self.blocks for data in _data(block)]

    @property
    def chunks(self) -> list[Any]:
        return [event for event in self.events if isinstance(event, dict)]

    @property
    def text(self) -> str:
        """What the model said: of a chat answer, whole or streamed, choice 0."""
        if self.headers["Content-Type"].startswith("application/json"):
            return self.body["choices"][0]["message"]["content"] or ""
        choices = [choice for chunk in self.chunks for choice in chunk.get("choices", ())]
        return "".join(choice["delta"].get("content") or "" for choice in choices if choice["index"] == 0)


def _data(block: bytes) -> list[Any]:
    lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
    return [line.decode() if line == b"[DONE]" else json.loads(line) for line in lines]


class Live:
    """An answer under way, on a connection of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.whole = False
        self.raw = b""
        self._reader = reader
        self._writer = writer
        self._left: int | None = None
        self._eof = False
        self._seen = 0

    async def head(self) -> None:
        """Wait for the status line and the headers."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")[:-2]
        self.status = int(first.split(" ")[1])
        self.headers = CIMultiDict(line.split(": ", 1) for line in lines)
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            length = self.headers.get("Content-Length")
            self._left = int(length) if length is not None else -1

    async def read(self) -> bytes:
        """Return the next piece of the body as it was written; ``b""`` at its end, proper or not."""
        if self._eof:
            return b""
        try:
            piece = await (self._chunk() if self._left is None else self._part())
        except (asyncio.IncompleteReadError, ConnectionError):
            piece, self._eof = b"", True
        self.raw += piece
        return piece

    async def event(self) -> bytes:
        """Return the next event or comment, without its blank line.

        Raises:
            EOFError: the stream ended first.
        """
        while (end := self.raw.find(b"\n\n", self._seen)) < 0:
            if not await self.read():
                raise EOFError(self.raw[self._seen :])
        start, self._seen = self._seen, end + 2
        return self.raw[start:end]

    async def rest(self) -> Got:
        """Read to the end."""
        while await self.read():
            pass
        return Got(self.status, self.headers, self.raw, self.whole)

    async def pull(self, size: int) -> bytes:
        """Return up to so many bytes as they are on the wire, with framing; ``b""`` once the connection is closed."""
        return await self._reader.read(size)

    def cut(self) -> None:
        """Leave, without a word."""
        self._writer.transport.abort()

    def finish(self) -> None:
        """Send a FIN, and go on reading."""
        self._writer.write_eof()

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _chunk(self) -> bytes:
        size = int((await self._reader.readuntil(b"\r\n")).strip(), 16)
        piece = (await self._reader.readexactly(size + 2))[:-2]
        if not piece:
            self._eof = self.whole = True
        return piece

    async def _part(self) -> bytes:
        assert self._left is not None
        piece = await self._reader.read(2**16 if self._left < 0 else self._left)
        if self._left < 0:
            self._eof = self.whole = not piece
        else:
            self._left -= len(piece)
            self.whole = self._left == 0
            self._eof = self.whole or not piece
        return piece


@asynccontextmanager
async def exchange(
    url: str,
    path: str,
    body: Any = None,
    *,
    headers: Sequence[tuple[str, str]] = (),
    method: str = "POST",
    window: int | None = None,
) -> AsyncIterator[Live]:
    """Send one request; leaving the block closes the connection.

    Args:
        window: take so many bytes at most before they are asked for; without it, everything is taken at once.
    """
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    host = url.removeprefix("http://")
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close"]
    if body is not None:
        own = {"Content-Type": "application/json", "Content-Length": str(len(raw))}
        lines += [f"{name}: {value}" for name, value in own.items() if name not in dict(headers)]
    lines += [f"{name}: {value}" for name, value in headers]
    async with asyncio.timeout(HANG_S):
        reader, writer = await _connected(host, window)
        live = Live(reader, writer)
        try:
            writer.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + raw)
            yield live
        finally:
            await live.close()


async def _connected(host: str, window: int | None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    name, _, port = host.partition(":")
    if window is None:
        return await asyncio.open_connection(name, int(port), limit=2**26)
    plug = socket.socket()
    plug.setblocking(False)
    plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    await asyncio.get_running_loop().sock_connect(plug, (name, int(port)))
    return await asyncio.open_connection(sock=plug, limit=window)
