"""The benchmark works: a tiny run of it, what its report says, and no word about how fast anything is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from bench import peers, report, routing
from bench.fake_worker import number, output_mode
from bench.peers import CONFIGS, Missing, Proxy
from bench.scenarios import COORDINATOR, FULL, SMOKE
from coordinator.cli import NoEvents
from coordinator.config import load
from coordinator.registry import build

ROOT = Path(__file__).resolve().parents[2]

EVERY_LOAD = {"ok", "errors", "error", "wall_s", "per_s", "chunks", "request_ms", "generator_busy"}
PRICED = {"proxy_cpu_ns", "cpu_us_per_request", "cpu_ms_per_mb", "rss_mib", "legs"}
FIELDS = {
    "start": {"ready_s", "rss_mib"},
    "idle": {"streams", "ok", "errors", "rss_mib", "rss_kib_per_stream"},
    "chunk": EVERY_LOAD | PRICED | {"first_token_ms", "chunk_us", "chunks_per_read", "cpu_us_per_chunk"},
    "unary": EVERY_LOAD | PRICED,
    "streams": EVERY_LOAD | PRICED | {"first_token_ms", "cpu_of_a_core", "marks_rss_mib"},
    "burst": EVERY_LOAD | PRICED | {"first_token_ms"},
    "prompt-64k": EVERY_LOAD | PRICED,
}


@pytest.mark.timeout(900)  # it computes all the while
def test_a_tiny_run_measures_every_field_and_leaves_nothing_running(tmp_path: Path) -> None:
    words = ["--smoke", "--scenarios", *FIELDS, "--proxies", COORDINATOR, "--out", str(tmp_path)]
    args, mark = [sys.executable, "-m", "bench.run", *words], {"BENCH_TEST": str(tmp_path)}
    done = subprocess.run(args, cwd=ROOT, env={**os.environ, **mark}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results" / "runs.json").read_text())
    assert {"machine", "versions", "date", "command", "proxies", "scenarios", "records"} <= results.keys()
    assert results["stopped"] is None
    ours = {record["scenario"]: record for record in results["records"] if record["proxy"] == COORDINATOR}
    assert ours.keys() == FIELDS.keys()
    for name, fields in FIELDS.items():
        assert fields <= ours[name].keys(), name
        assert not ours[name].get("error"), name
    assert ours["chunk"]["legs"] == {"render": 0, "prefill": 1, "decode": 1, "handed over": 1}
    assert ours["chunk"]["chunks"] == ours["chunk"]["ok"] * 24
    assert (ours["streams"]["ok"], ours["streams"]["marks_rss_mib"] > 1) == (2, True)
    text = (tmp_path / "RESULTS.md").read_text()
    assert "## A relayed chunk" in text
    assert "What did not work" not in text
    assert _marked(f"BENCH_TEST={tmp_path}") == []


def _marked(variable: str) -> list[str]:
    """Return the processes that have inherited a variable."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if variable.encode() in (process / "environ").read_bytes():
                found.append(process.name)
    return found


def test_the_smoke_run_has_every_scenario_of_the_full_one() -> None:
    assert [scenario.name for scenario in SMOKE.scenarios] == [scenario.name for scenario in FULL.scenarios]


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.name)
def test_its_configurations_load_and_build(file: Path) -> None:
    config = load(str(file), {})
    assert file.stem.endswith(config.log_level)
    assert build(config, NoEvents())


def test_a_peer_that_is_not_installed_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    nginx = next(peer for peer in peers.PEERS if peer.name == "nginx")
    assert peers.state(nginx) == (None, "not installed: make bench-peers")
    text = "\n".join(report.head(_results([], nginx)))
    assert "| nginx | **missing**: not installed: make bench-peers |" in text


def test_a_peer_that_cannot_be_installed_says_why() -> None:
    with pytest.raises(Missing, match="sh -c failed: no such package"):
        peers._run("sh", "-c", "echo no such package >&2; exit 1")


def test_proxies_are_compared_within_a_round() -> None:
    """The machine is twice as slow in the second round, and the ratio is the same."""
    records = [_record("coordinator", 0, 10.0), _record("nginx", 0, 5.0), _record("coordinator", 1, 20.0)]
    records += [_record("nginx", 1, 10.0), _record("nginx", 2, 99.0)]
    found = report.Found(report.TABLES[0], records)
    assert found.ratios("nginx", "coordinator") == [0.5, 0.5]


@pytest.mark.parametrize("case", list(routing.cases(8)), ids=str)
def test_the_cost_of_each_policy_can_be_measured(case: routing.Case) -> None:
    router = routing.made(case)
    assert router.name == case.policy and len(router.known()) == 8
    assert routing.microseconds(case, choices=120, in_flight=20, rounds=1, known=160) > 0


def test_a_load_that_failed_is_in_no_table_and_is_told() -> None:
    bad = _record("nginx", 1, 1.0) | {"errors": 3, "error": "status 502"}
    records = [_record("nginx", 0, 5.0), bad]
    assert report.Found(report.TABLES[0], records).values("nginx", report.TABLES[0].price) == {0: 5.0}
    assert "- chunk, nginx, round 2: 3: status 502" in report.tail({"records": records})


def test_the_worker_reads_what_is_asked_for_however_it_is_spaced() -> None:
    for body in (b'{"max_tokens":12,"seed":7}', b'{"seed": 7, "max_tokens": 12}', b'{"seed":7 ,"max_tokens":  12 }'):
        assert (number(body, b"max_tokens", 0), number(body, b"seed", 0)) == (12, 7)
    assert number(b'{"seed":null}', b"seed", 3) == 3
    assert output_mode(b'{"output_mode": "derender"}') == "derender"


def _record(proxy: str, number: int, price: float) -> dict[str, Any]:
    return {"scenario": "chunk", "proxy": proxy, "round": number, "errors": 0, "cpu_us_per_chunk": price}


def _results(records: list[dict[str, Any]], *proxies: Proxy) -> dict[str, Any]:
    machine = {"cpu": "a CPU", "cores": 2, "memory_gib": 8.0, "kernel": "6", "python": "3.11", "load_before": 0.0}
    states = {proxy.name: (proxy, *peers.state(proxy)) for proxy in proxies}
    shown = {
        name: {"version": found, "missing": why, "does": proxy.does, "started": proxy.shown, "legs": proxy.legs}
        for name, (proxy, found, why) in states.items()
    }
    facts = {"date": "today", "command": "make bench", "rounds": 5, "wall_s": 1.0, "pinned": True, "stopped": None}
    return {"machine": machine, "versions": {}, "environment": {}, "proxies": shown, "records": records, **facts}
