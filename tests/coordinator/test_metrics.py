"""Metrics have the field's units in their names, bounded labels, and a registry of their own."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from coordinator.context import LegTime
from coordinator.metrics import Metrics

# name -> kind, labels
FAMILIES = {
    "coordinator_requests": ("counter", ("route", "outcome")),
    "coordinator_request_seconds": ("histogram", ("route",)),
    "coordinator_requests_in_flight": ("gauge", ("route",)),
    "coordinator_requests_queued": ("gauge", ()),
    "coordinator_queue_seconds": ("histogram", ("outcome",)),
    "coordinator_leg_seconds": ("histogram", ("step", "outcome")),
    "coordinator_time_to_first_token_seconds": ("histogram", ("route",)),
    "coordinator_tokens": ("counter", ("route", "kind")),
    "coordinator_handovers_missing": ("counter", ("reason", "policy")),
    "coordinator_prefills_skipped": ("counter", ("reason",)),
    "coordinator_retries": ("counter", ("step",)),
    "coordinator_prefills_failed_over": ("counter", ("reason",)),
    "coordinator_handovers_released": ("counter", ("outcome",)),
    "coordinator_encodes_skipped": ("counter", ("reason",)),
    "coordinator_encodings_missing": ("counter", ("reason", "policy")),
    "coordinator_stale_connections": ("counter", ("role",)),
    "coordinator_config_reloads": ("counter", ("result",)),
}


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(CollectorRegistry())


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def instruments(metrics: Metrics) -> list[Any]:
    return [item for item in vars(metrics).values() if hasattr(item, "_labelnames")]


def test_the_names_and_their_labels_are_these(metrics: Metrics) -> None:
    made = {item._name: (item._type, item._labelnames) for item in instruments(metrics)}
    assert made == FAMILIES
    assert set(metrics.registry._names_to_collectors) >= FAMILIES.keys()


def test_every_one_says_what_it_counts_and_times_have_their_unit(metrics: Metrics) -> None:
    for item in instruments(metrics):
        assert item._documentation.endswith("."), item._name
        assert (item._type == "histogram") is item._name.endswith("_seconds"), item._name


def test_two_coordinators_in_one_process_do_not_share_them(metrics: Metrics) -> None:
    other = Metrics(CollectorRegistry())
    metrics.requests.labels("chat", "ok").inc()
    assert value(metrics, "coordinator_requests_total", route="chat", outcome="ok") == 1
    assert value(other, "coordinator_requests_total", route="chat", outcome="ok") is None


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
    metrics.usage("chat", 100, 7)
    metrics.usage("chat", 0, 1)
    assert value(metrics, "coordinator_tokens_total", route="chat", kind="prompt") == 100
    assert value(metrics, "coordinator_tokens_total", route="chat", kind="completion") == 8


def test_the_page_is_prometheus_own_text(metrics: Metrics) -> None:
    metrics.prefill_skipped("n")
    body, content_type = metrics.page()
    assert content_type.startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    assert families.keys() >= FAMILIES.keys()
    (sample,) = [s for s in families["coordinator_prefills_skipped"].samples if s.name.endswith("_total")]
    assert (sample.labels, sample.value) == ({"reason": "n"}, 1)
