"""The RFC's latency table: ``make bench-rfc``.

On simulated workers that give tokens at the rate of a GPU, and on real vLLM workers on CPU, the same clients are
answered by each way to make text of tokens. Measured are what clients see (time to the first token, time per output
token, whole answers) and CPU time per token: of the coordinator, and on real workers of decode's front end (the API
server process, without its engine) and of the derender service.

Results go to ``results/rfc.json``, and ``RFC_LATENCY.md`` with plots beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from bench import rfc_report
from bench.peers import HERE
from bench.processes import Cores, Failed, Programs, free_ports, wait_until_answered
from bench.proctree import ProcessTree, children, process_cpu_ns
from bench.rfc_cells import (
    ENGINE,
    MAX_MODEL_LEN,
    MODES,
    OTHERS_FIRST_S,
    REAL,
    SIMULATED,
    SMOKE,
    TOKENS_CLIENTS,
    TOKENS_LENGTH,
    TOKENS_REQUESTS,
    Cell,
    Mode,
    Site,
    Workers,
)
from bench.rfc_load import CHAT, GENERATE, Load
from bench.run import machine, recorded, shown_command, versions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = HERE.parent
MODEL = ROOT / "tests" / "data" / "tiny-model"
READY_S = 180.0  # parsers import most of vLLM
GENERATED = "vllm:generation_tokens_total"
VLLM_READY_S = 300.0

Record = dict[str, Any]
Results = dict[str, Any]
NOTHING: Results = {"runs": [], "left_out": {}, "records": []}
Watched = dict[str, list[int]]


@dataclass
class Vllm:
    """Real servers, each in a process group of its own, as the end-to-end tests start them."""

    python: Path
    logs: Path

    def start(self, stack: ExitStack, *roles: str) -> list[Any]:
        from tests.e2e.servers import vllm

        def flags(role: str) -> dict[str, str]:
            return {"max_model_len": str(MAX_MODEL_LEN)} if role == "render" else ENGINE

        servers = [vllm(role, self.python, self.logs, **flags(role)) for role in roles]
        for server in servers:
            stack.callback(server.stop)
        for server in servers:
            server.wait_until_ready("/health", VLLM_READY_S)
        return servers


@dataclass
class Bench:
    """One run: what is started, and the records so far."""

    programs: Programs
    cores: Cores
    ends_at: float
    vllm: Vllm | None
    run: str
    records: list[Record] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def site(self, site: Site, cells: Sequence[Cell], modes: Sequence[Mode]) -> None:
        """Start a site's workers and a coordinator for each mode, and run its cells, most telling first."""
        if not cells or self.over():
            return
        with ExitStack() as stack:
            workers, watched, cores = self._workers(site, stack)
            started = {mode.name: (mode, self._coordinator(mode, workers, cores)) for mode in modes}
            running = {name: (mode, *found) for name, (mode, found) in started.items() if found is not None}
            stack.callback(self.programs.stop, *(program for _, _, program in running.values()))
            for name, (_, url, _) in running.items():  # connections are opened, and parsers loaded, before it counts
                self._answered(name, Load(url, CHAT, 2, 8, 4))
            if site == "vLLM":
                urls = {name: url for name, (mode, url, _) in running.items() if not mode.render_here}
                self._beside(workers, urls, watched)
            for turn, cell in enumerate(cells):
                # Each way is first once: whoever follows another finds the machine warm, and others at work.
                for mode, url, program in _from(list(running.values()), turn):
                    if cell.measures(mode) and not self.over():
                        self._measure(cell, mode, url, workers, program, watched)

    def _workers(self, site: Site, stack: ExitStack) -> tuple[Workers, Watched, Cores]:
        """Return where the workers are, the processes whose CPU time is told, and the cores for the coordinator."""
        if site == "simulator":
            args = [sys.executable, "-m", "bench.rfc_sim"]
            program = self.programs.start("simulator", args, self.cores.others, stdout=subprocess.PIPE)
            stack.callback(self.programs.stop, program)
            assert program.stdout is not None
            named = json.loads(program.stdout.readline() or "{}")
            if not named:
                raise Failed(f"the simulator did not start: {self.programs.tail('simulator')}")
            service = self.vllm.start(stack, "render")[0] if self.vllm is not None else None
            watched: Watched = {} if service is None else {"service": [service.pid]}
            workers = Workers(**named, derender=service and service.url, model=str(MODEL), max_model_len=MAX_MODEL_LEN)
            return workers, watched, self.cores
        assert self.vllm is not None, "real workers are asked for where there is a vLLM alone"
        render, prefill, decode, service = self.vllm.start(stack, "render", "prefill", "decode", "render")
        workers = Workers(render.url, prefill.url, decode.url, service.url, str(MODEL), MAX_MODEL_LEN)
        return workers, {"front end": [decode.pid], "service": [service.pid]}, Cores.split(pin=False)

    def _coordinator(self, mode: Mode, workers: Workers, cores: Cores) -> tuple[str, subprocess.Popen[bytes]] | None:
        """Start a coordinator for a mode; None where it cannot be had here, which is noted."""
        if mode.needs_vllm and self.vllm is None:
            self.left_out[mode.name] = "needs vLLM: its parsers, or its derender routes"
            return None
        (port,) = free_ports(1)
        file = self.programs.folder / f"{port}.yaml"
        file.write_text(json.dumps(mode.config(workers, port)))
        python = str(self.vllm.python) if self.vllm is not None and mode.parses_here else sys.executable
        args = [python, "-m", "coordinator", "serve", "--config", str(file)]
        env = {"PYTHONPATH": str(ROOT), "VLLM_TARGET_DEVICE": "cpu"}
        program = self.programs.start(mode.name, args, cores.measured, env)
        try:
            wait_until_answered(program, port, b"GET /readyz HTTP/1.1\r\nHost: c\r\n\r\n", READY_S)
        except Failed as failed:
            self.left_out[mode.name] = f"{failed}: {self.programs.tail(mode.name)}"
            return None
        return f"http://127.0.0.1:{port}", program

    def _measure(
        self, cell: Cell, mode: Mode, url: str, workers: Workers, program: subprocess.Popen[bytes], watched: Watched
    ) -> None:
        load = Load(url, CHAT, cell.clients, cell.length, cell.requests, cell.begin_s)
        limit_s = cell.limit_of(mode)
        with self.noting(site=cell.site, mode=mode.name, clients=cell.clients, length=cell.length) as record:
            parsers = {"parsers": children(program.pid)} if mode.parses_here else {}
            coordinator = ProcessTree(program.pid).pids
            before = generated(workers.decode)
            record.update(run_loads([(load, limit_s)], {"coordinator": coordinator, **parsers, **watched})[0])
            if not mode.streams:  # clients have seen no token of what was cut
                record["tokens"] = generated(workers.decode) - before
            record.update(limit_s=limit_s, cpu_us=_per_token(record["cpu_us"], record["tokens"]))
        if record["cut"]:  # what is left of them passes before another is measured
            self._answered(mode.name, Load(url, CHAT, 1, 2, 1))

    def _answered(self, name: str, load: Load) -> None:
        """Wait until a few requests that are not measured are answered.

        Raises:
            Failed: one was not.
        """
        uvloop.run(load.run(READY_S))
        told = load.told(READY_S)
        if told["errors"] or told["cut"]:
            raise Failed(f"{name}: {told['error'] or 'no answer'}: {self.programs.tail(name)}")

    def _beside(self, workers: Workers, urls: dict[str, str], watched: Watched) -> None:
        """Ask the decode worker itself for tokens, alone and beside clients of each mode."""
        for name in (None, *urls):
            if self.over():
                return
            tokens = Load(workers.decode, GENERATE, TOKENS_CLIENTS, TOKENS_LENGTH, TOKENS_REQUESTS)
            loads = [(tokens, 40.0)]
            if name is not None:
                loads.append((Load(urls[name], CHAT, TOKENS_CLIENTS, TOKENS_LENGTH, 10_000), 0.0))
            with self.noting(site="vLLM", tokens_beside=name or "nothing") as record:
                told = run_loads(loads, watched)
                all_tokens = sum(each["tokens"] for each in told)
                record.update(told[0], cpu_us=_per_token(told[0]["cpu_us"], all_tokens))
            if name is not None:
                self._answered(name, Load(urls[name], CHAT, 1, 2, 1))

    def over(self) -> bool:
        return time.monotonic() > self.ends_at

    @contextlib.contextmanager
    def noting(self, **facts: Any) -> Iterator[Record]:
        record: Record = {**facts, "run": self.run}
        yield record
        self.records.append(record)
        shown = {key: record.get(key) for key in ("ok", "cut", "errors", "error", "ttft_ms", "tpot_ms", "cpu_us")}
        print(*facts.values(), shown, file=sys.stderr, flush=True)


def generated(worker: str) -> int:
    """Return how many tokens a worker has made since it began."""
    with urllib.request.urlopen(f"{worker}/metrics", timeout=60) as answer:
        rows = answer.read().decode().splitlines()
    return round(sum(float(row.rsplit(" ", 1)[1]) for row in rows if row.startswith(GENERATED)))


def _per_token(cpu_us: dict[str, float], tokens: int) -> dict[str, float]:
    return {name: round(us / max(tokens, 1), 1) for name, us in cpu_us.items()}


def _from(modes: list[Any], turn: int) -> list[Any]:
    """Return the modes in their order, beginning with another one each turn."""
    first = turn % max(len(modes), 1)
    return modes[first:] + modes[:first]


def run_loads(loads: Sequence[tuple[Load, float]], watched: Watched) -> list[Record]:
    """Run loads together until the first has ended; return what each saw, and with the first the CPU time in all.

    Args:
        watched: the processes whose CPU time is told, by name.
    """

    def cpu() -> dict[str, int]:
        return {name: sum(map(process_cpu_ns, pids)) for name, pids in watched.items()}

    async def together() -> None:
        async with asyncio.TaskGroup() as tasks:
            others = [tasks.create_task(load.run(600.0)) for load, _ in loads[1:]]
            first, limit_s = loads[0]
            if others:
                await asyncio.sleep(OTHERS_FIRST_S)
            await first.run(limit_s)
            for other in others:
                other.cancel()

    before, began = cpu(), time.monotonic()
    uvloop.run(together())
    wall_s, after = time.monotonic() - began, cpu()
    told = [load.told(wall_s) for load, _ in loads]
    told[0]["cpu_us"] = {name: (after[name] - before[name]) / 1e3 for name in before}
    return told


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--budget-s", type=float, default=3400.0, help="begin nothing new after this (default 3400)")
    parser.add_argument("--sites", nargs="+", choices=["simulator", "vLLM"], default=["simulator", "vLLM"])
    names = [mode.name for mode in MODES]
    parser.add_argument("--modes", nargs="+", choices=names, metavar="MODE", help=f"all by default: {', '.join(names)}")
    parser.add_argument("--clients", nargs="+", type=int, help="only rows with so many clients")
    parser.add_argument("--lengths", nargs="+", type=int, help="only rows with answers of so many tokens")
    parser.add_argument("--merge", action="store_true", help="keep the earlier runs' rows that this one lacks")
    parser.add_argument("--smoke", action="store_true", help="tiny counts, no vLLM: does all of it work?")
    parser.add_argument("--no-pin", action="store_true", help="do not give the coordinator a core of its own")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for RFC_LATENCY.md and results/")
    return parser.parse_args()


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, and return everything that the report needs."""
    began = time.monotonic()
    facts = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine(), "versions": versions()}
    earlier = json.loads((options.out / "results" / "rfc.json").read_text()) if options.merge else NOTHING
    modes = [mode for mode in MODES if not options.modes or mode.name in options.modes]

    def wanted(cells: Sequence[Cell], site: Site) -> list[Cell]:
        return [
            cell
            for cell in cells
            if site in options.sites
            and (not options.clients or cell.clients in options.clients)
            and (not options.lengths or cell.length in options.lengths)
        ]

    simulated, real = (list(SMOKE), []) if options.smoke else (wanted(SIMULATED, "simulator"), wanted(REAL, "vLLM"))
    with tempfile.TemporaryDirectory(prefix="bench-") as name, Programs(Path(name)) as programs:
        vllm = None if options.smoke else Vllm(_python(), Path(name))
        bench = Bench(programs, Cores.split(not options.no_pin), began + options.budget_s, vllm, facts["date"])
        # The longest simulated answers last: a budget that ends leaves them out, and not the real workers.
        parts: list[tuple[Site, list[Cell]]] = [
            ("simulator", [cell for cell in simulated if cell.length < 4096]),
            ("vLLM", real),
            ("simulator", [cell for cell in simulated if cell.length >= 4096]),
        ]
        failures = []
        for site, cells in parts:
            try:
                bench.site(site, cells, modes)
            except (KeyboardInterrupt, SystemExit) as error:  # what was found stays found
                failures.append(type(error).__name__)
                break
            except Exception as error:
                failures.append(f"{site}: {type(error).__name__}: {str(error)[:500]}")
        stopped = f"the {options.budget_s:g} s were spent" if bench.over() else None
    ran = {"command": shown_command("make bench-rfc"), "failed": "; ".join(failures) or None, "stopped": stopped}
    return merged(earlier, bench, {**facts, **ran, "wall_s": round(time.monotonic() - began, 1)})


def merged(earlier: Results, bench: Bench, run: Record) -> Results:
    """Put what a run found in the place of what was known of the same rows; each record says which run it is of."""

    def row(record: Record) -> tuple[Any, ...]:
        return tuple(record.get(name) for name in ("site", "mode", "clients", "length", "tokens_beside"))

    found = {row(record): record for record in [*earlier["records"], *bench.records]}
    told = {record["run"] for record in found.values()}
    modes = {record.get("mode") for record in found.values()}
    left_out = {**earlier["left_out"], **bench.left_out}
    return {
        "runs": [*(known for known in earlier["runs"] if known["date"] in told), run],
        "left_out": {mode: why for mode, why in left_out.items() if mode not in modes},
        "records": list(found.values()),
    }


def _python() -> Path:
    """Return the interpreter of the end-to-end tests' vLLM, which is built where it is missing (two minutes)."""
    from tests.e2e import vllm_env

    return vllm_env.ensure(vllm_env.DEFAULT_VERSION)


def main() -> int:
    results = recorded(run, parse(), "rfc.json", rfc_report.write)
    *_, run_of_now = results["runs"]
    mine = [record for record in results["records"] if record["run"] == run_of_now["date"]]
    return int(run_of_now["failed"] is not None or any(record.get("errors") for record in mine))


if __name__ == "__main__":
    sys.exit(main())
