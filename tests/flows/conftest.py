"""A whole fleet per test: simulated workers, the coordinator in front of them, and a client that sees every byte.

All of it on loopback, with the server settings of ``coordinator serve``. What a test leaves behind is checked for it
when it ends: nothing in flight, no breach of the hand-over protocol, no KV that nobody fetched. A test that must
leave something says so with ``excuse(what, reason)``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from multidict import CIMultiDict
from prometheus_client.parser import text_string_to_metric_families

from coordinator import release
from coordinator.app import FRONT, build
from coordinator.capability import MODE_QUESTION
from coordinator.config import Config
from coordinator.listener import Runner
from coordinator.sim import Received, SimFleet, SimWorker

BOUND_S = 30.0
POLL_S = 0.005

ORDER = ("replace-media-urls", "render", "conditional-decode", "encode", "prefill", "decode", "prefill-decode")

# Steps and their params; ``use_openai_format`` is what the pipeline section says.
SHAPES: dict[str, tuple[bool, dict[str, dict[str, Any]]]] = {
    "openai": (True, {"prefill": {}, "decode": {}}),
    "text": (False, {"render": {}, "prefill": {}, "decode": {"output_mode": "text", "wrap": "all"}}),
    "derender": (False, {"render": {}, "prefill": {}, "decode": {"output_mode": "derender", "wrap": "all"}}),
    "unwrapped": (False, {"render": {}, "prefill": {}, "decode": {"output_mode": "text"}}),
    "alone": (True, {"decode": {}}),
    "pair": (True, {"prefill-decode": {}}),
    "pair-text": (False, {"render": {}, "prefill-decode": {"output_mode": "text", "wrap": "all"}}),
}


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
    async with asyncio.timeout(BOUND_S):
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


class Running:
    """One coordinator that is listening.

    Attributes:
        url: without a trailing slash.
        front: what answers the requests.
    """

    def __init__(self, runner: Runner, app: web.Application, config: Config) -> None:
        host, port, *_ = runner.addresses[0]
        url = f"http://{host}:{port}"
        self._runner = runner
        self.config = config
        self.url = url
        self.front = app[FRONT]
        self.upstream = self.front.plan.upstream

    def open(self, path: str, body: Any = None, **options: Any) -> Any:
        """Send a request and look at its answer while it comes: ``async with at.open(..) as live``.

        Nothing is waited for: call ``await live.head()`` first.
        """
        return exchange(self.url, path, body, **options)

    async def post(self, path: str, body: Any, *headers: tuple[str, str]) -> Got:
        async with exchange(self.url, path, body, headers=headers) as live:
            await live.head()
            return await live.rest()

    async def get(self, path: str, *headers: tuple[str, str]) -> Got:
        async with exchange(self.url, path, headers=headers, method="GET") as live:
            await live.head()
            return await live.rest()

    async def chat(self, text: str = "Say hello.", *headers: tuple[str, str], **fields: Any) -> Got:
        """Ask a chat question; thinking is off unless the fields say otherwise."""
        return await self.post("/v1/chat/completions", chat(text, **fields), *headers)

    async def metrics(self) -> dict[str, float]:
        """Return every sample of /metrics, by ``name{label="value",..}`` with the labels sorted."""
        page = (await self.get("/metrics")).raw.decode()
        samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
        return {_sample_name(sample.name, sample.labels): sample.value for sample in samples}

    async def count(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of that name which have these labels."""
        found = await self.metrics()
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(
            value for key, value in found.items() if key.split("{")[0] == name and all(part in key for part in wanted)
        )

    def in_flight(self) -> dict[str, int]:
        """Return what is being worked on: requests, and legs by worker."""
        return {name: count for name, count in {"requests": self.front.in_flight, **self._legs()}.items() if count}

    def unsent(self) -> int:
        """Return how many bytes wait in memory for clients to take them."""
        assert self._runner.server is not None
        transports = [protocol.transport for protocol in self._runner.server.connections]
        return sum(transport.get_write_buffer_size() for transport in transports if transport is not None)

    def _legs(self) -> dict[str, int]:
        legs: dict[str, int] = {}
        for role, link in self.upstream.links.items():
            workers = getattr(link.router, "_workers", None)
            named = list(workers.values()) if isinstance(workers, Mapping) else list(link.router.known())
            legs |= {f"{role} {worker.url}": worker.in_flight for worker in named}
        return legs


def chat(text: str = "Say hello.", **fields: Any) -> dict[str, Any]:
    thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **thinking, **fields}


def _sample_name(name: str, labels: Mapping[str, str]) -> str:
    inside = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
    return f"{name}{{{inside}}}" if inside else name


def merged(tree: Any, change: Any) -> Any:
    """Return a tree with another one laid over it; None takes a key out."""
    if not isinstance(tree, dict) or not isinstance(change, dict):
        return change
    whole = {**tree, **{key: merged(tree.get(key), value) for key, value in change.items()}}
    return {key: value for key, value in whole.items() if value is not None}


def config_tree(fleet: SimFleet, shape: str, steps: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    openai, own = SHAPES[shape]
    params = merged(own, dict(steps))
    if "render" in params and "tokenizer" not in params["render"]:
        params["render"] = {"address": fleet.render.url, **params["render"]}
    pools: dict[str, Any] = {"decode": {"endpoints": [worker.url for worker in fleet.decodes]}}
    if "prefill" in params or "prefill-decode" in params:
        pools["prefill"] = {"endpoints": [worker.url for worker in fleet.prefills]}
    if "prefill-decode" in params:
        servers = [worker.bootstrap for worker in fleet.prefills]
        pools["prefill"]["bootstrap_port"] = [server.port if server else 8998 for server in servers]
    if "encode" in params:
        pools["encode"] = {"endpoints": [worker.url for worker in fleet.encodes]}
    tree = {
        "server": {"listen_addr": "127.0.0.1:0", "readiness_interval": "10s", "heartbeat_after": 0},
        "pools": pools,
        "pipeline": {
            "kv_connector": f"kv-{fleet.prefill.settings.kv}" if fleet.prefills else "kv-nixl",
            "ec_connector": "ec-nixl",
            "use_openai_format": openai,
            "steps": [{"type": kind, "params": params[kind]} for kind in ORDER if kind in params],
        },
    }
    return merged(tree, dict(changes))


@dataclass
class Excuses:
    """What a test leaves behind on purpose."""

    reasons: dict[str, str] = field(default_factory=dict)

    def __call__(self, what: str, reason: str) -> None:
        assert what in ("violations", "unread", "in_flight"), what
        self.reasons[what] = reason


async def poll(true: Callable[[], Any], within_s: float = 3.0) -> Any:
    """Wait until something is true, and return it; what it last was is in the failure."""
    loop = asyncio.get_running_loop()
    until = loop.time() + within_s
    while True:
        value = true()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value
        assert loop.time() < until, f"still {value!r} after {within_s} s"
        await asyncio.sleep(POLL_S)


@pytest.fixture
def eventually() -> Callable[..., Awaitable[Any]]:
    """``await eventually(lambda: ..)`` waits until it is true, for 3 s at most."""
    return poll


@pytest.fixture
def ask() -> Callable[..., dict[str, Any]]:
    """``ask("Say hello.", stream=True)`` is the body of a chat request."""
    return chat


@pytest.fixture
def dial() -> Callable[..., Any]:
    """``async with dial(url, path, body) as live``: one request to whatever listens there."""
    return exchange


@pytest.fixture
def legs() -> Callable[[SimWorker], list[Received]]:
    """``legs(worker)`` are the requests that a worker got, without those that ask what it can do."""

    def of(worker: SimWorker) -> list[Received]:
        return [one for one in worker.received if one.method == "POST" and one.body not in ({}, MODE_QUESTION)]

    return of


@pytest.fixture
def excuse() -> Excuses:
    return Excuses()


@pytest.fixture
async def stack(excuse: Excuses) -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def fleet_of(stack: AsyncExitStack, excuse: Excuses) -> AsyncIterator[Callable[..., Awaitable[SimFleet]]]:
    """``await fleet_of(prefills=2, ..)`` starts a fleet; the test's end looks at what it left."""
    fleets: list[SimFleet] = []

    async def start(**settings: Any) -> SimFleet:
        fleets.append(await stack.enter_async_context(SimFleet(**settings)))
        return fleets[-1]

    yield start
    for fleet in fleets:
        if "in_flight" not in excuse.reasons:
            await poll(lambda fleet=fleet: not any(w.in_flight or w.core.running for w in fleet.workers))
        if "violations" not in excuse.reasons:
            assert fleet.store.violations == []
            assert fleet.encodings.violations == []
            assert fleet.pairs.violations == []
        if "unread" not in excuse.reasons:
            # What a request left is fetched when it is over, by a leg of its own.
            with contextlib.suppress(AssertionError):
                await poll(lambda fleet=fleet: not fleet.store.unread)
            assert fleet.store.unread == {}
            with contextlib.suppress(AssertionError):
                await poll(lambda fleet=fleet: not (fleet.pairs.unsent or fleet.pairs.stranded))
            assert (fleet.pairs.unsent, fleet.pairs.stranded) == ({}, set())


@pytest.fixture
async def fleet(fleet_of: Callable[..., Awaitable[SimFleet]]) -> SimFleet:
    """One render, one prefill and one decode worker."""
    return await fleet_of()


@pytest.fixture(autouse=True)
def hasty_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hand-over that could not be released is tried again at once: nobody here has two seconds."""
    monkeypatch.setattr(release, "_AGAIN_AFTER_S", (0.01, 0.02))


async def listening(stack: AsyncExitStack, config: Config, *, ready: bool = True) -> Running:
    """Start the coordinator of a configuration, which ends with the stack; ``ready`` waits until it is."""
    app = build(config)
    runner = Runner(app, config.server.max_header_size)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=2048).start()
    if ready:
        async with asyncio.timeout(BOUND_S):
            await app[FRONT].plan.readiness.until_ready()
    return Running(runner, app, config)


@pytest.fixture
async def coordinator(
    fleet_of: Any, stack: AsyncExitStack, excuse: Excuses
) -> AsyncIterator[Callable[..., Awaitable[Running]]]:
    """``await coordinator(fleet, "text", steps={"decode": {..}}, server={..})`` starts one and waits until it is ready.

    Shapes: ``openai``, ``text``, ``derender``, ``unwrapped``, ``alone`` (decode only), ``pair`` and ``pair-text`` (both
    legs at once; the fleet says by what). ``steps`` changes or adds steps
    by type; every other keyword is a section of the file, laid over the shape's own. None takes a key out.
    """
    running: list[Running] = []

    async def start(
        fleet: SimFleet,
        shape: str = "openai",
        *,
        steps: Mapping[str, Any] | None = None,
        ready: bool = True,
        **changes: Any,
    ) -> Running:
        config = Config.model_validate(config_tree(fleet, shape, steps or {}, changes))
        running.append(await listening(stack, config, ready=ready))
        return running[-1]

    yield start
    if "in_flight" in excuse.reasons:
        return
    for at in running:
        await poll(lambda at=at: not at.in_flight())
        gauges = await at.metrics()
        assert not any(value for name, value in gauges.items() if name.startswith("coordinator_requests_in_flight"))


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


@pytest.fixture
def scripted(stack: AsyncExitStack) -> Scripts:
    return Scripts(stack)


@pytest.fixture
def says(coordinator: Any, fleet: SimFleet, scripted: Scripts) -> Callable[..., Awaitable[tuple[Running, Scripted]]]:
    """``at, decode = await says(scripted.sse(..), ..)``: a coordinator whose only decode worker is a scripted one.

    There is no prefill step, so that nothing is left for a decode that never reads it.
    """

    async def start(*answers: list[Any], shape: str = "alone", **changes: Any) -> tuple[Running, Scripted]:
        decode = await scripted(*answers)
        steps = merged({"prefill": None}, changes.pop("steps", {})) | {"prefill": None}
        at = await coordinator(fleet, shape, steps=steps, pools={"decode": {"endpoints": [decode.url]}}, **changes)
        return at, decode

    return start
