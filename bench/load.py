"""The load: many requests at a time over raw connections, and what they saw, as one JSON object on standard output.

Modes:
    unary   whole answers, each connection asks again as soon as it was answered.
    stream  the same with streams: time to the first token, and the latency of every chunk from the time that
            ``fake_worker`` wrote into it.
    burst   all connections at once, each a new one with one stream, several times over.
    idle    opens streams that stay silent after their first token, and holds them until standard input is closed.

Every answer is checked: its status, and that each token of it came. Times are those of the monotonic clock, which the
workers use as well. The generator's own share of a core is part of the result, since a busy generator measures itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import httptools

from bench.proctree import ProcessTree

STAMP = re.compile(rb"@(\d{19})@")
SILENT_US = 3_600_000_000
WORDS = (
    'The proxy reads "messages", counts to 128\nand says: naïve café, 東京, ok. '
    "A prompt is mostly plain words with some punctuation; code { x = [1, 2]; } too.\t"
)


def chat_body(prompt_bytes: int, tokens: int, pace_us: int, stream: bool) -> bytes:
    """Return a chat request; a long prompt is a conversation of messages of 2 KB."""
    messages, left = [], prompt_bytes
    while left > 0:
        size = min(left, 2048)
        text = "".join(islice(cycle(WORDS), len(messages) % 61, len(messages) % 61 + size))
        messages.append({"role": "assistant" if len(messages) % 2 else "user", "content": text})
        left -= len(text.encode())
    body: dict[str, Any] = {"model": "tiny", "messages": messages, "temperature": 0.5, "max_tokens": tokens}
    body["seed"] = pace_us
    if stream:
        body["stream"] = True
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def http_request(port: int, body: bytes) -> bytes:
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUser-Agent: bench\r\nAccept: */*\r\n"
        f"Authorization: Bearer sk-bench\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@dataclass
class Marks:
    """The proxy's CPU time and memory at certain counts of chunks, all streams together."""

    tree: ProcessTree | None
    counts: list[int]
    cpu_ns: list[int] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)

    def passed(self, chunks: int) -> None:
        while self.tree is not None and self.counts and chunks >= self.counts[0]:
            self.counts.pop(0)
            self.cpu_ns.append(self.tree.cpu_ns())
            self.rss_bytes.append(self.tree.rss_bytes())


@dataclass
class Tally:
    """What all connections saw; times in nanoseconds."""

    marks: Marks
    ok: int = 0
    errors: list[str] = field(default_factory=list)
    chunks: int = 0
    reads: int = 0
    first_token: list[int] = field(default_factory=list)
    chunk: list[int] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)

    def report(self, wall_s: float, busy_s: float, proxy_cpu_ns: int) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "errors": len(self.errors),
            "error": self.errors[0] if self.errors else None,
            "wall_s": round(wall_s, 3),
            "per_s": round(self.ok / wall_s, 1),
            "chunks": self.chunks,
            "chunks_per_read": round(self.chunks / self.reads, 2) if self.reads else None,
            "request_ms": quantiles(self.whole, 1e6),
            "first_token_ms": quantiles(self.first_token, 1e6),
            "chunk_us": quantiles(self.chunk, 1e3),
            "proxy_cpu_ns": proxy_cpu_ns,
            "marks_cpu_ns": self.marks.cpu_ns,
            "marks_rss_mib": round(max(self.marks.rss_bytes, default=0) / 2**20, 2),
            "generator_busy": round(busy_s / wall_s, 2),
        }


def quantiles(values: list[int], unit: float) -> dict[str, float] | None:
    if not values:
        return None
    values.sort()
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: round(values[min(int(len(values) * q), len(values) - 1)] / unit, 3) for name, q in at.items()}


class Client(asyncio.Protocol):
    """One connection, one exchange at a time."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._over.set_result(None)
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.usable = False

    async def ask(self, request: bytes, began: int | None = None) -> None:
        """Send a request and see its answer to the end."""
        await self._wait(self.send(request, began))

    async def open(self, request: bytes) -> None:
        """Send a request and wait for its first token."""
        self.send(request)
        await self._wait(self._opened)

    def send(self, request: bytes, began: int | None = None) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        self._tally, self._tokens, self._stream = self._load.tally, self._load.tokens, self._load.stream
        self._over, self._opened = loop.create_future(), loop.create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._chunks, self._seen, self._tail = 0, 0, b""
        self._done = self._word = False
        self._began = time.monotonic_ns() if began is None else began
        self._transport.write(request)
        return self._over

    async def _wait(self, future: asyncio.Future[None]) -> None:
        try:
            await future
        except (OSError, httptools.HttpParserError) as error:
            self.close()
            self._tally.errors.append(f"{type(error).__name__}: {error}")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]  # a stream's
        self.usable = True

    def connection_lost(self, error: Exception | None) -> None:
        self.usable = False
        self._fail(error or ConnectionError("the connection was closed before the answer was whole"))

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic_ns()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(error)

    def on_body(self, data: bytes) -> None:
        self._seen += len(data)
        self._word = self._word or b"word" in data
        # A stamp may be cut in two where one read ends and the next begins.
        data = self._tail + data
        end = 0
        for found in STAMP.finditer(data):
            end = found.end()
            if self._chunks == 0:
                self._tally.first_token.append(self._now - self._began)
                if not self._opened.done():
                    self._opened.set_result(None)
            self._chunks += 1
            self._tally.chunks += 1
            self._tally.chunk.append(self._now - int(found[1]))
        if end:
            self._tally.reads += 1
            self._tally.marks.passed(self._tally.chunks)
        self._done = self._done or b"[DONE]" in data
        self._tail = data[max(end, len(data) - 200) :]

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        whole = self._chunks == self._tokens and self._done if self._stream else self._word
        if status == 200 and whole:
            self._tally.ok += 1
            self._tally.whole.append(self._now - self._began)
        else:
            got = f"{self._chunks} of {self._tokens} tokens, {self._seen} bytes"
            self._tally.errors.append(f"status {status}, {got}: {self._tail[:160]!r}")
        self.usable = self.usable and self._parser.should_keep_alive()
        if not self._over.done():
            self._over.set_result(None)

    def close(self) -> None:
        self.usable = False
        self._transport.abort()

    def _fail(self, error: Exception) -> None:
        for future in (self._over, self._opened):
            if not future.done():
                future.set_exception(error)
                future.exception()  # only one of the two is waited for


class Load:
    """A load against one port."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.stream = options.mode != "unary"
        self.tokens = options.tokens
        self.tree = ProcessTree(options.watch) if options.watch else None
        self.tally = Tally(Marks(None, []))
        self.clients: list[Client] = []

    async def run(self) -> dict[str, Any]:
        """Warm up, and measure what comes then."""
        options = self.options
        began, busy, cpu_ns = time.monotonic(), time.process_time(), self._cpu_ns()
        work = {"unary": self.closed_loop, "stream": self.closed_loop, "burst": self.bursts, "idle": self.idle}
        pace_us = SILENT_US if options.mode == "idle" else options.pace_us
        request = self._request(options.tokens, pace_us)
        try:
            async with asyncio.timeout(options.timeout_s):
                if options.warm:
                    await self.warm_up(options.warm)
                self.tokens = options.tokens
                marks = [int(count) for count in options.marks.split(",") if count]
                self.tally = Tally(Marks(self.tree, marks))
                began, busy, cpu_ns = time.monotonic(), time.process_time(), self._cpu_ns()
                await work[options.mode](request, options.requests, options.connections)
        except TimeoutError:
            self.tally.errors.append(f"not done after {options.timeout_s:g} s")
        wall_s, busy_s = time.monotonic() - began, time.process_time() - busy
        await asyncio.sleep(0.02)  # what a proxy does after its answer, such as a log line, is its price too
        return self.tally.report(wall_s, busy_s, self._cpu_ns() - cpu_ns)

    async def warm_up(self, requests: int) -> None:
        """Ask a little of the same kind, and keep the connections; errors are not told, they will come again."""
        self.tokens = self.options.tokens if self.options.mode == "unary" else 5
        await self.closed_loop(self._request(self.tokens, 1_000), requests, min(self.options.connections, requests))
        if self.options.mode in ("burst", "idle"):
            for client in self.clients:
                client.close()

    def _request(self, tokens: int, pace_us: int) -> bytes:
        body = chat_body(self.options.prompt_bytes, tokens, pace_us, self.stream)
        return http_request(self.options.port, body)

    def _cpu_ns(self) -> int:
        return 0 if self.tree is None else self.tree.cpu_ns()

    async def connect(self) -> Client | None:
        loop = asyncio.get_running_loop()
        try:
            _, client = await loop.create_connection(lambda: Client(self), "127.0.0.1", self.options.port)
        except OSError as error:
            self.tally.errors.append(f"no connection: {error}")
            return None
        return client

    async def closed_loop(self, request: bytes, requests: int, connections: int) -> None:
        """Send requests over so many connections, each the next one as soon as it was answered."""
        left = requests
        idle, self.clients = [client for client in self.clients if client.usable], []

        async def ask() -> None:
            nonlocal left
            client = idle.pop() if idle else None
            while left > 0:
                left -= 1
                client = client if client is not None and client.usable else await self.connect()
                if client is not None:
                    await client.ask(request)
            if client is not None and client.usable:
                self.clients.append(client)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(connections):
                tasks.create_task(ask())

    async def bursts(self, request: bytes, requests: int, connections: int) -> None:
        """Open all connections at once and send a request over each, until all were sent."""

        async def one() -> None:
            began = time.monotonic_ns()
            client = await self.connect()
            if client is not None:
                await client.ask(request, began)
                client.close()

        for _ in range(max(requests // connections, 1)):
            async with asyncio.TaskGroup() as tasks:
                for _ in range(connections):
                    tasks.create_task(one())
            await asyncio.sleep(0.05)

    async def idle(self, request: bytes, requests: int, connections: int) -> None:
        """Open streams, 32 at a time; say how many there are, and hold them until standard input is closed."""
        clients: list[Client] = []
        left = connections
        ends_at = time.monotonic() + self.options.open_s

        async def opening() -> None:
            nonlocal left
            while left > 0 and time.monotonic() < ends_at:
                left -= 1
                client = await self.connect()
                if client is not None:
                    clients.append(client)
                    await client.open(request)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(32):
                tasks.create_task(opening())
        print(json.dumps({"open": sum(client.usable for client in clients)}), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        for client in clients:
            client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("mode", choices=["unary", "stream", "burst", "idle"])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--requests", type=int, default=16, help="in all; ignored by idle")
    parser.add_argument("--tokens", type=int, default=50)
    parser.add_argument("--pace-us", type=int, default=0, help="between tokens of a stream")
    parser.add_argument("--prompt-bytes", type=int, default=600)
    parser.add_argument(
        "--watch", type=int, default=0, metavar="PID", help="leader of the session whose CPU time is told"
    )
    parser.add_argument("--marks", default="", help="counts of chunks at which the proxy's CPU time is noted")
    parser.add_argument("--warm", type=int, default=0, metavar="N", help="requests before those that count")
    parser.add_argument("--open-s", type=float, default=30.0, help="idle opens no more streams after this")
    parser.add_argument("--timeout-s", type=float, default=60.0)
    options = parser.parse_args()

    import uvloop

    print(json.dumps(uvloop.run(Load(options).run())))


if __name__ == "__main__":
    main()
