"""``coordinator serve`` as a process: how it starts, drains and ends."""

import asyncio
import json
import os
import signal
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import yaml

from coordinator.config import Config
from coordinator.serve import Alone, serve
from tests.bounds import HANG_S
from tests.flows.client import exchange
from tests.flows.conftest import config_tree
from tests.flows.line import Line

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"
COUNTED = ", ".join(map(str, range(1, 21))) + "."


def delta(content):
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": content}}]}).encode() + b"\n\n"


class Process:
    """A coordinator in a process of its own.

    Attributes:
        url: where it listens.
    """

    def __init__(self, process):
        self.url = ""
        self._process = process

    async def listening(self):
        self.url = f"http://{(await self.logs('listening'))['address']}"

    async def logs(self, message):
        """Return the first line from now on that says so."""
        while True:
            line = json.loads(await self._process.stderr.readline())
            if line["message"] == message:
                return line

    def terminate(self):
        self._process.send_signal(signal.SIGTERM)

    async def ended(self):
        """Return the exit code, and what it logged on its way."""
        _, logged = await self._process.communicate()
        return self._process.returncode, [json.loads(line) for line in logged.splitlines()]


@pytest.fixture
def serving(tmp_path):
    """``async with serving(decode_url, shutdown_timeout="10s") as process``"""

    @asynccontextmanager
    async def start(decode_url, **server):
        tree = {
            "server": {"listen_addr": "127.0.0.1:0", "readiness_interval": "50ms", "heartbeat_after": 0, **server},
            "pools": {"decode": {"endpoints": [decode_url]}},
            "pipeline": {"steps": [{"type": "decode"}]},
        }
        path = tmp_path / "pd.yaml"
        path.write_text(yaml.safe_dump(tree))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "coordinator", "serve", "--config", str(path),
            cwd=ROOT, stderr=asyncio.subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if not name.startswith("COORDINATOR_")},
        )  # fmt: skip
        started = Process(process)
        try:
            async with asyncio.timeout(HANG_S):
                await started.listening()
            yield started
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()

    return start


@pytest.fixture
def call(dial):
    """``await call(url, "/readyz")`` is one answer."""

    async def once(url, path, body=None):
        async with dial(url, path, body, method="GET" if body is None else "POST") as live:
            await live.head()
            return await live.rest()

    return once


async def test_a_drain_lets_the_stream_under_way_end_and_takes_no_new_request(
    serving, scripted, dial, call, ask, eventually
):
    """L29: SIGTERM: /readyz 503, /healthz 200, new requests 503 with Retry-After; then exit code 0."""
    gate = asyncio.Event()
    decode = await scripted(scripted.sse(delta("a"), gate, delta("b"), DONE))

    async def status(path):
        return (await call(process.url, path)).status

    async def is_ready(expected):
        return await status("/readyz") == expected

    async with serving(decode.url) as process, dial(process.url, CHAT, ask(stream=True)) as live:
        await eventually(lambda: is_ready(200))
        await live.head()
        assert await live.event() == delta("a").strip()
        process.terminate()
        await eventually(lambda: is_ready(503))
        assert await status("/healthz") == 200
        refused = await call(process.url, CHAT, ask())
        assert (refused.status, refused.headers["Retry-After"], refused.headers["Connection"]) == (503, "1", "close")
        assert "shutting down" in refused.error["message"]
        gate.set()
        got = await live.rest()
        assert (got.whole, got.text, got.events[-1]) == (True, "ab", "[DONE]")
        code, logged = await process.ended()
    assert (code, [line["message"] for line in logged if line["level"] == "error"]) == (0, [])
    assert "stopping with requests unfinished" not in [line["message"] for line in logged]
    assert len(decode.received) == 1


async def test_an_idle_coordinator_ends_at_once(serving, scripted):
    """L29: nothing to wait for."""
    decode = await scripted(scripted.sse(DONE))
    async with serving(decode.url) as process:
        process.terminate()
        async with asyncio.timeout(HANG_S):
            code, _ = await process.ended()
    assert code == 0


async def test_a_drain_has_an_end(serving, scripted, dial, ask, eventually):
    """L29: after ``shutdown_timeout`` the streams that are left are broken off, so that nobody takes them for whole."""
    never = asyncio.Event()
    decode = await scripted(scripted.sse(delta("a"), never))
    async with (
        serving(decode.url, shutdown_timeout="100ms") as process,
        dial(process.url, CHAT, ask(stream=True)) as live,
    ):
        await live.head()
        await live.event()
        process.terminate()
        got = await live.rest()
        assert (got.whole, got.text) == (False, "a")
        code, logged = await process.ended()
    assert code == 0
    assert "stopping with requests unfinished" in [line["message"] for line in logged]
    (told,) = [line for line in logged if line["message"] == "request"]
    assert (told["outcome"], told["status"]) == ("unavailable", 503)  # its client has not left: we have
    await eventually(lambda: not decode.open)


async def test_a_second_signal_ends_the_waiting(serving, scripted, dial, ask, eventually):
    """L29: an operator who has waited long enough; what is left is broken off, and looks broken off."""
    never = asyncio.Event()
    decode = await scripted(scripted.sse(delta("a"), never))
    async with serving(decode.url, shutdown_timeout="1h") as process, dial(process.url, CHAT, ask(stream=True)) as live:
        await live.head()
        await live.event()
        process.terminate()
        await process.logs("draining")
        process.terminate()
        got = await live.rest()
        assert (got.whole, got.text) == (False, "a")
        code, _ = await process.ended()
    assert code == 0
    await eventually(lambda: not decode.open)


async def test_sigterm_under_load_loses_no_request(serving, fleet, dial, ask):
    """L29: of clients that ask again and again, each gets whole answers and then a 503; none gets less than either."""
    fleet.decode.behave.itl_s = 0.002
    answered = asyncio.Event()

    async def ask_until_refused(url, stream):
        got = []
        while not got or got[-1].status == 200:
            async with dial(url, CHAT, ask("Count to 20.", stream=stream)) as live:
                await live.head()
                got.append(await live.rest())
            if len(got) == 3:
                answered.set()
        return got

    async with serving(fleet.decode.url) as process:
        # Keeps the process until all have heard its 503: after that nobody listens any more.
        async with dial(process.url, CHAT, ask("Never stop.", stream=True, max_tokens=3000)) as held:
            await held.head()
            load = [asyncio.create_task(ask_until_refused(process.url, stream)) for stream in [False, True] * 4]
            await answered.wait()
            process.terminate()
            async with asyncio.timeout(HANG_S):
                ends = await asyncio.gather(*load)
            held.cut()
        code, _ = await process.ended()
    assert code == 0
    assert {(got.status, got.whole, got.text) for end in ends for got in end[:-1]} == {(200, True, COUNTED)}
    assert {(end[-1].status, end[-1].headers["Retry-After"]) for end in ends} == {(503, "1")}


class Steered(Alone):
    """Has what it steers, and where that listens."""

    url = ""

    async def begin(self, app, reloader, stops, status):
        self.app, self.stops = app, stops

    async def listening(self, addresses):
        self.url = f"http://{addresses[0]}"

    async def run(self):
        pass


async def test_requests_that_came_before_the_word_to_stop_are_answered(fleet, tmp_path, ask, eventually):
    """Where so many come at once that some have yet to begin."""
    config, steered, line = Config.model_validate(config_tree(fleet, "alone", {}, {})), Steered(""), Line()
    serving = asyncio.create_task(serve(config, "pd.yaml", steered))
    await eventually(lambda: steered.url)
    steered.app.front.turns = line
    async with AsyncExitStack() as stack:
        lives = [await stack.enter_async_context(exchange(steered.url, CHAT, ask())) for _ in range(5)]
        await eventually(lambda: len(line.waiting) == 5)
        steered.stops.put_nowait(None)
        await eventually(lambda: len(line.waiting) == 6 or steered.app.front.draining)
        line.go_on()
        for live in lives:
            await live.head()
            await live.rest()
    assert [live.status for live in lives] == [200] * 5
    await serving
