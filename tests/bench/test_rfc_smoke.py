"""The RFC's latency table works: a tiny run on simulated workers, and what its report says; no word about times."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from bench import rfc_report
from bench.rfc import NOTHING, merged
from bench.rfc_cells import (
    COUPLED,
    ENGINE,
    INLINE,
    KEPT,
    MAX_MODEL_LEN,
    MODES,
    REAL,
    SERVICE,
    SIMULATED,
    TEXT,
    TEXT_HERE,
    Workers,
)
from bench.rfc_load import CHAT, WINDOW, Load, Seen
from bench.run import commit
from coordinator import app, registry
from coordinator.cli import NoEvents
from coordinator.config import load

ROOT = Path(__file__).resolve().parents[2]
FIELDS = {"ok", "cut", "errors", "error", "tokens", "wall_s", "limit_s", "run", "cpu_us",
          "ttft_ms", "tpot_ms", "early_ms", "late_ms", "whole_ms"}  # fmt: skip
MODEL = str(ROOT / "tests" / "data" / "tiny-model")
WORKERS = Workers("http://r:1", "http://p:1", "http://d:1", "http://s:1", MODEL, 4096)


@pytest.mark.timeout(900)  # it computes all the while
def test_a_tiny_run_measures_every_mode_that_needs_no_vllm(tmp_path: Path) -> None:
    args = [sys.executable, "-m", "bench.rfc", "--smoke", "--out", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(args, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results" / "rfc.json").read_text())
    seen = {(record["mode"], record["clients"]): record for record in results["records"]}
    without = {mode.name for mode in MODES if mode.needs_vllm}
    assert seen.keys() == {(mode.name, clients) for mode in MODES for clients in (1, 2) if mode.name not in without}
    assert results["left_out"].keys() == without
    for record in seen.values():
        assert record.keys() >= FIELDS
        assert (record["ok"], record["cut"], record["errors"], record["tokens"]) == (2, 0, 0, 16), record
        assert record["cpu_us"]["coordinator"] > 0
    text = (tmp_path / "RFC_LATENCY.md").read_text()
    assert "### Answers of 8 tokens" in text
    assert "## What it shows" in text
    assert "What did not work" not in text


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
async def test_the_configuration_of_each_mode_makes_an_application(mode: Any, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(json.dumps(mode.config(WORKERS, 8080)))
    config = load(str(file), {})
    assert registry.build(config, NoEvents()) if mode.parses_here else app.build(config)  # vLLM's parsers are not here


def test_the_table_has_the_rfc_s_rows() -> None:
    """Every way but the one beside what was asked for is in every cell of both sites."""
    for site, cells in ("simulator", SIMULATED), ("vLLM", REAL):
        rows = sorted((cell.length, cell.clients) for cell in cells)
        assert rows == [(length, clients) for length in (64, 512, 4096) for clients in (1, 8, 32, 64)], site
        for cell in cells:
            assert {mode.name for mode in MODES if not cell.measures(mode)} <= {TEXT_HERE}


def test_the_real_workers_hold_all_requests_of_a_cell_at_full_length() -> None:
    block, per_token = 32, 2 * 4 * 4 * 32 * 4  # keys and values, layers, heads, of so many numbers, in float32
    need = max(cell.clients * (cell.length + 512) for cell in REAL)
    assert int(ENGINE["kv_cache_memory_bytes"]) // (block * per_token) * block > need
    assert int(ENGINE["max_num_seqs"]) >= max(cell.clients for cell in REAL)
    assert MAX_MODEL_LEN >= 4096 + 512


async def test_a_stream_that_is_cut_or_refused_is_told_as_such() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        frame = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
        writer.write(b"%x\r\n%s\r\n" % (len(frame), frame))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server:
        load = Load(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", CHAT, 1, 8, 2)
        await load.run(10)
    told = load.told(1.0)
    assert (told["ok"], told["errors"], told["error"]) == (0, 2, "ConnectionError: the answer broke off")
    load.seen = [Seen(began=0.0, times=[1.0, 2.0], ended=2.0, events=3, tokens=7)]
    assert load.told(1.0)["error"] == "7 tokens came"
    load.seen = [Seen(began=0.0, times=[1.0, 3.0], events=5)]
    told = load.told(1.0)
    assert (told["ok"], told["cut"], told["tpot_ms"]) == (0, 1, {"p50": 500.0, "p99": 500.0})


def test_the_pace_of_an_answer_is_told_at_its_begin_and_at_its_end() -> None:
    slower = [0.01 * at for at in range(WINDOW)] + [100 + 0.05 * at for at in range(WINDOW)]
    seen = Seen(began=0.0, times=slower)
    assert (seen.gap_ms(late=False), seen.gap_ms(late=True)) == (pytest.approx(10), pytest.approx(50))
    seen.times = [0.0, 1.0, 5.0, 9.0]  # fewer: halves
    assert (seen.gap_ms(late=False), seen.gap_ms(late=True)) == (pytest.approx(1e3), pytest.approx(4e3))
    seen.times = [0.0, 1.0, 2.0]
    assert seen.gap_ms(late=True) is None


def test_a_run_keeps_the_rows_of_earlier_ones_that_it_lacks(tmp_path: Path) -> None:
    def ran(date: str) -> dict[str, Any]:
        machine = {"cores": 2, "cpu": "a CPU", "python": "3.11", "load_before": 0.0}
        facts = {"command": "make bench-rfc", "failed": None, "stopped": None, "wall_s": 1.0}
        return {"date": date, "machine": machine, "versions": {"commit": f"of {date}"}, **facts}

    def found(date: str, *records: dict[str, Any], left_out: dict[str, str] | None = None) -> Any:
        return Mock(records=[{**one, "run": date} for one in records], left_out=left_out or {})

    first = merged(NOTHING, found("1", record(TEXT, 1, 1, 1), record(COUPLED, 1, 1, 1),
                                  left_out={SERVICE: "no", KEPT: "no"}), ran("1"))  # fmt: skip
    second = merged(first, found("2", record(TEXT, 2, 2, 2), record(SERVICE, 2, 2, 2)), ran("2"))
    assert {(one["mode"], one["run"]) for one in second["records"]} == {(TEXT, "2"), (COUPLED, "1"), (SERVICE, "2")}
    assert [run["date"] for run in second["runs"]] == ["1", "2"]
    assert second["left_out"] == {KEPT: "no"}
    text = rfc_report.write(second, tmp_path, plots=False)
    assert f"| 8 | {TEXT} [2] |" in text
    assert f"| 8 | {COUPLED} [1] |" in text
    assert "[1] 1, commit of 1: `make bench-rfc`" in text
    third = merged(second, found("3", record(COUPLED, 3, 3, 3)), ran("3"))
    assert [run["date"] for run in third["runs"]] == ["2", "3"]


def test_the_commit_is_dirty_where_code_is_and_not_where_results_are(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)

    git("init", "-q")
    (tmp_path / "bench" / "results").mkdir(parents=True)
    files = [tmp_path / name for name in ("README.md", "bench/RESULTS.md", "bench/results/runs.json", "bench/run.py")]
    for file in files:
        file.write_text("a")
    git("add", ".")
    git("commit", "-qm", "a")
    for file in files[:3]:
        file.write_text("b")
    clean = commit(tmp_path)
    assert clean
    assert "dirty" not in clean
    files[3].write_text("b")
    assert commit(tmp_path) == f"{clean}-dirty"


def record(mode: str, ttft: float, tpot: float, cpu: float, **more: Any) -> dict[str, Any]:
    times = {"ttft_ms": {"p50": ttft, "p99": ttft}, "tpot_ms": {"p50": tpot, "p99": tpot}}
    counts = {"clients": 8, "length": 64, "tokens": 64, "wall_s": 1.0}
    return {"site": "vLLM", "mode": mode, **counts, **times, "cpu_us": {"coordinator": cpu}, **more}


def test_what_it_shows_is_told_from_the_numbers_also_where_we_lose() -> None:
    records = [record(COUPLED, 10, 5, 50), record(TEXT, 20, 10, 100), record(TEXT_HERE, 12, 5, 100),
               record(TEXT, 20, 10, 100, clients=1), record(TEXT_HERE, 12, 5, 100, clients=1),
               record(INLINE, 90, 0.01, 50), record(SERVICE, 10, 50, 100, cut=3),
               record(TEXT, 20, 10, 100, length=4096, early_ms={"p50": 10.0}, late_ms={"p50": 15.0}),
               {"tokens_beside": "nothing", "whole_ms": {"p50": 2.0}},
               {"tokens_beside": COUPLED, "whole_ms": {"p50": 3.0}}]  # fmt: skip
    for length, us in (64, 2000.0), (512, 8000.0):
        alone = record(SERVICE, 10, 50, 100, clients=1, length=length, tokens=length)
        records.append({**alone, "cpu_us": {"coordinator": 100.0, "service": us}})
    text = "\n".join(rfc_report._shows(records))
    for sentence in (
        "**text**: first token 2.00 times as late, each further token 2.00 times as long, 2.00 times the coordinator's",
        "**derender inline**: first token 9.00 times as late, 1.00 times the coordinator's CPU time.",
        "; answers that were not done in time: 3.",
        "Rendering in the coordinator brings the first token of one client sooner by 8.0 ms (8.0 to 8.0)",
        "A whole `tokens` stream takes 1.50 times as long beside clients of chat route.",
        "(over halves, where fewer came before the cut), median (range) of rows: text 1.50.",
        "The derender service, CPU time per token by the answer's length, one client: 2,000 µs at 64, 8,000 µs at 512.",
    ):
        assert sentence in text


def test_where_answers_were_cut_is_told_with_what_a_whole_one_takes() -> None:
    gone = {"length": 4096, "ok": 0, "limit_s": 40.0, "wall_s": 40.0}
    records = [
        record(TEXT, 1, 1, 1),
        record(SERVICE, 1, 1, 1, **gone | {"cut": 8, "tokens": 768}, late_ms={"p50": 500.0}),
        record(INLINE, 1, 1, 1, **gone | {"cut": 8, "tokens": 8 * 1024}, late_ms=None),
        record(COUPLED, 1, 1, 1, **gone | {"ok": 4, "cut": 4, "tokens": 8 * 4000}, late_ms={"p50": 10.0}),
    ]
    *_, chat, inline, service = rfc_report._cut(records)
    cell = "- vLLM, 4,096 tokens, clients: 8"
    whole = "tokens each; a whole one takes"
    assert service == f"{cell}, **{SERVICE}**: 8 of 8, after 40 s and 96 {whole} 2,040 s or more."
    assert inline == f"{cell}, **{INLINE}**: 8 of 8, after 40 s and 1,024 {whole} 160 s or more."
    assert chat == f"{cell}, **{COUPLED}**: 4 of 8, after 40 s and 4,000 tokens each."
    assert not list(rfc_report._cut(records[:1]))
