"""``server.workers``: several processes on one port, as operators run them: real processes, signals and sockets."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.bounds import HANG_S
from tests.flows.conftest import merged
from tests.flows.wire import connect, head

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"
ENV = {name: value for name, value in os.environ.items() if not name.startswith("COORDINATOR_")}


def delta(content: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": content}}]}).encode() + b"\n\n"


def tree(decode: str, **changes: Any) -> dict[str, Any]:
    whole = {
        "server": {"listen_addr": "127.0.0.1:0", "workers": 2, "heartbeat_after": 0},
        "pools": {"decode": {"endpoints": [decode]}},
        "pipeline": {"steps": [{"type": "decode"}]},
    }
    return dict(merged(whole, changes))


class Group:
    """A supervisor and its processes.

    Attributes:
        url: where they listen.
        logged: what they have logged until now.
    """

    def __init__(self, program: asyncio.subprocess.Process) -> None:
        self.url = ""
        self.logged: list[dict[str, Any]] = []
        self._program = program
        self.pid = program.pid

    async def until(self, message: str) -> dict[str, Any]:
        """Read the log up to a line whose message has these words."""
        assert self._program.stderr is not None
        async with asyncio.timeout(HANG_S):
            while True:
                raw = await self._program.stderr.readline()
                assert raw, self.logged
                line = json.loads(raw)
                self.logged.append(line)
                if message in line["message"]:
                    return line

    def said(self, message: str) -> int:
        """Return how many lines until now have these words."""
        return sum(message in line["message"] for line in self.logged)

    def signal(self, number: int, *pids: int) -> None:
        for pid in pids or (self.pid,):
            os.kill(pid, number)

    def processes(self) -> list[int]:
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def connections(self, pid: int) -> int:
        """Return how many clients a process is connected to."""
        port = f":{int(self.url.rpartition(':')[2]):04X}"
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        ends = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(port) and row[3] == "01"}
        return sum(os.readlink(fd) in ends for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink())

    async def ended(self) -> int:
        """Return the exit code."""
        async with asyncio.timeout(HANG_S):
            _, rest = await self._program.communicate()
        self.logged += [json.loads(line) for line in rest.splitlines()]
        assert self._program.returncode is not None
        return self._program.returncode

    def kill(self) -> None:
        if self._program.returncode is None:
            for pid in (self.pid, *self.processes()):
                os.kill(pid, signal.SIGKILL)


@asynccontextmanager
async def started(*words: str) -> AsyncIterator[Group]:
    program = await asyncio.create_subprocess_exec(
        sys.executable, *words, cwd=ROOT, stderr=asyncio.subprocess.PIPE, env=ENV, start_new_session=True
    )
    group = Group(program)
    try:
        yield group
    finally:
        group.kill()
        await program.communicate()


@pytest.fixture
def serving(tmp_path: Path) -> Callable[..., Any]:
    """``async with serving(tree) as group``: all processes listen; the file is ``tmp_path / "pd.yaml"``."""

    @asynccontextmanager
    async def start(configured: dict[str, Any]) -> AsyncIterator[Group]:
        path = tmp_path / "pd.yaml"
        path.write_text(yaml.safe_dump(configured))
        async with started("-m", "coordinator", "serve", "--config", str(path)) as group:
            group.url = f"http://{(await group.until('listening'))['address']}"
            yield group

    return start


@pytest.fixture
def call(dial: Any) -> Callable[..., Any]:
    """``await call(url, "/readyz")`` is one answer, over a connection of its own."""

    async def once(url: str, path: str, body: Any = None) -> Any:
        async with dial(url, path, body, method="GET" if body is None else "POST") as live:
            await live.head()
            return await live.rest()

    return once


@pytest.fixture
def counted(call: Any) -> Callable[..., Any]:
    """``await counted(url, "coordinator_requests_total")`` is the sum of its samples, by whichever process is asked."""

    async def count(url: str, name: str, **labels: str) -> float:
        families = text_string_to_metric_families((await call(url, "/metrics")).raw.decode())
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    return count


async def open_streams(stack: AsyncExitStack, dial: Any, url: str, ask: Any, count: int) -> list[Any]:
    """Open streams that have begun."""
    streams = [await stack.enter_async_context(dial(url, CHAT, ask(stream=True))) for _ in range(count)]
    for live in streams:
        await live.head()
        assert await live.event() == delta("a").strip()
    return streams


async def on_all(group: Group, dial: Any, ask: Any, stack: AsyncExitStack, each: int = 2) -> list[Any]:
    """Open streams until every process has some."""
    streams: list[Any] = []
    while min(map(group.connections, group.processes())) < each:
        streams += await open_streams(stack, dial, group.url, ask, 4)
        assert len(streams) < 100
    return streams


async def test_all_answer_and_their_metrics_are_one_page_whichever_is_asked(
    serving: Any, scripted: Any, dial: Any, call: Any, counted: Any, ask: Any
) -> None:
    gate = asyncio.Event()
    decode = await scripted(scripted.sse(delta("a"), gate, DONE))
    async with serving(tree(decode.url, server={"workers": 3})) as group, AsyncExitStack() as stack:
        assert len(group.processes()) == 3
        streams = await on_all(group, dial, ask, stack)
        for _ in range(8):
            assert await counted(group.url, "coordinator_requests_in_flight") == len(streams)
        gate.set()
        assert all([(await live.rest()).whole for live in streams])
        for _ in range(8):
            assert await counted(group.url, "coordinator_requests_total", outcome="ok") == len(streams)
            assert await counted(group.url, "coordinator_request_seconds_count") == len(streams)
        group.signal(signal.SIGTERM)
        assert await group.ended() == 0


@pytest.mark.parametrize("workers", [1, 2])
async def test_with_the_code_in_huge_pages_all_is_as_it_was(
    serving: Any, scripted: Any, call: Any, ask: Any, workers: int
) -> None:
    """Whether the host has them or not, which the log says; processes that are forked have what was moved before."""
    decode = await scripted(scripted.sse(delta("a"), DONE))
    async with serving(tree(decode.url, server={"workers": workers, "huge_pages": True})) as group:
        assert group.said("the interpreter's code is in huge pages") + group.said("no huge pages") == 1
        for _ in range(8):
            assert (await call(group.url, CHAT, ask(stream=True))).whole
        group.signal(signal.SIGTERM)
        assert await group.ended() == 0


FEW_FILES = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
os.execv(sys.executable, [sys.executable, "-m", "coordinator", "serve", "--config", sys.argv[1]])
"""


@pytest.mark.parametrize("workers", [1, 2])
async def test_as_many_connections_are_taken_as_the_system_allows(tmp_path: Path, workers: int) -> None:
    """And not as few as the shell that started it had set."""
    path = tmp_path / "pd.yaml"
    path.write_text(yaml.safe_dump(tree("http://127.0.0.1:9", server={"workers": workers})))
    async with started("-c", FEW_FILES, str(path)) as group, AsyncExitStack() as stack:
        url = f"http://{(await group.until('listening'))['address']}"
        wires = [await stack.enter_async_context(connect(url)) for _ in range(200)]
        for wire in wires:
            await wire.send(head("/healthz", method="GET"))
        assert {(await wire.answer()).status for wire in wires} == {200}


async def test_a_process_that_is_killed_takes_its_own_streams_and_no_count_and_is_replaced(
    serving: Any, scripted: Any, dial: Any, counted: Any, ask: Any, eventually: Any, unused_tcp_port: int
) -> None:
    gate, metrics = asyncio.Event(), f"http://127.0.0.1:{unused_tcp_port}"
    gate.set()
    decode = await scripted(scripted.sse(delta("a"), gate, DONE))
    own_port = {"metrics_port": unused_tcp_port}
    async with serving(tree(decode.url, server=own_port)) as group, AsyncExitStack() as stack:
        done = await open_streams(stack, dial, group.url, ask, 8)
        assert all([(await live.rest()).whole for live in done])
        gate.clear()
        held = await on_all(group, dial, ask, stack)
        assert await counted(metrics, "coordinator_requests_total") == 8
        first, second = group.processes()
        lost = group.connections(first)
        group.signal(signal.SIGKILL, first)
        told = (await group.until("was killed by SIGKILL"))["message"]
        assert f"(pid {first})" in told and "another is started" in told
        gate.set()
        ends = [(await live.rest()).whole for live in held]
        assert ends.count(False) == lost and ends.count(True) > 0
        await eventually(lambda: len(group.processes()) == 2)
        assert second in group.processes() and first not in group.processes()
        # No less than before: a sum that falls is taken for a restart.
        assert await counted(metrics, "coordinator_requests_total", outcome="ok") == 8 + ends.count(True)
        assert await counted(metrics, "coordinator_process_restarts_total") == 1
        assert await counted(metrics, "coordinator_requests_in_flight") == 0


async def test_a_drain_lets_every_stream_of_every_process_end(
    serving: Any, scripted: Any, dial: Any, call: Any, ask: Any, eventually: Any
) -> None:
    """A terminal signals every process of its group, and systemd every one of a unit: that is one word to drain."""
    gate = asyncio.Event()
    decode = await scripted(scripted.sse(delta("a"), gate, delta("b"), DONE))

    async def not_ready() -> bool:
        return [(await call(group.url, "/readyz")).status for _ in range(6)] == [503] * 6

    async with serving(tree(decode.url)) as group, AsyncExitStack() as stack:
        streams = await on_all(group, dial, ask, stack)
        os.killpg(group.pid, signal.SIGINT)
        group.signal(signal.SIGTERM, *group.processes())
        await eventually(not_ready)
        refused = await call(group.url, CHAT, ask())
        assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
        gate.set()
        got = [await live.rest() for live in streams]
        assert [(one.whole, one.text) for one in got] == [(True, "ab")] * len(streams)
        assert await group.ended() == 0
    assert [line["message"] for line in group.logged if line["level"] == "error"] == []


async def test_processes_whose_supervisor_is_gone_drain_and_end(
    serving: Any, scripted: Any, dial: Any, ask: Any, eventually: Any
) -> None:
    gate = asyncio.Event()
    decode = await scripted(scripted.sse(delta("a"), gate, DONE))
    async with serving(tree(decode.url)) as group, AsyncExitStack() as stack:
        streams = await on_all(group, dial, ask, stack)
        orphans = group.processes()
        group.signal(signal.SIGKILL)
        gate.set()
        assert all([(await live.rest()).whole for live in streams])
        await eventually(lambda: not any(Path(f"/proc/{pid}/fd").exists() and _alive(pid) for pid in orphans))


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_a_changed_file_is_applied_in_every_process_and_a_bad_one_in_none(
    serving: Any, scripted: Any, call: Any, counted: Any, ask: Any, tmp_path: Path, eventually: Any
) -> None:
    old, new = await scripted(scripted.json({"of": "old"})), await scripted(scripted.json({"of": "new"}))

    async def answers() -> set[str]:
        return {(await call(group.url, CHAT, ask())).body["of"] for _ in range(12)}

    async def all_new() -> bool:
        return await answers() == {"new"}

    async with serving(tree(old.url, config={"watch": False})) as group:
        path = tmp_path / "pd.yaml"
        assert await answers() == {"old"}
        path.write_text("pools: {}")
        group.signal(signal.SIGHUP)
        assert str(path) in (await group.until("was not reloaded"))["message"]
        assert await answers() == {"old"}
        path.write_text(yaml.safe_dump(tree(new.url, server={"workers": 3})))
        group.signal(signal.SIGHUP)
        assert "server.workers: changing it takes a restart" in (await group.until("server.workers"))["message"]
        path.write_text(yaml.safe_dump(tree(new.url)))
        group.signal(signal.SIGHUP)
        await eventually(all_new)
        group.signal(signal.SIGKILL, group.processes()[0])  # who takes its place has the file of now
        await group.until("another is started")
        await eventually(lambda: len(group.processes()) == 2)
        assert await answers() == {"new"}
        for result, count in {"refused": 2, "applied": 1}.items():
            assert await counted(group.url, "coordinator_config_reloads_total", result=result) == count
        group.signal(signal.SIGTERM)
        assert await group.ended() == 0


async def test_a_port_that_is_taken_is_told_once_and_a_second_signal_stops_all_at_once(
    serving: Any, scripted: Any, dial: Any, ask: Any, tmp_path: Path
) -> None:
    """The owner of the port would share it; nobody is to find out by losing every second request."""
    decode = await scripted(scripted.sse(delta("a"), asyncio.Event()))
    async with serving(tree(decode.url)) as group, AsyncExitStack() as stack:
        other = tmp_path / "other.yaml"
        other.write_text(yaml.safe_dump(tree(decode.url, server={"listen_addr": group.url.removeprefix("http://")})))
        async with started("-m", "coordinator", "serve", "--config", str(other)) as second:
            _, told = await second._program.communicate()
            assert second._program.returncode == 1
        (line,) = told.decode().splitlines()
        assert line.startswith(f"{other}: server.listen_addr: error while attempting to bind on address ('127.0.0.1',")
        (live,) = await open_streams(stack, dial, group.url, ask, 1)
        group.signal(signal.SIGTERM)
        await group.until("draining")
        group.signal(signal.SIGTERM)
        assert not (await live.rest()).whole
        assert await group.ended() == 0


SCRIPT = """
import json, os, sys, time
from coordinator.processes.channel import pack
from coordinator.config import load
from coordinator.logs import set_up
from coordinator.processes.supervisor import Supervisor
def say(message, **fields):  # at once: other processes write too
    os.write(2, json.dumps(dict(message=message, **fields)).encode() + b"\\n")
def serve(config, end):
{body}
set_up(20, "json")
code, problems = Supervisor(load(sys.argv[1], {{}}), sys.argv[1], serve).run()
for problem in problems:
    say(problem)
sys.exit(code)
"""


async def test_a_process_that_cannot_start_ends_the_whole_with_its_code(tmp_path: Path) -> None:
    path = tmp_path / "pd.yaml"
    path.write_text(yaml.safe_dump(tree("http://127.0.0.1:9")))
    body = "    return 3, ['no']"
    async with started("-c", SCRIPT.format(body=body), str(path)) as group:
        assert await group.ended() == 3
    assert [line["message"] for line in group.logged] == ["no"]


async def test_a_process_that_dies_again_and_again_is_started_later_each_time(tmp_path: Path) -> None:
    path = tmp_path / "pd.yaml"
    path.write_text(yaml.safe_dump(tree("http://127.0.0.1:9", server={"workers": 2})))
    # One lives. The other dies, and not before both have been heard: what cannot even start ends the whole.
    body = """
    end.sendall(pack('listening', ('x',)))
    up = sys.argv[1] + '.up'
    if config.server.queue_size != 51:
        open(up, 'x').close()
        time.sleep(60)
    while not os.path.exists(up):
        time.sleep(0.01)
    time.sleep(0.1)
    return 1, []
"""
    path.write_text(yaml.safe_dump(tree("http://127.0.0.1:9", server={"queue_size": 101})))
    async with started("-c", SCRIPT.format(body=body), str(path)) as group:
        said = [(await group.until("another is started in"))["message"].rpartition(" in ")[2] for _ in range(3)]
    assert said == ["0.1 s", "0.2 s", "0.4 s"]


# Applies any file but one by which its share of the queue is 30, or 33.
OBEDIENT = """
    from coordinator.processes.channel import Line
    line = Line(end, 5.0)
    line.send('listening', ('x',))
    while True:
        word, what = line.receive(time.monotonic() + 60)
        if word == 'reload':
            share = what.server.queue_size
            say('applying', share=share)
            line.send('reloaded', ['no room for 30'] if share in (30, 33) else [])
        if word in ('drain', 'stop'):
            return 0, []
"""


async def test_what_the_first_process_cannot_apply_is_applied_by_none(tmp_path: Path) -> None:
    """Some of it only a process that serves can find out; nobody is to find it out by ending."""

    def queue(size: int) -> None:
        path.write_text(yaml.safe_dump(tree("http://127.0.0.1:9", server={"workers": 3, "queue_size": size})))

    path = tmp_path / "pd.yaml"
    queue(12)
    async with started("-c", SCRIPT.replace("{body}", OBEDIENT).replace("{{}}", "{}"), str(path)) as group:
        await group.until("listening")
        before = group.processes()
        queue(90)
        group.signal(signal.SIGHUP)
        assert (await group.until("was not reloaded"))["message"].endswith("no room for 30")
        queue(60)
        group.signal(signal.SIGHUP)
        for _ in range(3):
            await group.until("applying")
        assert [line["share"] for line in group.logged if line["message"] == "applying"] == [30, 20, 20, 20]
        assert group.processes() == before
        queue(100)  # 34 for the first, and 33 for each of the others
        group.signal(signal.SIGHUP)
        while group.said("another is started") < 2:
            await group.until("")
        assert group.said("could not apply the configuration, and is replaced") == 2
        assert group.said("ended with code 0; another is started") == 2
        group.signal(signal.SIGTERM)
        assert await group.ended() == 0


@pytest.mark.parametrize("workers", [1, 3])
async def test_what_no_process_can_start_with_is_told_once(tmp_path: Path, workers: int) -> None:
    """Only a process that serves starts parsers, so that each finds out by itself that it cannot."""
    (tmp_path / "vllm.py").write_text("raise RuntimeError\n")
    decode = {"derender": "coordinator", "tokenizer": str(tmp_path), "tool_parser": "hermes"}
    steps = [
        {"type": "render", "params": {"address": "http://127.0.0.1:1"}},
        {"type": "decode", "params": decode},
    ]
    pipeline = {"use_openai_format": False, "steps": steps}
    path = tmp_path / "pd.yaml"
    path.write_text(yaml.safe_dump(tree("http://127.0.0.1:1", server={"workers": workers}, pipeline=pipeline)))
    command = (sys.executable, "-m", "coordinator", "serve", "--config", str(path))
    program = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, stderr=asyncio.subprocess.PIPE, env={**ENV, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    )
    try:
        async with asyncio.timeout(HANG_S):
            _, told = await program.communicate()
    finally:
        if program.returncode is None:
            program.kill()
    sentence = f"{path}: pipeline.steps[1].params.derender: RuntimeError at vllm.py:1"
    assert (program.returncode, told.decode()) == (2, f"{sentence}\n")
