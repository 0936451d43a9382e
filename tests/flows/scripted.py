"""Workers that say exactly what a test tells them, write by write."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from multidict import CIMultiDict

if TYPE_CHECKING:
    from contextlib import AsyncExitStack


@dataclass
class Scripted:
    """A worker that says exactly what it is told, write by write.

    Attributes:
        answers: one list of writes per request, in turn; the last one is said again and again.
        received: head and body of each request.
        connections: how many there have been.
        reads_bodies: also those of more than 1 MiB.
        written: bytes of answers that sockets have taken, but for what one write buffer holds.
    """

    answers: list[list[Any]]
    url: str = ""
    received: list[tuple[CIMultiDict[str], Any]] = field(default_factory=list)
    reads_bodies: bool = True
    connections: int = 0
    written: int = 0
    _tasks: dict[asyncio.Task[Any], asyncio.StreamReader] = field(default_factory=dict)

    CUT = "cut"
    END = "end"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = reader
        try:
            while await self._one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            del self._tasks[task]
            writer.close()

    @property
    def open(self) -> int:
        """How many connections the other side holds open."""
        return sum(not reader.at_eof() for reader in self._tasks.values())

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        if not head[0].startswith(("GET /", "POST /")):
            return False  # the rest of a body that was not read
        headers = CIMultiDict(line.split(": ", 1) for line in head[1:-2])
        large = int(headers.get("Content-Length", 0)) > 2**20
        unread = large and not self.reads_bodies
        raw = b"" if unread else await reader.readexactly(int(headers.get("Content-Length", 0)))
        if head[0].startswith("GET "):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")  # /health
            return True
        if raw == b"{}":  # readiness asks whether the route is there
            writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            return True
        self.received.append((headers, json.loads(raw) if raw else None))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        for item in answer:
            if isinstance(item, bytes):
                writer.write(item)
                await writer.drain()
                self.written += len(item)
                await asyncio.sleep(0)  # so that the next write is a read of its own
            elif isinstance(item, float):
                await asyncio.sleep(item)
            elif isinstance(item, asyncio.Event):
                await item.wait()
            elif item == self.CUT:
                writer.transport.abort()
                return False
            elif item == self.END:
                return False
        return True


class Scripts:
    """Starts scripted workers: ``await scripted(scripted.sse(b"data: ..", ..))``."""

    CUT = Scripted.CUT
    END = Scripted.END

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def __call__(self, *answers: list[Any]) -> Scripted:
        worker = Scripted(list(answers))
        server = await asyncio.start_server(worker.serve, "127.0.0.1", 0, limit=2**26)
        self._stack.push_async_callback(worker.stop)
        self._stack.callback(server.close)
        worker.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return worker

    @staticmethod
    def sse(*items: Any, head: str = "", content_type: str = "text/event-stream") -> list[Any]:
        """Frame a stream: bytes become a chunk each; ``CUT`` and events stand where they stand; else a clean end."""
        first = f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\n{head}Transfer-Encoding: chunked\r\n\r\n"
        framed = [b"%x\r\n%s\r\n" % (len(item), item) if isinstance(item, bytes) else item for item in items]
        ended = items and items[-1] in (Scripted.CUT, Scripted.END)
        return [first.encode(), *framed, *([] if ended else [b"0\r\n\r\n"])]

    @staticmethod
    def json(body: Any, status: int = 200, head: str = "", content_type: str = "application/json") -> list[Any]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        first = f"HTTP/1.1 {status} X\r\nContent-Type: {content_type}\r\n{head}Content-Length: {len(raw)}\r\n\r\n"
        return [first.encode() + raw]
