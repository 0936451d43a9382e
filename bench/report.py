"""What a run found, for people: RESULTS.md with tables, and a plot for each of them.

``python -m bench.report`` writes both anew from ``results/runs.json``.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.scenarios import (
    COORDINATOR,
    COORDINATOR_2,
    COORDINATOR_INFO,
    DIRECT,
    ORJSON,
    PEERS,
    TOKENS_IN,
    TOKENS_IN_INFO,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Record = dict[str, Any]
Value = float | None

TWO_LEGS = (COORDINATOR, *PEERS)
THREE_LEGS = (TOKENS_IN, *PEERS)


@dataclass(frozen=True)
class Column:
    """A value of a record: a path such as ``chunk_us.p99``, and how it is shown."""

    title: str
    path: str
    digits: int = 1

    def of(self, record: Record) -> Value:
        value: Any = record
        for name in self.path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def shown(self, values: Sequence[float]) -> str:
        if not values:
            return "-"
        low, mid, high = (f"{value:,.{self.digits}f}" for value in (min(values), median(values), max(values)))
        return mid if low == high else f"{mid} ({low} to {high})"


@dataclass(frozen=True)
class Table:
    """One question, and the records that answer it.

    Attributes:
        file: name of the plot.
        price: what is compared and plotted; less is better.
        reference: whose price the others' is divided by, round by round; None compares with ``against`` alone.
        against: another column of the same record, or a proxy's same column, that each price is divided by.
    """

    file: str
    title: str
    text: str
    scenario: str
    price: Column
    rows: tuple[str, ...]
    reference: str | None
    more: tuple[Column, ...] = ()
    against: Column | str | None = None
    against_title: str = ""
    only: Callable[[Record], bool] = lambda record: True


_REQUEST = (
    Column("requests/s", "per_s", 0),
    Column("answer p50, ms", "request_ms.p50", 2),
    Column("answer p99, ms", "request_ms.p99", 2),
)
_CHUNK = (
    Column("chunk p50, µs", "chunk_us.p50", 0),
    Column("chunk p99, µs", "chunk_us.p99", 0),
    Column("chunks per read", "chunks_per_read", 2),
    Column("CPU of a whole stream, µs", "cpu_us_per_request", 0),
)
_CPU_CHUNK = Column("CPU per chunk, µs", "cpu_us_per_chunk", 2)
_CPU_REQUEST = Column("CPU per request, µs", "cpu_us_per_request", 0)
_CPU_MB = Column("CPU per MB of prompt, ms", "cpu_ms_per_mb", 2)
_RSS = Column("memory, MiB", "rss_mib", 1)


def prompt(name: str, size: str) -> Table:
    return Table(
        name,
        f"A prompt of {size}",
        f"A whole answer of 50 tokens to a conversation of {size}, as above. A megabyte is 1,000,000 bytes of the "
        "client's body, and the last column compares with orjson reading and writing these bytes once, in the same "
        "round: what a proxy costs at least that reads a body in order to change it. The tokens-in coordinator sends a "
        "list of a quarter as many token ids in place of the text, twice.",
        name,
        _CPU_MB,
        (COORDINATOR, TOKENS_IN, *PEERS),
        COORDINATOR,
        (Column("answer p50, ms", "request_ms.p50", 2),),
        ORJSON,
        "× one orjson loads + dumps",
    )


def idle(streams: int) -> Table:
    return Table(
        f"idle-{streams}",
        f"Memory of {streams:,} silent streams",
        f"{streams:,} streams are opened through a proxy that has just started and served 200 requests, and stay "
        "silent after their first token: what its resident memory grew by, for each.",
        "idle",
        Column("memory per stream, KiB", "rss_kib_per_stream", 1),
        (COORDINATOR, TOKENS_IN, *PEERS),
        COORDINATOR,
        (_RSS,),
        only=lambda record: record["streams"] == streams,
    )


TABLES = (
    Table(
        "relayed-chunk",
        "A relayed chunk",
        "64 streams at a time, 100 tokens a second each, 200 tokens long, on the client's own path. CPU time is taken "
        "from tokens 20 to 180 of each stream, so that a chunk is counted and not the request around it; the whole "
        "stream's is in the last column. The latency of a chunk is from the worker's write to the generator's read. A "
        "proxy that is behind reads and writes several chunks at once, which is cheaper: chunks per read says so.",
        "chunk",
        _CPU_CHUNK,
        (*TWO_LEGS, DIRECT),
        COORDINATOR,
        _CHUNK,
    ),
    Table(
        "rebuilt-chunk",
        "A rebuilt chunk",
        "The same load on the coordinator with tokens in and `wrap: all`: it asks the worker's generate route for text "
        "and makes each chunk into the one that a chat client expects. The others relay, as before: none of them does "
        "this.",
        "chunk",
        _CPU_CHUNK,
        (*THREE_LEGS, DIRECT),
        TOKENS_IN,
        _CHUNK,
    ),
    Table(
        "two-legs",
        "A whole answer, two legs",
        "32 connections ask for an answer of 50 tokens as fast as they are answered. nginx makes one leg only.",
        "unary",
        _CPU_REQUEST,
        (COORDINATOR, COORDINATOR_INFO, *PEERS),
        COORDINATOR,
        _REQUEST,
    ),
    Table(
        "three-legs",
        "A whole answer, three legs",
        "The same load on the coordinator with a render leg, token ids, and answers that are rebuilt as chat; the "
        "others make two legs (nginx one) and rebuild nothing.",
        "unary",
        _CPU_REQUEST,
        (TOKENS_IN, TOKENS_IN_INFO, *PEERS),
        TOKENS_IN,
        _REQUEST,
    ),
    Table(
        "processes",
        "Two processes",
        "64 connections ask for an answer of 50 tokens, of one process on one core, and of `server.workers: 2`: "
        "half the time per request is twice the throughput. Two processes have two cores to themselves where there "
        "are four or more. On fewer, generator and workers need their share of the same cores, and CPU per request "
        "is what tells: where it is the same, a second core is worth as much as the first.",
        "workers",
        Column("time per request, µs", "wall_us_per_request", 0),
        (COORDINATOR, COORDINATOR_2),
        COORDINATOR,
        (Column("requests/s", "per_s", 0), _CPU_REQUEST, Column("answer p99, ms", "request_ms.p99", 2)),
    ),
    Table(
        "burst",
        "A burst of 64",
        "64 new connections at once, each with one stream; three bursts a round. The time to the first token, from "
        "before the connection is opened.",
        "burst",
        Column("first token p50, ms", "first_token_ms.p50", 1),
        (COORDINATOR, TOKENS_IN, *PEERS, DIRECT),
        COORDINATOR,
        (Column("first token p99, ms", "first_token_ms.p99", 1), _CPU_REQUEST),
    ),
    Table(
        "streams",
        "A thousand streams at a time",
        "1,000 streams are opened at once, of 200 tokens each at 20 tokens a second: 20,000 chunks a second for ten "
        "seconds, in one round. A stream that does not bring each of its tokens and its end is an error; a run with "
        "one is told at the end and not here. Memory is the most that was seen while they ran.",
        "streams",
        Column("CPU, of one core", "cpu_of_a_core", 2),
        (COORDINATOR, TOKENS_IN),
        None,
        (
            Column("whole streams", "ok", 0),
            Column("memory, MiB", "marks_rss_mib", 1),
            Column("chunk p50, µs", "chunk_us.p50", 0),
            Column("chunk p99, µs", "chunk_us.p99", 0),
            Column("first token p99, ms", "first_token_ms.p99", 1),
        ),
    ),
    prompt("prompt-64k", "64 KB"),
    prompt("prompt-1m", "1 MB"),
    Table(
        "long-stream",
        "Late in a long stream",
        "Four streams of 9,200 tokens, 2,000 a second each: CPU per chunk from the 8,000th to the 8,800th, and how it "
        "compares with what chunks 100 to 900 of the same streams cost. All four run on behind that: a chunk of fewer "
        "streams costs more, since each is woken for alone.",
        "long",
        Column("CPU per chunk from 8,000 on, µs", "cpu_us_per_chunk_late", 2),
        (COORDINATOR, TOKENS_IN, "nginx", "vllm-router"),
        None,
        (Column("CPU per chunk from 100 on, µs", "cpu_us_per_chunk", 2),),
        Column("", "cpu_us_per_chunk"),
        "× its own early chunks",
    ),
    idle(1_000),
    idle(5_000),
    Table(
        "start",
        "Start to ready",
        "From the start of the process to its first whole answer, asked for every 5 ms, and the resident memory then.",
        "start",
        Column("ready, s", "ready_s", 2),
        (COORDINATOR, TOKENS_IN, *PEERS),
        COORDINATOR,
        (_RSS,),
    ),
)


class Found:
    """The records of one table."""

    def __init__(self, table: Table, records: Iterable[Record]) -> None:
        self.table = table
        self._good = [
            record
            for record in records
            if record["scenario"] == table.scenario
            and not record.get("error")
            and (record["proxy"] == ORJSON or table.only(record))
        ]

    def values(self, proxy: str, column: Column) -> dict[int, float]:
        """Return a proxy's values by round."""
        found = {record["round"]: column.of(record) for record in self._good if record["proxy"] == proxy}
        return {number: value for number, value in found.items() if value is not None}

    def proxies(self) -> list[str]:
        names = {record["proxy"] for record in self._good}
        return [name for name in self.table.rows if name in names]

    def ratios(self, proxy: str, other: str, column: Column | None = None) -> list[float]:
        """Return by how much a price exceeds another, in each round that has both."""
        mine, theirs = self.values(proxy, self.table.price), self.values(other, column or self.table.price)
        return [mine[number] / theirs[number] for number in sorted(mine) if theirs.get(number)]


def markdown(table: Table, found: Found, plotted: bool) -> list[str]:
    heads = ["", table.price.title]
    if table.reference is not None:
        heads.append(f"× {table.reference}, min / median / max")
    if table.against is not None:
        heads.append(f"{table.against_title}, min / median / max")
    heads += [column.title for column in table.more]
    out = [f"## {table.title}", "", table.text, ""]
    out += [_row(heads), _row([":--", *["--:"] * (len(heads) - 1)])]
    for name in found.proxies():
        cells = [name, table.price.shown([*found.values(name, table.price).values()])]
        if table.reference is not None:
            cells.append("1" if name == table.reference else _ratio(found.ratios(name, table.reference)))
        if isinstance(table.against, Column):
            cells.append(_ratio(found.ratios(name, name, table.against)))
        elif table.against is not None:
            cells.append(_ratio(found.ratios(name, table.against)))
        cells += [column.shown([*found.values(name, column).values()]) for column in table.more]
        out.append(_row(cells))
    if plotted:
        out += ["", f"![{table.title}](results/{table.file}.png)"]
    return [*out, ""]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _ratio(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return " / ".join(f"{value:.2f}" for value in (min(values), median(values), max(values)))


def head(results: dict[str, Any]) -> list[str]:
    machine, versions = results["machine"], results["versions"]
    pinned = "the measured proxy has one core for itself" if results["pinned"] else "nothing is pinned to a core"
    memory = " ".join(f"{name}={value}" for name, value in results["environment"].items())
    rounds = "1 round" if results["rounds"] == 1 else f"{results['rounds']} rounds"
    out = [
        "# Results",
        "",
        f"`{results['command']}` on {results['date']}, {rounds} in {results['wall_s']:.0f} s.",
        f"Machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, Linux {machine['kernel']}, "
        f"Python {machine['python']}; {pinned}; load average before the run {machine['load_before']:.2f}.",
        f"Versions: {', '.join(f'{name} {value}' for name, value in versions.items())}.",
        "",
    ]
    if results["stopped"]:
        out += [f"**Not complete:** {results['stopped']}; the rounds that are missing count for nobody.", ""]
    out += [
        "Each round runs every load on every proxy, one right after the other. "
        "A ratio is that of two proxies in one round; above 1, the proxy of the row costs more. "
        "Absolute figures are the median over the rounds, with the least and the most. "
        "CPU time is user and kernel time of all the proxy's processes. "
        "Workers are stand-ins that answer at once ([`fake_worker.py`](fake_worker.py)), and every answer is checked."
        + (f" All ran with `{memory}`, for [huge pages](../docs/deploy.md#huge-pages)." if memory else ""),
        "",
        _row(["proxy", "version", "legs: render, prefill, decode", "what it does", "started by"]),
        _row([":--"] * 5),
    ]
    for name, proxy in results["proxies"].items():
        state = proxy["version"] or f"**missing**: {proxy['missing']}"
        legs = ", ".join(map(str, proxy["legs"]))
        out.append(_row([name, state, legs, proxy["does"], f"`{proxy['started']}`"]))
    return [*out, ""]


def tail(results: dict[str, Any]) -> list[str]:
    """Say what went wrong, and where the generator itself was the limit."""
    out = []
    records = results["records"]
    failed = [record for record in records if record.get("error")]
    if failed:
        out += ["## What did not work", "", "No figure above holds any of these.", ""]
        for record in failed:
            where = f"{record['scenario']}, {record['proxy']}, round {record['round'] + 1}"
            out.append(f"- {where}: {record.get('errors') or 'failed'}: {record['error']}")
        out.append("")
    busy = [record for record in records if (record.get("generator_busy") or 0) > 0.85]
    if busy:
        names = sorted({f"{record['scenario']} ({record['proxy']})" for record in busy})
        out += [
            f"The generator was more than 85 % busy, and so counts in latencies and rates, in: {', '.join(names)}.",
            "",
        ]
    return out


def plot(table: Table, found: Found, path: Path) -> bool:
    """Draw the medians as bars, with a line from the least to the most; False where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in found.proxies() if found.values(name, table.price)]
    figure, axes = pyplot.subplots(figsize=(8, 0.45 * len(names) + 1.3), layout="constrained")
    for at, name in enumerate(reversed(names)):
        values = [*found.values(name, table.price).values()]
        mid = median(values)
        reach = [[mid - min(values)], [max(values) - mid]]
        color = "#1f6feb" if name.startswith(COORDINATOR) else "#9aa4ae"
        axes.barh(at, mid, color=color, xerr=reach, ecolor="#24292f", capsize=3, height=0.65)
        axes.annotate(f" {mid:,.{table.price.digits}f}", (max(values), at), va="center", fontsize=9)
    axes.set_yticks(range(len(names)), list(reversed(names)))
    axes.set_xlabel(f"{table.price.title}: median, least and most; less is better")
    axes.set_title(table.title, loc="left")
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def write(results: dict[str, Any], out: Path, *, plots: bool = True) -> str:
    """Write RESULTS.md and the plots; return a sentence about it."""
    text = head(results)
    plotted = 0
    for table in TABLES:
        found = Found(table, results["records"])
        if not any(found.values(name, table.price) for name in found.proxies()):
            continue
        drawn = plots and plot(table, found, out / "results" / f"{table.file}.png")
        plotted += drawn
        text += markdown(table, found, drawn)
    path = out / "RESULTS.md"
    path.write_text("\n".join([*text, *tail(results)]).rstrip() + "\n")
    missing = " (matplotlib is missing: pip install '.[bench]')" if plots and not plotted else ""
    return f"{path.name} and {plotted} plots are written{missing}"


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    options = parser.parse_args()
    print(write(json.loads((options.out / "results" / "runs.json").read_text()), options.out))


if __name__ == "__main__":
    main()
