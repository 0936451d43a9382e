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
    COUPLED,
    INLINE,
    MODES,
    OTHERS_FIRST_S,
    REAL,
    SIMULATED,
    SMOKE,
    TEXT,
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
VLLM_READY_S = 300.0

Record = dict[str, Any]
Watched = dict[str, list[int]]


@dataclass
class Vllm:
    """Real servers, each in a process group of its own, as the end-to-end tests start them."""

    python: Path
    stack: ExitStack
    logs: Path

    def start(self, *roles: str) -> list[Any]:
        from tests.e2e.servers import vllm

        servers = [vllm(role, self.python, self.logs) for role in roles]
        for server in servers:
            self.stack.callback(server.stop)
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
            for _, url, _ in running.values():  # connections are opened, and parsers loaded, before it counts
                uvloop.run(Load(url, CHAT, 2, 8, 4).run(READY_S))
            for turn, cell in enumerate(cells):
                # Each way is first once: whoever follows another finds the machine warm, and others at work.
                for mode, url, program in _from(list(running.values()), turn):
                    # What does not stream, and has no time to end, has nothing to tell.
                    if not self.over() and (mode.streams or cell.length < 4096):
                        self._measure(cell, mode, url, program, watched)
            if site == "vLLM":
                self._beside(workers, {name: url for name, (_, url, _) in running.items()}, watched)
            self.programs.stop(*(program for _, _, program in running.values()))

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
            service = self.vllm.start("render")[0] if self.vllm is not None else None
            watched: Watched = {} if service is None else {"service": [service.pid]}
            workers = Workers(**named, derender=service and service.url, model=str(MODEL), max_model_len=8192)
            return workers, watched, self.cores
        assert self.vllm is not None, "real workers are asked for where there is a vLLM alone"
        render, prefill, decode, service = self.vllm.start("render", "prefill", "decode", "render")
        workers = Workers(render.url, prefill.url, decode.url, service.url, str(MODEL), 4096)
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
        self, cell: Cell, mode: Mode, url: str, program: subprocess.Popen[bytes], watched: Watched
    ) -> None:
        load = Load(url, CHAT, cell.clients, cell.length, cell.requests, cell.begin_s)
        with self.noting(site=cell.site, mode=mode.name, clients=cell.clients, length=cell.length) as record:
            parsers = {"parsers": children(program.pid)} if mode.parses_here else {}
            coordinator = ProcessTree(program.pid).pids
            record.update(run_loads([(load, cell.limit_s)], {"coordinator": coordinator, **parsers, **watched})[0])

    def _beside(self, workers: Workers, urls: dict[str, str], watched: Watched) -> None:
        """Ask the decode worker itself for tokens, alone and beside clients of some modes."""
        for name in (None, COUPLED, TEXT, INLINE):
            if self.over() or (name is not None and name not in urls):
                continue
            tokens = Load(workers.decode, GENERATE, TOKENS_CLIENTS, TOKENS_LENGTH, TOKENS_REQUESTS)
            loads = [(tokens, 40.0)]
            if name is not None:
                loads.append((Load(urls[name], CHAT, TOKENS_CLIENTS, TOKENS_LENGTH, 10_000), 0.0))
            with self.noting(site="vLLM", tokens_beside=name or "nothing") as record:
                record.update(run_loads(loads, watched)[0])

    def over(self) -> bool:
        return time.monotonic() > self.ends_at

    @contextlib.contextmanager
    def noting(self, **facts: Any) -> Iterator[Record]:
        record: Record = dict(facts)
        yield record
        self.records.append(record)
        shown = {key: record.get(key) for key in ("ok", "cut", "errors", "error", "ttft_ms", "tpot_ms", "cpu_us")}
        print(*facts.values(), shown, file=sys.stderr, flush=True)


def _from(modes: list[Any], turn: int) -> list[Any]:
    """Return the modes in their order, beginning with another one each turn."""
    first = turn % max(len(modes), 1)
    return modes[first:] + modes[:first]


def run_loads(loads: Sequence[tuple[Load, float]], watched: Watched) -> list[Record]:
    """Run loads together until the first has ended; return what each saw, and the CPU time per token of the first.

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
    tokens = sum(each["tokens"] for each in told)
    told[0]["cpu_us"] = {name: round((after[name] - before[name]) / 1e3 / max(tokens, 1), 1) for name in before}
    return told


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--budget-s", type=float, default=1110.0, help="begin nothing new after this (default 1110)")
    parser.add_argument("--sites", nargs="+", choices=["simulator", "vLLM"], default=["simulator", "vLLM"])
    names = [mode.name for mode in MODES]
    parser.add_argument("--modes", nargs="+", choices=names, metavar="MODE", help=f"all by default: {', '.join(names)}")
    parser.add_argument("--clients", nargs="+", type=int, help="only rows with so many clients")
    parser.add_argument("--lengths", nargs="+", type=int, help="only rows with answers of so many tokens")
    parser.add_argument("--smoke", action="store_true", help="tiny counts, no vLLM: does all of it work?")
    parser.add_argument("--no-pin", action="store_true", help="do not give the coordinator a core of its own")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for RFC_LATENCY.md and results/")
    return parser.parse_args()


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, and return everything that the report needs."""
    began = time.monotonic()
    facts = {"machine": machine(), "versions": versions(), "date": datetime.now(UTC).isoformat(timespec="minutes")}
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
    with tempfile.TemporaryDirectory(prefix="bench-") as name, Programs(Path(name)) as programs, ExitStack() as stack:
        vllm = None if options.smoke else Vllm(_python(), stack, Path(name))
        bench = Bench(programs, Cores.split(not options.no_pin), time.monotonic() + options.budget_s, vllm)
        # The longest simulated answers last: a budget that ends leaves them out, and not the real workers.
        bench.site("simulator", [cell for cell in simulated if cell.length < 4096], modes)
        if vllm is not None:
            bench.site("vLLM", real, modes)
        bench.site("simulator", [cell for cell in simulated if cell.length >= 4096], modes)
        over = bench.over()
    return {
        **facts,
        "command": shown_command("make bench-rfc"),
        "stopped": f"the {options.budget_s:g} s were spent" if over else None,
        "wall_s": round(time.monotonic() - began, 1),
        "left_out": bench.left_out,
        "records": bench.records,
    }


def _python() -> Path:
    """Return the interpreter of the end-to-end tests' vLLM, which is built where it is missing (two minutes)."""
    from tests.e2e import vllm_env

    return vllm_env.ensure(vllm_env.DEFAULT_VERSION)


def main() -> int:
    results = recorded(run, parse(), "rfc.json", rfc_report.write)
    return int(any(record.get("errors") for record in results["records"]))


if __name__ == "__main__":
    sys.exit(main())
