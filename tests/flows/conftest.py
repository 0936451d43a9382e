"""A whole fleet per test: simulated workers, the coordinator in front of them, and a client that sees every byte.

All of it on loopback, with the server settings of ``coordinator serve``. What a test leaves behind is checked for it
when it ends: nothing in flight, no breach of the hand-over protocol, no KV that nobody fetched. A test that must
leave something says so with ``excuse(what, reason)``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.app import App, build
from coordinator.config import Config
from coordinator.sim import Received, SimFleet, SimWorker
from coordinator.workers import release
from coordinator.workers.capability import MODE_QUESTION
from tests.bounds import HANG_S
from tests.flows.client import Got, exchange
from tests.flows.scripted import Scripted, Scripts

POLL_S = 0.005

ORDER = (
    "replace-media-urls",
    "render",
    "conditional-decode",
    "encode",
    "prefill",
    "decode",
    "prefill-decode",
    "derender",
)

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


class Running:
    """One coordinator that is listening.

    Attributes:
        url: without a trailing slash.
        front: what answers the requests.
    """

    def __init__(self, app: App, config: Config, stop: Callable[[], Awaitable[None]]) -> None:
        self.app = app
        self.stop = stop
        self.config = config
        self.url = f"http://{app.server.addresses[0]}"
        self.front = app.front
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

    async def metrics(self, begin: str = "") -> dict[str, float]:
        """Return the samples of /metrics whose names begin so, by ``name{label="value",..}`` with the labels sorted."""
        lines = (await self.get("/metrics")).raw.decode().split("\n")
        page = "\n".join(line for line in lines if line.startswith(begin))  # to parse all of it takes long
        samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
        return {_sample_name(sample.name, sample.labels): sample.value for sample in samples}

    async def count(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of that name which have these labels."""
        found = await self.metrics(name)
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(
            value for key, value in found.items() if key.split("{")[0] == name and all(part in key for part in wanted)
        )

    def in_flight(self) -> dict[str, int]:
        """Return what is being worked on: requests, and legs by worker."""
        return {name: count for name, count in {"requests": self.front.in_flight, **self._legs()}.items() if count}

    def unsent(self) -> int:
        """Return how many bytes wait in memory for clients to take them."""
        return sum(connection.unsent for connection in self.app.server.connections)

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
        "server": {"listen_addr": "127.0.0.1:0", "readiness_interval": "1h", "heartbeat_after": 0},
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


async def poll(true: Callable[[], Any]) -> Any:
    """Wait until something is true, and return it; what it last was is in the failure."""
    loop = asyncio.get_running_loop()
    until = loop.time() + HANG_S
    while True:
        value = true()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value
        assert loop.time() < until, f"still {value!r} after {HANG_S} s"
        await asyncio.sleep(POLL_S)


@pytest.fixture
def eventually() -> Callable[..., Awaitable[Any]]:
    """``await eventually(lambda: ..)`` waits until it is true."""
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
def wanted(legs: Callable[[SimWorker], list[Received]]) -> Callable[[SimWorker], list[Received]]:
    """``wanted(worker)`` are its legs without those that only free what prefill holds, which come at any time."""

    def of(worker: SimWorker) -> list[Received]:
        return [leg for leg in legs(worker) if "-release" not in (leg.header("X-Request-Id") or "")]

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
    own = await stack.enter_async_context(AsyncExitStack())
    await own.enter_async_context(app.running())
    await app.server.listen("127.0.0.1", 0, backlog=2048)
    if ready:
        async with asyncio.timeout(HANG_S):
            await app.front.plan.readiness.until_ready()
    return Running(app, config, own.aclose)


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
        assert not any((await at.metrics("coordinator_requests_in_flight")).values())


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
