"""Another configuration takes the place of the one that runs: under load, as a whole or not at all."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from coordinator import reload
from coordinator.app import build
from coordinator.config import Config, Server, load
from coordinator.reload import AT_START, FileWatch, Reloader, check
from coordinator.serve import Alone, serve
from coordinator.settings.problems import ConfigError
from tests.bounds import HANG_S
from tests.flows.conftest import merged

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from contextlib import AsyncExitStack

    from coordinator.plan import Plan
    from coordinator.telemetry.status import Status

CHAT = "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"
REQUESTS, AT_ONCE = 1000, 16


async def healthy(_request: web.Request) -> web.Response:
    return web.Response()


class Site:
    """A prefill and a decode worker that know one another: what is handed over elsewhere is refused with a 500."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.prefill = self.decode = ""
        self.answered = 0

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        handed = body.get("kv_transfer_params") or {}
        if handed.get("do_remote_decode"):
            who = {"remote_host": "h", "remote_port": 1, "remote_request_id": request.headers["X-Request-Id"]}
            left = {"do_remote_prefill": True, "remote_engine_id": self.name, "remote_block_ids": [[1]], **who}
            first = {"index": 0, "finish_reason": "length"}
            return web.json_response({"choices": [first], "kv_transfer_params": left})
        if handed.get("remote_engine_id") != self.name:
            return web.json_response({"error": {"message": f"{handed} is not of {self.name}"}}, status=500)
        self.answered += 1
        message = {"role": "assistant", "content": self.name}
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})


@pytest.fixture
async def site(stack: AsyncExitStack) -> Callable[[str], Any]:
    async def start(name: str) -> Site:
        made, app = Site(name), web.Application()
        app.router.add_post(CHAT, made.answer)
        app.router.add_get("/health", healthy)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        for _ in range(2):
            await web.TCPSite(runner, "127.0.0.1", 0).start()
        made.prefill, made.decode = (f"http://127.0.0.1:{port}" for _, port in runner.addresses)
        return made

    return start


def tree(*decodes: str, prefill: str | None = None, **changes: Any) -> dict[str, Any]:
    pools: dict[str, Any] = {"decode": {"endpoints": list(decodes), "policy": "least_inflight"}}
    steps = [{"type": "decode"}]
    if prefill:
        pools["prefill"], steps = {"endpoints": [prefill]}, [{"type": "prefill"}, *steps]
    server = {"listen_addr": "127.0.0.1:0", "readiness_interval": "1h", "heartbeat_after": 0}
    return {
        "log_level": "warning",
        "server": {**server, **changes.pop("server", {})},
        "pools": pools,
        "pipeline": {"kv_connector": "kv-nixl", "steps": steps},
        **changes,
    }


class Served:
    """A coordinator that serves the file it is given."""

    def __init__(self, app: web.Application, url: str, path: Path) -> None:
        self.app, self.url, self.path = app, url, path
        self.reloader = Reloader(app, partial(load, str(path), {}))

    def write(self, changed: Any) -> None:
        self.path.write_text(changed if isinstance(changed, str) else yaml.safe_dump(changed))

    async def reload(self, changed: Any) -> str:
        self.write(changed)
        return await self.reloader.reload()

    @property
    def plans(self) -> int:
        """How many plans are not over yet."""
        return len(self.app.plans._running)


@pytest.fixture
def served(stack: AsyncExitStack, tmp_path: Path) -> Callable[[Any], Any]:
    async def start(first: Any) -> Served:
        path = tmp_path / "pd.yaml"
        path.write_text(yaml.safe_dump(first))
        app = build(load(str(path), {}))
        await stack.enter_async_context(app.running())
        await app.server.listen("127.0.0.1", 0)
        at = Served(app, f"http://{app.server.addresses[0]}", path)
        async with asyncio.timeout(HANG_S):
            await app.front.plan.readiness.until_ready()
        return at

    return start


@asynccontextmanager
async def held(at: Served, dial: Any, ask: Any) -> AsyncIterator[Any]:
    """A stream that has begun."""
    async with dial(at.url, CHAT, ask(stream=True)) as live:
        await live.head()
        await live.event()
        yield live


def delta(content: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": content}}]}).encode() + b"\n\n"


async def test_a_thousand_requests_while_the_file_goes_to_and_fro_none_fails_and_none_mixes_plans(
    served: Any, site: Any, ask: Any, eventually: Any
) -> None:
    a, b = await site("a"), await site("b")
    trees = [tree(of.decode, prefill=of.prefill) for of in (a, b)]
    at: Served = await served(trees[0])
    left, statuses, reloads = REQUESTS, list[int](), 0

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            async with session.post(at.url + CHAT, json=ask()) as answer:
                await answer.read()
                statuses.append(answer.status)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        clients = [asyncio.create_task(client(session)) for _ in range(AT_ONCE)]
        while left > 0:
            reloads += 1
            assert await at.reload(trees[reloads % 2]) == "applied"
            await asyncio.sleep(0.05)
        async with asyncio.timeout(HANG_S):
            await asyncio.gather(*clients)
    assert statuses == [200] * REQUESTS
    assert reloads >= 3 and min(a.answered, b.answered) > 0 and a.answered + b.answered == REQUESTS
    await eventually(lambda: at.plans == 1)


async def test_a_request_under_way_ends_on_the_old_plan_which_is_closed_behind_it(
    served: Any, scripted: Any, dial: Any, ask: Any, eventually: Any
) -> None:
    gate = asyncio.Event()
    old, new = (
        await scripted(scripted.sse(delta("old"), gate, delta("!"), DONE)),
        await scripted(scripted.sse(delta("new"), DONE)),
    )
    at: Served = await served(tree(old.url))
    async with held(at, dial, ask) as live:
        assert await at.reload(tree(new.url)) == "applied"
        async with held(at, dial, ask) as later:
            assert (await later.rest()).text == "new"
        assert at.plans == 2
        gate.set()
        got = await live.rest()
        assert (got.whole, got.text) == (True, "old!")
    await eventually(lambda: at.plans == 1)
    assert (len(old.received), len(new.received)) == (1, 1)


async def test_a_worker_that_stays_keeps_the_count_of_its_legs(served: Any, scripted: Any, dial: Any, ask: Any) -> None:
    """The held stream is of the old plan, and the new one sees that its worker is busy."""
    gate = asyncio.Event()
    busy = await scripted(scripted.sse(delta("a"), gate))
    at: Served = await served(tree(busy.url))
    async with held(at, dial, ask):
        free = await scripted(scripted.json({"choices": []}))
        assert await at.reload(tree(busy.url, free.url)) == "applied"
        for _ in range(3):
            async with dial(at.url, CHAT, ask()) as live:
                await live.head()
                assert live.status == 200
        gate.set()
    assert (len(busy.received), len(free.received)) == (1, 3)


async def test_places_that_requests_of_the_old_plan_hold_are_not_given_away_twice(
    served: Any, scripted: Any, dial: Any, ask: Any
) -> None:
    gate = asyncio.Event()
    worker = await scripted(scripted.sse(delta("a"), gate))
    limits = {"max_concurrency": 1, "queue_size": 0}
    at: Served = await served(tree(worker.url, server=limits))
    async with held(at, dial, ask):
        assert await at.reload(tree(worker.url, server={**limits, "read_timeout": "7s"})) == "applied"
        async with dial(at.url, CHAT, ask()) as live:
            await live.head()
            assert live.status == 429
        gate.set()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("pools: [", "pd.yaml: "),
        ({"pipeline": {"steps": [{"type": "decode", "params": {"wrong": 1}}]}}, "steps[0].params.wrong"),
        ({"pipeline": {"steps": [{"type": "prefill"}]}}, "pd.yaml: pipeline.steps"),
        ({"server": {"api_keys": ["file:/nowhere/at/all"]}}, "server.api_keys[0]: /nowhere/at/all"),
        ({"server": {"listen_addr": ":9999"}}, "server.listen_addr: changing it takes a restart"),
    ],
    ids=["no yaml", "unknown key", "no decode", "no key", "restart"],
)
async def test_a_file_that_cannot_be_applied_changes_nothing_and_says_why(
    served: Any, scripted: Any, dial: Any, change: Any, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await scripted(scripted.json({"choices": []}))
    at: Served = await served(tree(worker.url))
    plan = at.app.front.plan
    assert await at.reload(change if isinstance(change, str) else merged(tree(worker.url), change)) == "refused"
    assert told in at.reloader.problems[0] and at.reloader.problems[0] in caplog.text
    assert at.app.front.plan is plan and at.plans == 1
    async with dial(at.url, "/metrics", method="GET") as live:
        await live.head()
        assert 'coordinator_config_reloads_total{result="refused"} 1.0' in (await live.rest()).raw.decode()
    assert await at.reload(tree(worker.url)) == "unchanged"
    assert at.reloader.problems == []


async def test_a_fault_of_ours_in_reading_the_file_ends_nothing(
    served: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await scripted(scripted.json({"choices": []}))
    at: Served = await served(tree(worker.url))

    def breaks() -> Config:
        raise LookupError("a fault")

    with monkeypatch.context() as patched:
        patched.setattr(at.reloader, "_read", breaks)
        assert await at.reloader.reload() == "refused"
    assert at.reloader.problems == [reload.FAULT] and "LookupError: a fault" in caplog.text
    assert await at.reload(tree(worker.url)) == "unchanged"


async def test_the_level_of_the_log_follows_the_file(served: Any, scripted: Any) -> None:
    worker, root = await scripted(scripted.json({"choices": []})), logging.getLogger()
    at: Served = await served(tree(worker.url))
    handlers, level = root.handlers[:], root.level
    try:
        assert await at.reload({**tree(worker.url), "log_level": "debug"}) == "applied"
        assert root.level == logging.DEBUG
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


# Of ``server``: what another plan has, and so what a changed file changes.
APPLIED = {
    *("read_timeout", "write_timeout", "shutdown_timeout", "max_request_body_size", "readiness_interval"),
    *("max_concurrency", "queue_size", "queue_timeout", "heartbeat_after", "heartbeat_interval"),
    *("api_keys", "api_keys_file", "forward_authorization", "metrics_models", "server_timing"),
}


def test_the_docs_name_what_needs_a_restart() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "processes.md").read_text()
    (line,) = [line for line in docs.splitlines() if line.startswith("What the listeners were made with")]
    assert set(re.findall(r"`([a-z_]+)`", line)) == {*AT_START, "tracing", "server"}


def test_every_key_of_the_server_is_applied_or_refused() -> None:
    """A new key says which of the two it is: one that is passed over would be told as applied."""
    assert {*AT_START} | APPLIED == Server.model_fields.keys()
    assert not {*AT_START} & APPLIED


@pytest.mark.parametrize("key", AT_START)
def test_what_only_a_restart_changes_is_named(key: str) -> None:
    before = Config.model_validate(tree("http://127.0.0.1:1"))
    server = before.server.model_copy(update={key: object()})
    with pytest.raises(ConfigError, match=f"server.{key}: changing it takes a restart"):
        check(before, before.model_copy(update={"server": server}))


def test_tracing_begins_and_ends_with_the_process() -> None:
    before = Config.model_validate(tree("http://127.0.0.1:1"))
    with pytest.raises(ConfigError, match="tracing: changing it takes a restart"):
        check(before, before.model_copy(update={"tracing": True}))


def test_a_file_that_is_swapped_is_seen_once(tmp_path: Path) -> None:
    path = tmp_path / "pd.yaml"
    path.write_text("a")
    file = FileWatch(str(path))
    assert not file.changed()
    path.write_text("ab")
    assert file.changed() and not file.changed()
    path.unlink()
    assert file.changed() and not file.changed()


@pytest.fixture
def call(dial: Any) -> Callable[..., Any]:
    """``await call(url, CHAT, body)`` is one answer."""

    async def once(url: str, path: str, body: Any) -> Any:
        async with dial(url, path, body) as live:
            await live.head()
            return await live.rest()

    return once


async def test_a_single_process_applies_the_file_on_sighup_and_when_it_changes(
    scripted: Any, call: Any, ask: Any, tmp_path: Path, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``coordinator serve`` runs, with the environment's overrides each time."""
    monkeypatch.setattr(reload, "_LOOK_EVERY_S", 0.02)
    monkeypatch.setenv("COORDINATOR_SERVER_MAX_REQUEST_BODY_SIZE", "3")
    workers = [await scripted(scripted.json({"of": name})) for name in "abc"]
    path = tmp_path / "pd.yaml"
    steered = Steered(str(path))

    async def answered_by(name: str) -> bool:
        return (await call(steered.url, CHAT, ask())).body["of"] == name

    def write(worker: Any, watch: bool) -> None:
        path.write_text(yaml.safe_dump(tree(worker.url, config={"watch": watch})))

    write(workers[0], watch=False)
    serving = asyncio.create_task(serve(load(str(path), os.environ), str(path), steered))
    try:
        await eventually(lambda: steered.url)
        write(workers[1], watch=True)
        assert await answered_by("a")
        os.kill(os.getpid(), signal.SIGHUP)
        await eventually(lambda: answered_by("b"))
        write(workers[2], watch=True)
        await eventually(lambda: answered_by("c"))
        assert steered.plan.config.server.max_request_body_size == 3
    finally:
        steered.stops.put_nowait(None)
        await serving


class Steered(Alone):
    """Tells where it listens, and can be stopped."""

    url = ""

    async def begin(self, app: web.Application, reloader: Reloader, stops: asyncio.Queue[None], status: Status) -> None:
        self.app, self.stops = app, stops
        await super().begin(app, reloader, stops, status)

    async def listening(self, addresses: Sequence[str]) -> None:
        self.url = f"http://{addresses[0]}"

    @property
    def plan(self) -> Plan:
        return self.app.front.plan
