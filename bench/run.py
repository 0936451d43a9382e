"""Measure the coordinator and its peers side by side: ``make bench``.

In each round every scenario is run on every proxy, one right after the other and in an order that moves on by one with
each round; what is compared is compared within a round. The price of a proxy is CPU time of its processes, which the
kernel counts in nanoseconds; on a machine with two cores or more it has one of them to itself.

Whether a proxy did its work is checked as well: each answer token by token, and from the workers' own counts how many
legs each request made.

Results go to ``results/runs.json``, a table to ``RESULTS.md``, plots to ``results/``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from bench import peers, report
from bench.load import chat_body, http_request
from bench.peers import HERE, Proxy, Site
from bench.processes import Cores, Failed, Programs, free_ports, wait_until_answered
from bench.proctree import ProcessTree
from bench.scenarios import DIRECT, FULL, ORJSON, SMOKE, Plan, Scenario

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Record = dict[str, Any]

ROLES = ("render", "prefill", "decode")
# What of the environment decides on pages.
MEMORY = ("PYTHONMALLOC", "GLIBC_TUNABLES", "COORDINATOR_SERVER_HUGE_PAGES")
READY_LIMIT_S = 180.0
LOAD_LIMIT_S = 180.0
OPEN_LIMIT_S = 120.0


@dataclass
class Started:
    """A proxy that runs, since a point of the monotonic clock."""

    proxy: Proxy
    program: subprocess.Popen[bytes]
    port: int
    began: float


@dataclass
class Bench:
    """One run: the workers, the proxies, and the records so far."""

    plan: Plan
    programs: Programs
    cores: Cores
    ends_at: float
    proxies: dict[str, Proxy]
    workers: dict[str, int] = field(default_factory=dict)
    started: dict[str, Started] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)

    def run(self) -> None:
        self.start_workers()
        for number in range(self.plan.rounds):
            for name in turned(self.plan.proxies, number):
                self.fresh(name, number)
        wanted = {name for scenario in self.plan.scenarios for name in scenario.proxies}
        launched: list[Started] = []
        for name in [name for name in self.proxies if name in wanted]:
            with self.noting("all", name, 0):
                launched.append(self.launch(name))
        for started in launched:  # together, as this is not what is measured
            with self.noting("all", started.proxy.name, 0):
                self.until_ready(started)
                self.started[started.proxy.name] = started
        for number in range(self.plan.rounds):
            for scenario in self.plan.scenarios:
                if scenario.rounds is not None and number >= scenario.rounds:
                    continue
                if scenario.name.startswith("prompt"):
                    self.records.append(orjson_record(scenario, number))
                for name in turned(scenario.proxies, number):
                    self.measure(scenario, name, number)

    def start_workers(self) -> None:
        for role, port in zip(ROLES, free_ports(len(ROLES)), strict=True):
            args = [sys.executable, "-m", "bench.fake_worker", "--role", role, "--port", str(port)]
            worker = self.programs.start(role, args, self.cores.others)
            wait_until_answered(worker, port, b"GET /health HTTP/1.1\r\nHost: worker\r\n\r\n", READY_LIMIT_S)
            self.workers[role] = port

    def launch(self, name: str) -> Started:
        """Start a proxy."""
        proxy = self.proxies[name]
        listen, metrics = free_ports(2)
        folder = Path(tempfile.mkdtemp(dir=self.programs.folder))
        site = Site(listen, metrics, *(self.workers[role] for role in ROLES), folder)
        began = time.monotonic()
        cores = self.cores.measured if proxy.processes == 1 else self.cores.pair
        program = self.programs.start(name, proxy.command(site), cores, proxy.env)
        return Started(proxy, program, listen, began)

    def until_ready(self, started: Started) -> float:
        """Return the seconds from a proxy's start to its first answer to a chat request.

        Raises:
            Failed
        """
        question = http_request(started.port, chat_body(600, 2, 0, stream=False))
        try:
            wait_until_answered(started.program, started.port, question, READY_LIMIT_S)
        except Failed:
            self.programs.stop(started.program)
            raise
        return time.monotonic() - started.began

    # A proxy that has just been started.

    def fresh(self, name: str, number: int) -> None:
        """Start a proxy, see what it takes, hold silent streams open through it, and stop it."""
        if name not in self.proxies or self.over():
            return
        with self.noting("start", name, number) as record:
            started = self.launch(name)
            ready_s = self.until_ready(started)
            rss = ProcessTree(started.program.pid).rss_bytes()
            record.update(ready_s=round(ready_s, 4), rss_mib=round(rss / 2**20, 2))
            held = [streams for streams, rounds in self.plan.idle if number < rounds]
            if held:
                self.load(["unary", "--port", str(started.port), "--requests", "200"])
            rss = ProcessTree(started.program.pid).rss_bytes()
            for streams in held:
                self.idle(started, streams, number, rss)
            self.programs.stop(started.program)

    def idle(self, started: Started, streams: int, number: int, rss_before: int) -> None:
        """Hold streams open through a proxy, and note by how much that made it grow."""
        if self.over():
            return
        with self.noting("idle", started.proxy.name, number, streams=streams) as record:
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            if hard < 2 * streams + 500:  # a proxy holds two sockets per stream
                raise Failed(f"{hard} open files allowed are too few for {streams} streams")
            words = ["idle", "--port", str(started.port), "--connections", str(streams), "--tokens", "1000"]
            load = self.generator([*words, "--open-s", str(OPEN_LIMIT_S)], stdin=subprocess.PIPE)
            try:
                opened = load.stdout.readline()
                if not opened:
                    raise Failed("the streams could not be opened")
                held = json.loads(opened).get("open", 0)
                rss = ProcessTree(started.program.pid).rss_bytes()
                load.communicate(timeout=READY_LIMIT_S)
            finally:
                self.programs.stop(load)
            record.update(ok=held, errors=streams - held, rss_mib=round(rss / 2**20, 2))
            record["rss_kib_per_stream"] = round((rss - rss_before) / 1024 / max(held, 1), 2)
            if held < streams:
                raise Failed(f"{held} of {streams} streams were opened in {OPEN_LIMIT_S:g} s")

    # Proxies that run all the time.

    def measure(self, scenario: Scenario, name: str, number: int) -> None:
        """Put one proxy under one load, and note what it cost."""
        if self.over() or (name != DIRECT and name not in self.started):
            return
        with self.noting(scenario.name, name, number) as record:
            started = self.started.get(name)
            if started is None:
                record.update(self.load(scenario.args(self.workers["decode"], None)))
                return
            if started.program.poll() is not None:
                raise Failed(f"it has ended with {started.program.returncode}")
            legs = self.legs()
            seen = self.load(scenario.args(started.port, started.program.pid))
            rss = ProcessTree(started.program.pid).rss_bytes()
            record.update(seen, **prices(scenario, seen), rss_mib=round(rss / 2**20, 2))
            sent = scenario.requests + scenario.warm
            record["legs"] = {role: round((now - legs[role]) / sent, 2) for role, now in self.legs().items()}
            wanted = dict(zip(ROLES, started.proxy.legs, strict=True))
            if not seen["errors"] and any(record["legs"][role] != count for role, count in wanted.items()):
                raise Failed(f"legs per request are {record['legs']}, not {wanted}")

    def legs(self) -> dict[str, int]:
        """Return how many requests each role has had, and how many of decode's carried a hand-over."""
        counts = {role: ask(port) for role, port in self.workers.items()}
        seen = {role: count["requests"] for role, count in counts.items()}
        return {**seen, "handed over": counts["decode"]["handed_over"]}

    # The generator.

    def generator(self, words: Sequence[str], stdin: int | None = None) -> subprocess.Popen[bytes]:
        args = [sys.executable, "-m", "bench.load", "--timeout-s", str(LOAD_LIMIT_S), *words]
        return self.programs.start("load", args, self.cores.others, stdin=stdin, stdout=subprocess.PIPE)

    def load(self, words: list[str]) -> Record:
        """Run a load to its end.

        Raises:
            Failed: the generator itself did.
        """
        load = self.generator(words)
        try:
            out, _ = load.communicate(timeout=LOAD_LIMIT_S + 10)
        except subprocess.TimeoutExpired:
            raise Failed("the load did not end") from None
        finally:
            self.programs.stop(load)
        if load.returncode:
            raise Failed(f"the load ended with {load.returncode}: {self.programs.tail('load')}")
        told: dict[str, Any] = json.loads(out)
        return told

    # Book-keeping.

    def over(self) -> bool:
        return time.monotonic() > self.ends_at

    @contextlib.contextmanager
    def noting(self, scenario: str, proxy: str, number: int, **more: Any) -> Iterator[Record]:
        """Keep a record of what is done inside, its failure included."""
        record: Record = {"scenario": scenario, "proxy": proxy, "round": number, **more}
        try:
            yield record
        except (Failed, subprocess.TimeoutExpired, OSError) as error:
            record["error"] = f"{error}"
            if self.programs.log(proxy).exists():
                record["said"] = self.programs.tail(proxy)
        if scenario != "all" or "error" in record:
            self.records.append(record)
            print(line(record), file=sys.stderr, flush=True)


def turned(names: Sequence[str], by: int) -> list[str]:
    """Return the names in an order that begins with another one each time."""
    by %= max(len(names), 1)
    return [*names[by:], *names[:by]]


def prices(scenario: Scenario, seen: Record) -> Record:
    """Return what a load cost, by request and, where marks were set, by chunk."""
    cpu_ns = seen["proxy_cpu_ns"]
    found: Record = {"cpu_us_per_request": round(cpu_ns / 1e3 / max(seen["ok"], 1), 2)}
    body = len(chat_body(scenario.prompt_bytes, scenario.tokens, scenario.pace_us, scenario.mode != "unary"))
    found["wall_us_per_request"] = round(seen["wall_s"] * 1e6 / max(seen["ok"], 1), 2)
    found["cpu_ms_per_mb"] = round(cpu_ns / max(seen["ok"], 1) / body, 4)  # ns per byte, which is ms per 1,000,000
    found["cpu_of_a_core"] = round(cpu_ns / 1e9 / seen["wall_s"], 3)
    marks, cpu = scenario.marks, seen["marks_cpu_ns"]
    if len(cpu) == len(marks):
        names = ("cpu_us_per_chunk", "cpu_us_per_chunk_late")
        for at, name in zip(range(0, len(marks), 2), names, strict=False):
            chunks = (marks[at + 1] - marks[at]) * scenario.connections
            found[name] = round((cpu[at + 1] - cpu[at]) / 1e3 / chunks, 3)
    return found


def orjson_record(scenario: Scenario, number: int) -> Record:
    """Parse and write the scenario's body in this process, for half a tenth of a second."""
    body = chat_body(scenario.prompt_bytes, scenario.tokens, scenario.pace_us, stream=False)
    times, began = 0, time.thread_time_ns()
    while (used := time.thread_time_ns() - began) < 50_000_000:
        orjson.dumps(orjson.loads(body))
        times += 1
    return {
        "scenario": scenario.name,
        "proxy": ORJSON,
        "round": number,
        "cpu_ms_per_mb": round(used / times / len(body), 4),
        "cpu_us_per_request": round(used / times / 1e3, 2),
    }


def ask(port: int) -> dict[str, int]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/counts", timeout=READY_LIMIT_S) as got:
        counts: dict[str, int] = json.load(got)
    return counts


def line(record: Record) -> str:
    """Return a record in one line, for whoever watches."""
    shown = ("streams", "ok", "errors", "ready_s", "cpu_us_per_request", "cpu_us_per_chunk", "cpu_us_per_chunk_late")
    shown += ("cpu_of_a_core", "marks_rss_mib", "rss_kib_per_stream", "error")
    values = [f"{name}={record[name]}" for name in shown if record.get(name)]
    return f"{record['round'] + 1} {record['scenario']:10} {record['proxy']:32} {' '.join(values)}"


def machine() -> dict[str, Any]:
    """Return what the run ran on."""
    cpu = next(
        (row.partition(":")[2].strip() for row in _text("/proc/cpuinfo").splitlines() if row.startswith("model name")),
        platform.processor() or "unknown",
    )
    memory = next((int(row.split()[1]) for row in _text("/proc/meminfo").splitlines() if "MemTotal" in row), 0)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }


def versions() -> dict[str, str]:
    found = {}
    for name in ("pd-coordinator", "aiohttp", "uvloop", "httptools", "orjson"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    found["commit"] = commit(HERE.parent)
    return found


# What is measured, and not what an earlier run has written, or what people read.
_CODE = ("--", ".", ":(exclude)bench/results", ":(exclude,glob)**/*.md")


def commit(root: Path) -> str:
    """Return the commit that is checked out, with "-dirty" where code is not as it is there."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False).stdout.strip()

    try:
        described = git("describe", "--always")
        return (described + ("-dirty" if git("diff", "--name-only", "HEAD", *_CODE) else "")) or "unknown"
    except OSError:
        return "unknown"


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def chosen(plan: Plan, options: argparse.Namespace) -> Plan:
    """Narrow a plan to what was asked for."""
    scenarios = plan.scenarios
    if options.scenarios:
        scenarios = tuple(scenario for scenario in scenarios if scenario.name in options.scenarios)
    if options.proxies:
        keep = {DIRECT, *options.proxies}
        scenarios = tuple(
            replace(scenario, proxies=tuple(name for name in scenario.proxies if name in keep))
            for scenario in scenarios
        )
        plan = replace(plan, proxies=tuple(name for name in plan.proxies if name in keep))
    if options.scenarios and not {"idle", "start"} & set(options.scenarios):
        plan = replace(plan, proxies=())
    if options.scenarios and "idle" not in options.scenarios:
        plan = replace(plan, idle=())
    return replace(plan, scenarios=scenarios, rounds=options.rounds or plan.rounds)


def parse() -> argparse.Namespace:
    names = [scenario.name for scenario in FULL.scenarios]
    known = [proxy.name for proxy in peers.ALL]
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--rounds", type=int, help=f"how often everything is measured (default {FULL.rounds})")
    parser.add_argument("--scenarios", nargs="+", choices=["start", "idle", *names], help="all by default")
    parser.add_argument("--proxies", nargs="+", choices=known, metavar="NAME", help="all that are installed by default")
    parser.add_argument("--smoke", action="store_true", help="tiny counts, the coordinator alone: does all of it work?")
    parser.add_argument("--no-pin", action="store_true", help="do not give the measured proxy a core of its own")
    parser.add_argument("--budget-s", type=float, default=630.0, help="begin nothing new after this (default 630)")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for RESULTS.md and results/")
    return parser.parse_args()


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, and return everything that ``report`` needs."""
    began = time.monotonic()
    plan = chosen(SMOKE if options.smoke else FULL, options)
    wanted = {*plan.proxies, *(name for scenario in plan.scenarios for name in scenario.proxies)} - {DIRECT}
    states = {proxy.name: (proxy, *peers.state(proxy)) for proxy in peers.ALL if proxy.name in wanted}
    for proxy, found, why in states.values():
        print(f"{proxy.name:32} {found or f'left out, {why}'}", file=sys.stderr)
    here = {name: proxy for name, (proxy, found, _) in states.items() if found is not None}
    facts = {"machine": machine(), "versions": versions(), "date": datetime.now(UTC).isoformat(timespec="minutes")}
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, Programs(Path(folder)) as programs:
        cores = Cores.split(not options.no_pin)
        bench = Bench(plan, programs, cores, began + options.budget_s, here)
        stopped = None
        try:
            bench.run()
        except KeyboardInterrupt:
            stopped = "interrupted"
        if bench.over():
            stopped = f"the {options.budget_s:g} s were spent"
    return {
        **facts,
        "command": shown_command(),
        "pinned": cores.measured is not None,
        "environment": {name: os.environ[name] for name in MEMORY if name in os.environ},
        "rounds": plan.rounds,
        "stopped": stopped,
        "wall_s": round(time.monotonic() - began, 1),
        "proxies": {
            name: {"version": found, "missing": why, "does": proxy.does, "started": proxy.shown, "legs": proxy.legs}
            for name, (proxy, found, why) in states.items()
        },
        "scenarios": [vars(scenario) for scenario in plan.scenarios],
        "records": bench.records,
    }


def dumped(results: dict[str, Any]) -> str:
    """Return JSON with a record per line, so that two runs can be compared by eye."""
    head = json.dumps({key: value for key, value in results.items() if key != "records"}, indent=1)
    rows = ",\n".join(f"  {json.dumps(record)}" for record in results["records"])
    return f'{head[:-2]},\n "records": [\n{rows}\n ]\n}}\n'


def shown_command(target: str = "make bench") -> str:
    """Return how this run was started; where its results went is nobody's business."""
    words = sys.argv[1:]
    if "--out" in words:
        del words[words.index("--out") : words.index("--out") + 2]
    return f'{target} ARGS="{shlex.join(words)}"' if words else target


def recorded(
    run: Callable[[argparse.Namespace], dict[str, Any]],
    options: argparse.Namespace,
    file: str,
    write: Callable[..., str],
) -> dict[str, Any]:
    """Measure, keep what was found in ``results/``, and write the report of it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves the ``with``, which stops what was started
    results = run(options)
    folder = options.out / "results"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(dumped(results))
    print(write(results, options.out, plots=not options.smoke), file=sys.stderr)
    return results


def main() -> int:
    results = recorded(run, parse(), "runs.json", report.write)
    # What a peer cannot do is a result.
    ours = {DIRECT, *(proxy.name for proxy in peers.OURS)}
    return int(any(record.get("error") and record["proxy"] in ours for record in results["records"]))


if __name__ == "__main__":
    sys.exit(main())
