"""Metrics have the field's units in their names, bounded labels, and a registry of their own."""

from __future__ import annotations

import platform
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.parser import text_string_to_metric_families

from coordinator.context import Attempt, LegTime
from coordinator.metrics import Metrics, Pools, ProcessMetrics
from coordinator.telemetry.pace import GAP_SECONDS, Pace


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(CollectorRegistry())


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def instruments(metrics: Metrics) -> list[Any]:
    return [item for item in vars(metrics).values() if hasattr(item, "_labelnames")]


def test_every_one_says_what_it_counts_and_times_have_their_unit(metrics: Metrics) -> None:
    for item in instruments(metrics):
        assert item._documentation.endswith("."), item._name
        is_time = item._name.endswith("_seconds") and not item._name.endswith("_timestamp_seconds")
        assert (item._type in ("histogram", "summary")) is is_time, item._name


def test_two_coordinators_in_one_process_do_not_share_them(metrics: Metrics) -> None:
    other = Metrics(CollectorRegistry())
    metrics.request("chat", "ok", "m", 0.5)
    labels = {"route": "chat", "outcome": "ok", "model": "m"}
    assert value(metrics, "coordinator_requests_total", **labels) == 1
    assert value(other, "coordinator_requests_total", **labels) is None


def test_what_happened_is_counted_under_its_name(metrics: Metrics) -> None:
    metrics.handover_missing("absent", "fail")
    metrics.prefill_skipped("n")
    metrics.prefill_failed_over("NoWorker")
    metrics.begun_again()
    metrics.encode_skipped("no_worker_named")
    metrics.encoding_missing("absent", "fail")
    metrics.queued(2)
    metrics.queued(-1)
    assert value(metrics, "coordinator_handovers_missing_total", reason="absent", policy="fail") == 1
    assert value(metrics, "coordinator_prefills_skipped_total", reason="n") == 1
    assert value(metrics, "coordinator_prefills_failed_over_total", reason="NoWorker") == 1
    assert value(metrics, "coordinator_retries_total", step="prefill_again") == 1
    assert value(metrics, "coordinator_encodes_skipped_total", reason="no_worker_named") == 1
    assert value(metrics, "coordinator_encodings_missing_total", reason="absent", policy="fail") == 1
    assert value(metrics, "coordinator_requests_queued") == 1


def test_times_are_observed_in_seconds(metrics: Metrics) -> None:
    metrics.leg(LegTime("prefill", 0.25, "ok"))
    metrics.leg(LegTime("prefill", 0.5, "ok"))
    metrics.waited(3.0, "let_in")
    assert value(metrics, "coordinator_leg_seconds_sum", step="prefill", outcome="ok") == 0.75
    assert value(metrics, "coordinator_leg_seconds_count", step="prefill", outcome="ok") == 2
    assert value(metrics, "coordinator_queue_seconds_sum", outcome="let_in") == 3.0


def test_tokens_are_those_of_the_workers_usage(metrics: Metrics) -> None:
    metrics.usage("chat", "m", 100, 7)
    metrics.usage("chat", "m", 0, 1)
    assert value(metrics, "coordinator_tokens_total", route="chat", kind="prompt", model="m") == 100
    assert value(metrics, "coordinator_tokens_total", route="chat", kind="completion", model="m") == 8


def test_the_gaps_of_a_stream_are_observed_as_if_one_by_one(metrics: Metrics) -> None:
    """ITL: the buckets are filled at once, past prometheus_client's own way in, and must come out alike."""
    gaps = [0.0004, 0.001, 0.0011, 0.02, 0.02, 0.7, 99.0]
    ticks = iter([0.0, *accumulate(gaps)])
    pace = Pace(lambda: next(ticks), -1.5)
    for _ in range(len(gaps) + 1):
        pace.mark()
    metrics.stream("chat", "m", pace, 1.5, 15)
    twin = Histogram("twin", "The same.", buckets=GAP_SECONDS, registry=metrics.registry)
    for gap in gaps:
        twin.observe(gap)
    bounds = [*map(str, GAP_SECONDS), "+Inf"]
    name = "coordinator_inter_token_latency_seconds"
    assert [value(metrics, f"{name}_bucket", route="chat", model="m", le=bound) for bound in bounds] == [
        value(metrics, "twin_bucket", le=bound) for bound in bounds
    ]
    assert value(metrics, f"{name}_count", route="chat", model="m") == len(gaps)
    assert value(metrics, f"{name}_sum", route="chat", model="m") == pytest.approx(sum(gaps))
    assert value(metrics, "coordinator_time_to_first_token_seconds_sum", route="chat", model="m") == 1.5
    per_token = value(metrics, "coordinator_time_per_output_token_seconds_sum", route="chat", model="m")
    assert per_token == pytest.approx(sum(gaps) / 14)


def test_workers_beyond_a_bound_share_a_label(metrics: Metrics) -> None:
    """I1: pods come and go under new addresses, and each would be a series for ever."""
    labels = [metrics.worker(f"http://10.0.{i // 250}.{i % 250}:8000") for i in range(700)]
    assert labels[:2] == ["10.0.0.0:8000", "10.0.0.1:8000"]
    assert len(set(labels)) == 501
    assert set(labels[500:]) == {"other"}
    assert metrics.worker("http://10.0.0.1:8000") == "10.0.0.1:8000"


def test_a_call_is_in_flight_until_it_is_closed_and_is_timed_by_its_worker(metrics: Metrics) -> None:
    attempt = Attempt("prefill", "prefill", "10.0.0.1:8000", 0, 0.0, 0.25, "ok")
    where = {"role": "prefill", "worker": "10.0.0.1:8000"}
    metrics.leg_opened(attempt)
    assert value(metrics, "coordinator_legs_in_flight", **where) == 1
    metrics.attempt(attempt)
    metrics.leg_closed(attempt)
    assert value(metrics, "coordinator_legs_in_flight", **where) == 0
    assert value(metrics, "coordinator_worker_leg_seconds_sum", **where, outcome="ok") == 0.25


OF_THREE = ("ok", "LegUnreadable", "cancelled")


@pytest.mark.parametrize(
    ("step_outcome", "attempt_outcome"),
    [("LegUnreadable", "LegUnreadable"), ("LegUnreadable", "ok"), ("ok", "LegUnreadable")],
)
def test_an_unusable_answer_is_counted_once_whoever_found_it(
    metrics: Metrics, step_outcome: str, attempt_outcome: str
) -> None:
    """V19 and its like: found where it came in, or by the step that read it, or made good by another worker."""
    attempt = Attempt("decode", "decode", "w:1", 0, 0.0, 0.1, attempt_outcome)
    metrics.attempt(attempt)
    metrics.leg(LegTime("decode", 0.1, step_outcome, (attempt,)))
    assert value(metrics, "coordinator_answers_unusable_total", step="decode", reason="unreadable") == 1


def test_an_unusable_answer_of_one_of_several_calls_is_counted_once(metrics: Metrics) -> None:
    """Of a leg for each image, or of a pair: the others were given up because of it."""
    attempts = [Attempt("encode", "encode", f"w:{n}", 0, 0.0, 0.1, how) for n, how in enumerate(OF_THREE)]
    for attempt in attempts:
        metrics.attempt(attempt)
    metrics.leg(LegTime("encode", 0.1, "LegUnreadable", attempts))
    assert value(metrics, "coordinator_answers_unusable_total", step="encode", reason="unreadable") == 1


def test_the_page_is_prometheus_own_text(metrics: Metrics) -> None:
    metrics.prefill_skipped("n")
    body, content_type = metrics.page()
    assert content_type.startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    assert families.keys() >= {item._name for item in instruments(metrics)}
    (sample,) = [s for s in families["coordinator_prefills_skipped"].samples if s.name.endswith("_total")]
    assert (sample.labels, sample.value) == ({"reason": "n"}, 1)


DOCS = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def documented() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return the table of the docs: type and labels, by name."""
    rows = [line.split("|")[1:6] for line in DOCS.read_text().splitlines() if line.startswith("| `coordinator_")]
    found = {}
    for name, kind, labels, unit, meaning in ([cell.strip() for cell in row] for row in rows):
        assert unit and meaning, name
        assert (unit == "seconds") is name.endswith("_seconds`"), name
        found[name.strip("`")] = (kind, tuple(filter(None, labels.split(", "))))
    return found


def test_the_docs_have_every_metric_and_no_other(metrics: Metrics) -> None:
    made = {
        item._name + ("_total" if item._type == "counter" else ""): (item._type, item._labelnames)
        for item in (*instruments(metrics), ProcessMetrics().restarts)
    }
    looked_up = {
        family.name + ("_total" if family.type == "counter" else ""): (family.type, family._labelnames)
        for family in Pools(dict).collect()
    }
    assert documented() == made | looked_up
    assert len(made) == len(instruments(metrics)) + 1


def test_the_process_tells_of_itself_as_the_docs_say(metrics: Metrics) -> None:
    metrics.watch_process("1.2.3")
    assert value(metrics, "coordinator_build_info", version="1.2.3", python=platform.python_version()) == 1
    told = {family.name + ("_total" if family.type == "counter" else "") for family in metrics.registry.collect()}
    rows = {line.split("`")[1] for line in DOCS.read_text().splitlines() if line.startswith("| `process_")}
    assert rows == {name for name in told if name.startswith("process_")}
    before = value(metrics, "process_open_fds")
    with DOCS.open():
        assert value(metrics, "process_open_fds") == (before or 0) + 1


def test_the_workers_of_a_pool_are_counted_when_the_page_is_asked_for(metrics: Metrics) -> None:
    class Health:
        ejections = 2

        def states(self) -> dict[str, int]:
            return {"well": 3, "ejected": 1}

    pools: dict[str, Health] = {}
    metrics.watch_pools(lambda: pools)
    assert value(metrics, "coordinator_workers", role="decode", state="well") is None
    pools["decode"] = Health()
    assert value(metrics, "coordinator_workers", role="decode", state="well") == 3
    assert value(metrics, "coordinator_workers", role="decode", state="ejected") == 1
    assert value(metrics, "coordinator_ejections_total", role="decode") == 2
