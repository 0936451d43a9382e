"""The RFC's latency table works: a tiny run on simulated workers, and what its report says; no word about times."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import rfc_report
from bench.rfc_cells import COUPLED, INLINE, MODES, REAL, SERVICE, SIMULATED, TEXT, TEXT_HERE, Workers
from bench.rfc_load import CHAT, Load, Seen
from coordinator import app, registry
from coordinator.cli import NoEvents
from coordinator.config import load

ROOT = Path(__file__).resolve().parents[2]
FIELDS = {"ok", "cut", "errors", "error", "tokens", "wall_s", "ttft_ms", "tpot_ms", "whole_ms", "cpu_us"}
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
    assert {cell.clients for cell in SIMULATED} == {1, 8, 32, 64}
    assert {cell.length for cell in SIMULATED} == {64, 512, 4096}
    assert {(cell.clients, cell.length) for cell in REAL} == {(1, 64), (8, 64), (1, 512), (8, 512)}


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
    load.seen = [Seen(began=0.0, first=1.0, last=2.0, ended=2.0, events=3, tokens=7)]
    assert load.told(1.0)["error"] == "7 tokens came"
    load.seen = [Seen(began=0.0, first=1.0, last=3.0, events=5)]
    told = load.told(1.0)
    assert (told["ok"], told["cut"], told["tpot_ms"]) == (0, 1, {"p50": 500.0, "p99": 500.0})


def record(mode: str, ttft: float, tpot: float, cpu: float, **more: Any) -> dict[str, Any]:
    times = {"ttft_ms": {"p50": ttft, "p99": ttft}, "tpot_ms": {"p50": tpot, "p99": tpot}}
    counts = {"clients": 8, "length": 64, "tokens": 64, "wall_s": 1.0}
    return {"site": "vLLM", "mode": mode, **counts, **times, "cpu_us": {"coordinator": cpu}, **more}


def test_what_it_shows_is_told_from_the_numbers_also_where_we_lose() -> None:
    records = [record(COUPLED, 10, 5, 50), record(TEXT, 20, 10, 100), record(TEXT_HERE, 12, 5, 100),
               record(TEXT, 20, 10, 100, clients=1), record(TEXT_HERE, 12, 5, 100, clients=1),
               record(INLINE, 90, 0.01, 50), record(SERVICE, 10, 50, 100, cut=3),
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
        "The derender service, CPU time per token by the answer's length, one client: 2,000 µs at 64, 8,000 µs at 512.",
    ):
        assert sentence in text
