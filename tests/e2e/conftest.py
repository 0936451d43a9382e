"""The workers, once for the whole run, and a coordinator in front of them for every configuration that a test names.

These tests run when the e2e marker or a path in this folder asks for them; a plain ``pytest`` leaves them out.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import openai
import pytest
import yaml

from tests.bounds import HANG_S
from tests.e2e import vllm_env
from tests.e2e.lineups import LINEUPS
from tests.e2e.servers import ON_CPU, Process, vllm
from tests.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.lineups import Lineup

ROOT = Path(__file__).resolve().parents[2]
VLLM_VERSION = os.environ.get("VLLM_VERSION", vllm_env.DEFAULT_VERSION)
# Boot is imports: half a minute alone, and ten on a machine that has as many other things to do.
BOOT_S = 900

_PROCESSES = pytest.StashKey[list[Process]]()
_LOGGED = pytest.StashKey[dict[Process, int]]()


class Workers(NamedTuple):
    render: Process
    prefill: Process
    decode: Process


class Pair(NamedTuple):
    prefill: Process
    decode: Process


class Coordinator:
    """A running coordinator and the SDK client of a user."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.url = process.url
        self.sdk = openai.OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0, timeout=HANG_S)

    def async_sdk(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=HANG_S)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    mine = [item for item in items if here in item.path.parents]
    asked_for = config.option.markexpr or any(here.name in Path(arg.split("::")[0]).parts for arg in config.args)
    if not asked_for:
        config.hook.pytest_deselected(items=mine)
        items[:] = [item for item in items if item not in mine]
    for item in mine:
        if item.get_closest_marker("timeout") is None:
            # Of the test alone: the first one also waits for the workers, and for their environment.
            item.add_marker(pytest.mark.timeout(BOOT_S + float(config.getini("timeout")), func_only=True))


@pytest.fixture(scope="session")
def vllm_python(request: pytest.FixtureRequest) -> Path:
    # Two minutes of silence need a word, and capture would keep it back.
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        return vllm_env.ensure(VLLM_VERSION)


@pytest.fixture(scope="session")
def start_vllm(
    vllm_python: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Callable[..., list[Process]]]:
    """Start servers of the given roles together and wait for all of them; they are stopped with the session.

    A role is a name, or a name and settings of its own beside those of all.
    """
    logs, started = tmp_path_factory.mktemp("vllm"), []

    def start(*roles: str | tuple[str, dict[str, object]], **settings: object) -> list[Process]:
        named = [(role, {}) if isinstance(role, str) else role for role in roles]
        servers = [vllm(role, vllm_python, logs, **settings | own) for role, own in named]
        started.extend(servers)
        request.config.stash.setdefault(_PROCESSES, []).extend(servers)
        for server in servers:
            try:
                server.wait_until_ready("/health", BOOT_S)
            except RuntimeError as error:
                pytest.exit(str(error), returncode=1)  # once, not as an error of each test
        return servers

    yield start
    died = [server.name for server in started if not server.alive and not server.ended]
    for server in started:
        server.terminate()  # all of them first: each takes some seconds
    for server in started:
        server.stop()
    assert not died, f"ended before the tests did: {died}, see the logs in {logs}"


@pytest.fixture(scope="module")
def start_for_module(start_vllm: Callable[..., list[Process]]) -> Iterator[Callable[..., list[Process]]]:
    """Start servers that are stopped with the module, so that the next ones have the cores and the memory."""
    started: list[Process] = []

    def start(*roles: str | tuple[str, dict[str, object]], **settings: object) -> list[Process]:
        started.extend(servers := start_vllm(*roles, **settings))
        return servers

    yield start
    died = [server.name for server in started if not server.alive and not server.ended]
    for server in started:
        server.terminate()
    for server in started:
        server.stop()
    assert not died, f"ended before the tests did: {died}"


@pytest.fixture(scope="session")
def workers(start_vllm: Callable[..., list[Process]]) -> Workers:
    return Workers(*start_vllm("render", "prefill", "decode"))


@pytest.fixture(scope="session")
def pair(start_vllm: Callable[..., list[Process]], tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A prefill and a decode worker with the shared-folder connector, which tests may kill."""
    return Pair(*start_vllm("prefill", "decode", kv_folder=tmp_path_factory.mktemp("kv")))


@pytest.fixture(scope="session")
def bare(start_vllm: Callable[..., list[Process]]) -> Pair:
    """A prefill and a decode worker without a tokenizer (``--tokens-only``), which hand over by NIXL."""
    return Pair(*start_vllm("prefill", "decode", tokenizer=False))


@pytest.fixture(scope="session")
def coordinator(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Callable[[dict], Coordinator]]:
    """Run the coordinator with a configuration; the same one is started once. SIGTERM must end each with 0."""
    folder = tmp_path_factory.mktemp("coordinators")
    running: dict[str, Coordinator] = {}

    def start(config: dict, python: Path | None = None, *, ready: bool = True) -> Coordinator:
        """Start it; ``python`` is another than that of the tests, for what is installed there."""
        key = json.dumps(config, sort_keys=True)
        if key not in running:
            (port,) = free_ports(1)
            file = folder / f"{port}.yaml"
            file.write_text(yaml.safe_dump({"server": {"listen_addr": f"127.0.0.1:{port}"}} | config))
            command = [str(python or sys.executable), "-m", "coordinator", "serve", "--config", str(file)]
            env = {} if python is None else {"PYTHONPATH": str(ROOT), **ON_CPU}
            process = Process("coordinator", command, port, file.with_suffix(".log"), env)
            request.config.stash.setdefault(_PROCESSES, []).append(process)
            try:
                running[key] = Coordinator(process.wait_until_ready("/readyz" if ready else "/healthz", BOOT_S))
            except RuntimeError:
                process.stop()
                raise
        return running[key]

    yield start
    for one in running.values():
        one.sdk.close()
    statuses = {one.process.log: one.process.stop() for one in running.values()}
    assert not any(statuses.values()), f"exit statuses by log file: {statuses}"


@pytest.fixture(params=LINEUPS)
def lineup(request: pytest.FixtureRequest) -> Lineup:
    """Each line-up in turn: both wire formats, and each way to get text out of tokens."""
    chosen = LINEUPS[request.param]
    if chosen.output_mode == "derender" and VLLM_VERSION == "0.32":
        pytest.skip("vLLM 0.32 has no derender")
    return chosen


@pytest.fixture
def front(lineup: Lineup, workers: Workers, coordinator: Callable[[dict], Coordinator]) -> Coordinator:
    """A coordinator of the test's line-up."""
    return coordinator(lineup.config(workers.render.url, workers.prefill.url, workers.decode.url))


def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_LOGGED] = {p: p.log.stat().st_size for p in item.config.stash.get(_PROCESSES, [])}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    """Show what each server logged during a test that failed."""
    report = yield
    if report.failed:
        before = item.stash.get(_LOGGED, {})
        for process in item.config.stash.get(_PROCESSES, []):
            if logged := process.log_tail(before.get(process, 0)):
                report.sections.append((f"log of {process.name}", logged))
    return report
