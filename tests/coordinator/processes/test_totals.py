"""What several processes count is one page: sums, sample by sample, that never fall."""

from __future__ import annotations

import pickle
import platform

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from coordinator.metrics import NOT_SUMMED, Metrics
from coordinator.processes.totals import Families, families, kept, page, total


def told(requests: dict[str, int], in_flight: int, seconds: float) -> Families:
    """Return what a process tells, as it comes out of a pipe."""
    registry = CollectorRegistry()
    counter = Counter("requests", "Requests.", ["route"], registry=registry)
    for route, count in requests.items():
        counter.labels(route).inc(count)
    Gauge("in_flight", "In flight.", registry=registry).set(in_flight)
    Histogram("seconds", "Seconds.", buckets=(1.0, 2.0), registry=registry).observe(seconds)
    out: Families = pickle.loads(pickle.dumps(families(registry)))
    return out


def shown(told: Families) -> dict[tuple[str, ...], float]:
    text = page(told)[0].decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


def test_counters_gauges_and_histograms_are_summed() -> None:
    sums = shown(total([told({"chat": 3, "messages": 1}, 2, 0.5), told({"chat": 4, "models": 1}, 1, 1.5)]))
    assert {key: value for key, value in sums.items() if not key[0].endswith("_created")} == {
        ("requests_total", "chat"): 7,
        ("requests_total", "messages"): 1,
        ("requests_total", "models"): 1,
        ("in_flight",): 3,
        ("seconds_bucket", "1.0"): 1,
        ("seconds_bucket", "2.0"): 2,
        ("seconds_bucket", "+Inf"): 2,
        ("seconds_count",): 2,
        ("seconds_sum",): 2,
    }


def test_the_time_of_a_series_is_that_of_its_first_process() -> None:
    first, second = told({"chat": 1}, 0, 1.0), told({"chat": 1}, 0, 1.0)
    created = "requests_created", "chat"
    assert shown(total([second, first]))[created] == shown(first)[created] < shown(second)[created]


def test_of_a_process_that_has_ended_the_gauges_go() -> None:
    sums = shown(total([kept(told({"chat": 3}, 2, 0.5)), told({"chat": 1}, 1, 0.5)]))
    assert (sums["requests_total", "chat"], sums["in_flight",], sums["seconds_count",]) == (4, 1, 2)


def test_what_all_processes_find_alike_is_told_once() -> None:
    """Two processes that look the workers up see the same four; there are no eight."""

    def process(workers: int) -> Families:
        metrics = Metrics(CollectorRegistry())
        metrics.discovered("decode", workers)
        metrics.watch_process("1.2.3")
        metrics.watch_pools(dict)
        return families(metrics.registry)

    found = shown(total([process(4), process(3)]))
    assert found["coordinator_discovered_workers", "decode"] == 4
    assert found["coordinator_build_info", platform.python_version(), "1.2.3"] == 1
    names = {family.name for family in process(1) if family.type == "gauge"}
    assert names >= NOT_SUMMED


def test_of_open_files_the_process_that_has_most_is_told() -> None:
    """Each has a limit of its own: half of the sum may be one process that has no file left."""

    def process(open_files: int) -> Families:
        registry = CollectorRegistry()
        Gauge("process_open_fds", "Open.", registry=registry).set(open_files)
        Gauge("process_max_fds", "Most.", registry=registry).set(1000)
        return families(registry)

    found = shown(total([process(100), process(990)]))
    assert (found["process_open_fds",], found["process_max_fds",]) == (990, 1000)


def test_what_was_told_is_left_as_it_was() -> None:
    one = told({"chat": 3}, 2, 0.5)
    total([one, one])
    assert shown(one)["requests_total", "chat"] == 3


def test_the_page_of_one_process_has_the_families_of_its_registry_in_their_order() -> None:
    one = told({"chat": 3}, 2, 0.5)
    assert page(total([one])) == page(one)
