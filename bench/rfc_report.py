"""What ``bench.rfc`` found, for people: RFC_LATENCY.md with its tables and plots, and what they show in sentences.

``python -m bench.rfc_report`` writes both anew from ``results/rfc.json``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.rfc_cells import COUPLED, INLINE, KEPT, LEFT_OUT, MODES, SERVICE, SIMULATED_ITL_S, TEXT, TEXT_HERE
from bench.rfc_load import WINDOW

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Record = dict[str, Any]

ORDER = [mode.name for mode in MODES]
SITES = {
    "simulator": f"Simulated workers, a token every {SIMULATED_ITL_S * 1e3:g} ms for each stream",
    "vLLM": "Real vLLM 0.33 workers on CPU, a model of 4 MB",
}
HEAD = (
    "| clients | how | first token, ms: p50 | p99 | per output token, ms: p50 | p99 | whole answer, ms: p50 "
    "| tokens/s | coordinator, µs/token |"
)
LONG = 4096  # tokens: answers that have a pace at both ends
PACE = f" first {WINDOW}, and last {WINDOW} events, ms each: p50 |"
FRONT_END = " worker's front end, µs/token |"
SERVED = " derender service, µs/token |"
BESIDE = "| beside | first token, ms: p50 | p99 | per output token, ms: p50 | p99 | whole answer, ms: p50 | p99 |"


def write(results: dict[str, Any], folder: Path, *, plots: bool) -> str:
    """Write the report, and return it."""
    drawn = _plots(results["records"], folder / "results") if plots else []
    records = _marked(results)
    text = "\n".join((*_head(results), *_tables(records, drawn), *_shows(records), *_cut(records), *_tail(results)))
    (folder / "RFC_LATENCY.md").write_text(text + "\n")
    return text


def _marked(results: dict[str, Any]) -> list[Record]:
    """Return the records, each with the mark of its run, where there were several."""
    runs = [run["date"] for run in results["runs"]]
    marks = {date: f" [{number}]" if len(runs) > 1 else "" for number, date in enumerate(runs, 1)}
    return [{**record, "mark": marks[record["run"]]} for record in results["records"]]


def _head(results: dict[str, Any]) -> Iterator[str]:
    yield "# The RFC's latency table\n"
    yield "Who turns tokens into text, and what it costs: what section 12 of the RFC on `output_mode` compares."
    yield "Each client asks for a streamed chat answer, with thinking and tools, and asks again when it has it.\n"
    yield "| how | |\n| :-- | :-- |"
    yield from (f"| {mode.name} | {mode.does} |" for mode in MODES)
    if len(results["runs"]) > 1:
        yield "\nSeveral runs; each row has the number of its own behind the way."
    for number, run in enumerate(results["runs"], 1):
        yield from _run(run, f"[{number}] " if len(results["runs"]) > 1 else "")
    yield "\nFirst token: from the request's last byte to the first content that the client reads; parsers show nothing"
    yield "of `<think>` itself, so parsed streams begin a few tokens later. Per output token: from the first content to"
    yield "the last, over the number of tokens less one, which flatters parsed streams by those few. CPU time is that"
    yield "of whole processes; that of parsers in processes of the coordinator's own stands behind a plus. Streams that"
    yield "were cut did not tell how many tokens they had: they are counted by their events, one of which may hold many"
    yield "tokens where a way falls behind, so their rows may show too few tokens a second, and too much time for each;"
    yield f"those of `{INLINE}`, which have no events, by the worker's own count."


def _run(run: dict[str, Any], mark: str) -> Iterator[str]:
    machine, why = run["machine"], run["failed"] or run["stopped"]
    yield f"\n{mark}{run['date']}, commit {run['versions']['commit']}: `{run['command']}`, {run['wall_s']:,.0f} s"
    yield (
        f"on {machine['cores']} cores of {machine['cpu']}, Python {machine['python']}; load before it: "
        f"{machine['load_before']:.1f}." + (f" It ended early: {why}." if why else "")
    )
    if machine["load_before"] > 0.5:
        yield "The machine was not quiet, so trust the CPU times, and run it again before you use times on the clock."


def _tables(records: Sequence[Record], drawn: Sequence[str]) -> Iterator[str]:
    for site, title in SITES.items():
        mine = [record for record in records if record.get("site") == site and "mode" in record]
        if not mine:
            continue
        yield f"\n## {title}"
        for length in sorted({record["length"] for record in mine}):
            yield f"\n### Answers of {length:,} tokens\n"
            heads = [*((PACE,) if length >= LONG else ()), *((FRONT_END,) if site == "vLLM" else ()), SERVED]
            yield HEAD + "".join(heads)
            yield "| --: | :-- |" + " --: |" * (7 + len(heads))
            rows = [record for record in mine if record["length"] == length]
            for record in sorted(rows, key=lambda row: (row["clients"], ORDER.index(row["mode"]))):
                yield _row(record)
        yield from (f"\n![{name}](results/{name}.png)" for name in drawn if name.startswith(f"rfc-{site}"))
    beside = [record for record in records if "tokens_beside" in record]
    if beside:
        yield "\n## `tokens` requests on the same pod\n"
        yield "Streams in tokens mode from the decode worker itself, and as many chat clients of one way beside them.\n"
        yield BESIDE + FRONT_END
        yield "| :-- |" + " --: |" * 7
        for record in beside:
            cells = [_shown(record, name, at) for name in ("ttft_ms", "tpot_ms", "whole_ms") for at in ("p50", "p99")]
            cells.append(f"{record['cpu_us']['front end']:,.0f}")
            yield f"| {record['tokens_beside']}{record['mark']} | {' | '.join(cells)} |"


def _row(record: Record) -> str:
    streams = record["mode"] != INLINE
    cpu = record.get("cpu_us") or {}
    cells = [_shown(record, "ttft_ms", "p50"), _shown(record, "ttft_ms", "p99")]
    cells += [_shown(record, "tpot_ms", at) if streams else "-" for at in ("p50", "p99")]
    cells += [_shown(record, "whole_ms", "p50") + (f" ({record['cut']} cut)" if record.get("cut") else "")]
    cells += [f"{record['tokens'] / record['wall_s']:,.0f}" if record.get("wall_s") else "-"]
    if record["length"] >= LONG:
        cells += [" and ".join(_shown(record, name, "p50") for name in ("early_ms", "late_ms")) if streams else "-"]
    if record["mode"] != SERVICE:
        cpu = {name: us for name, us in cpu.items() if name != "service"}
    names = ["coordinator", *(("front end",) if record["site"] == "vLLM" else ()), "service"]
    shown = {name: f"{us:,.0f}" for name, us in cpu.items()}
    if "parsers" in shown:
        shown["coordinator"] += f" + {shown['parsers']}"
    cells += [shown.get(name, "-") for name in names]
    return f"| {record['clients']} | {record['mode']}{record['mark']} | {' | '.join(cells)} |"


def _shown(record: Record, name: str, at: str) -> str:
    value = (record.get(name) or {}).get(at)
    return "-" if value is None else f"{value:,.1f}"


def _shows(records: Sequence[Record]) -> Iterator[str]:
    """Say what the numbers say, of this run, also where we lose."""
    yield "\n## What it shows\n"
    for site, title in SITES.items():
        rows = {(r["mode"], r["clients"], r["length"]): r for r in records if r.get("site") == site and "mode" in r}
        lines = [line for mode in ORDER if mode != COUPLED for line in _against(rows, mode)]
        if lines:
            yield f"{title}, each against the chat route with as many clients and tokens, median (range) of rows:\n"
            yield from lines
            yield ""
        yield from _by_length(rows)
        yield from _by_position(rows)
        yield from _render_saved(rows)
    alone = next((r for r in records if r.get("tokens_beside") == "nothing"), None)
    for record in (r for r in records if r.get("tokens_beside") not in (None, "nothing")):
        if alone is not None and (ratio := _ratio(record, alone, "whole_ms")) is not None:
            beside = record["tokens_beside"]
            yield f"- A whole `tokens` stream takes {ratio:.2f} times as long beside clients of {beside}."


def _against(rows: dict[tuple[str, int, int], Record], mode: str) -> Iterator[str]:
    """Say how a mode's first token, tokens and CPU time compare, over all cells that have both."""
    of_mode = {key[1:]: row for key, row in rows.items() if key[0] == mode}
    pairs = [(row, rows[COUPLED, *key]) for key, row in of_mode.items() if (COUPLED, *key) in rows]
    if not pairs:
        return
    told = []
    for name, words in (("ttft_ms", "first token"), ("tpot_ms", "each further token")):
        if mode == INLINE and name == "tpot_ms":
            continue
        found = [ratio for ours, theirs in pairs if (ratio := _ratio(ours, theirs, name)) is not None]
        if found:
            told.append(f"{words} {_range(found)} times as {'late' if name == 'ttft_ms' else 'long'}")
    cpu = [_our_cpu(ours) / _our_cpu(theirs) for ours, theirs in pairs if _our_cpu(ours) and _our_cpu(theirs)]
    if cpu:
        told.append(f"{_range(cpu)} times the coordinator's CPU time")
    cut = sum(ours.get("cut") or 0 for ours, _ in pairs)
    unfinished = f"; answers that were not done in time: {cut}" if cut else ""
    yield f"- **{mode}**: {', '.join(told)}{unfinished}."


def _by_length(rows: dict[tuple[str, int, int], Record]) -> Iterator[str]:
    """Say how the price of a parsed token goes with an answer's length, for one client."""
    kinds = ((SERVICE, "service", "The derender service"), (KEPT, "parsers", "The coordinator's parsers"))
    for mode, of, words in kinds:
        told = [
            f"{row['cpu_us'][of]:,.0f} µs at {length:,}" + (f" (cut at {row['tokens']:,})" if row.get("cut") else "")
            for (name, clients, length), row in sorted(rows.items(), key=lambda item: item[0][2])
            if name == mode and clients == 1 and of in (row.get("cpu_us") or {})
        ]
        if len(told) > 1:
            yield f"{words}, CPU time per token by the answer's length, one client: {', '.join(told)}.\n"


def _by_position(rows: dict[tuple[str, int, int], Record]) -> Iterator[str]:
    """Say how an answer's pace goes with its length, as its client sees it."""
    told = []
    for mode in ORDER:
        long = [row for key, row in rows.items() if key[0] == mode and key[2] >= LONG]
        paces = [tuple((row.get(name) or {}).get("p50") for name in ("early_ms", "late_ms")) for row in long]
        grown = [late / early for early, late in paces if early and late]
        if grown:
            told.append(f"{mode} {_range(grown)}")
    if told:
        yield (
            f"Time per event among the last {WINDOW} of an answer of {LONG:,} tokens over that among the first (over "
            f"halves, where fewer came before the cut), median (range) of rows: {', '.join(told)}.\n"
        )


def _cut(records: Sequence[Record]) -> Iterator[str]:
    """Say which answers were cut, how far they were, and how long whole ones would take."""
    cut = [record for record in records if record.get("cut") and "mode" in record]
    if not cut:
        return
    yield "\n## Where answers were cut, and why\n"
    yield "A row has a time, which bounds the run; longer answers were cut there. By the pace of each at its end:\n"
    for record in sorted(cut, key=lambda row: (row["site"], row["length"], ORDER.index(row["mode"]), row["clients"])):
        count = record["cut"] + record["ok"]
        cell = f"{record['site']}, {record['length']:,} tokens, clients: {record['clients']}, **{record['mode']}**"
        each = record["tokens"] / count
        pace_s = (record.get("late_ms") or {}).get("p50", 0) / 1e3 or record["wall_s"] / max(each, 1)
        whole_s = record["wall_s"] + max(record["length"] - each, 0) * pace_s
        whole = "" if record["ok"] else f"; a whole one takes {whole_s:,.0f} s or more"
        yield f"- {cell}: {record['cut']} of {count}, after {record['limit_s']:g} s and {each:,.0f} tokens each{whole}."


def _our_cpu(record: Record) -> float:
    """Return the CPU time per token of the coordinator, with its parsers."""
    cpu = record.get("cpu_us") or {}
    return float(cpu.get("coordinator", 0.0)) + float(cpu.get("parsers", 0.0))


def _render_saved(rows: dict[tuple[str, int, int], Record]) -> Iterator[str]:
    keys = [key[1:] for key in rows if key[0] == TEXT_HERE and key[1] == 1 and (TEXT, *key[1:]) in rows]
    saved = [
        rows[TEXT, *key]["ttft_ms"]["p50"] - rows[TEXT_HERE, *key]["ttft_ms"]["p50"]
        for key in sorted(keys)
        if rows[TEXT, *key].get("ttft_ms") and rows[TEXT_HERE, *key].get("ttft_ms")
    ]
    if saved:
        low, mid, high = min(saved), median(saved), max(saved)
        yield (
            f"Rendering in the coordinator brings the first token of one client sooner by {mid:.1f} ms "
            f"({low:.1f} to {high:.1f}), median of the rows' p50.\n"
        )


def _ratio(ours: Record, theirs: Record, name: str) -> float | None:
    a, b = (ours.get(name) or {}).get("p50"), (theirs.get(name) or {}).get("p50")
    return a / b if a and b else None


def _range(values: Sequence[float]) -> str:
    low, mid, high = (f"{value:.2f}" for value in (min(values), median(values), max(values)))
    return mid if low == high else f"{mid} ({low} to {high})"


def _tail(results: dict[str, Any]) -> Iterator[str]:
    yield "\n## What was left out, and why\n"
    yield from (f"- {sentence}" for sentence in LEFT_OUT)
    yield from (f"- {mode}: {why}." for mode, why in results["left_out"].items())
    failed = [record for record in results["records"] if record.get("errors")]
    if failed:
        yield "\n## What did not work\n"
        for record in failed:
            known = ("site", "mode", "tokens_beside", "clients", "length")
            facts = " ".join(str(record[key]) for key in known if key in record)
            yield f"- {facts}: {record['errors']} errors, such as {record['error']}"


def _plots(records: Sequence[Record], folder: Path) -> list[str]:
    """Draw first token, time per token and CPU time over the number of clients, a picture for each site."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = []
    for site, title in SITES.items():
        mine = [record for record in records if record.get("site") == site and "mode" in record]
        lengths = sorted({record["length"] for record in mine})
        if not lengths:
            continue
        kinds = (("ttft_ms", "first token, ms"), ("tpot_ms", "per token, ms"), ("cpu_us", "coordinator, µs/token"))
        figure, axes = pyplot.subplots(len(kinds), len(lengths), figsize=(4.2 * len(lengths), 9), squeeze=False)
        for column, length in enumerate(lengths):
            for row, (name, words) in enumerate(kinds):
                _draw(axes[row][column], [r for r in mine if r["length"] == length], name, words, f"{length:,} tokens")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncols=3)
        figure.suptitle(title)
        figure.tight_layout(rect=(0, 0.07, 1, 1))
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / f"rfc-{site}.png", dpi=90)
        pyplot.close(figure)
        drawn.append(f"rfc-{site}")
    return drawn


def _draw(axis: Any, records: Sequence[Record], name: str, words: str, title: str) -> None:
    at = "coordinator" if name == "cpu_us" else "p50"
    for mode in ORDER:
        mine = [record for record in records if record["mode"] == mode and (record.get(name) or {}).get(at)]
        if name == "tpot_ms" and mode == INLINE:
            mine = []
        points = sorted((record["clients"], record[name][at]) for record in mine)
        axis.plot([x for x, _ in points], [y for _, y in points], marker="o", label=mode)
    axis.set(title=title, xlabel="clients", ylabel=words, xscale="log", yscale="log")
    counts = sorted({record["clients"] for record in records})
    axis.set_xticks(counts, labels=[str(count) for count in counts], minor=False)
    axis.set_xticks([], minor=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    folder = parser.parse_args().out
    write(json.loads((folder / "results" / "rfc.json").read_text()), folder, plots=True)


if __name__ == "__main__":
    main()
