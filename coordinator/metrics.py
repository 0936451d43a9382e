"""Prometheus metrics: names, labels, buckets. Takes a registry, owns no global.

Every label has a bounded set of values: routes, steps, outcomes and reasons come from the code, models from the
workers' own lists (``model_names``), workers from the configuration, and no more than ``_WORKERS`` of them. None comes
from a body. What several processes have may be added up, gauges too.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from coordinator.tallies import Count, Level, Sums, Times
from coordinator.telemetry.pace import GAP_SECONDS, Pace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Protocol

    from prometheus_client import Metric

    from coordinator.context import Attempt, LegTime

    class PoolHealth(Protocol):
        """What ``routing.health`` knows of a pool."""

        ejections: int

        def states(self) -> Mapping[str, int]: ...


# From a cache hit on a small model to a long prompt on a busy fleet.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
# Prefill keeps its blocks for 30 s, and max_handover_age is 15 s: the question is how far from these we are.
_AGES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 30.0)

# Pods come and go under new addresses; from here on they have one label together.
_WORKERS = 500
OTHER = "other"

# Of several processes each tells these of what is the same for all, of a time, or of what each has its own limit for:
# the greatest is told, not the sum.
NOT_SUMMED = frozenset(
    {
        "coordinator_build_info",
        "coordinator_workers",
        "coordinator_discovered_workers",
        "coordinator_discovery_last_success_timestamp_seconds",
        "process_start_time_seconds",
        "process_open_fds",
        "process_max_fds",
    }
)

# What is told of answers that are no use, by the error's class.
_UNUSABLE = {"LegUnreadable": "unreadable", "LegUnechoed": "not_echoed"}


class ProcessMetrics:
    """What the supervisor of several processes counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.config_reloads = _config_reloads(self.registry)
        self.restarts = Counter(
            "coordinator_process_restarts",
            "Serving processes that died and were started again.",
            registry=self.registry,
        )


def _config_reloads(registry: CollectorRegistry) -> Counter:
    return Counter(
        "coordinator_config_reloads",
        "Times that the file was read again while running, by result: applied, unchanged, refused.",
        ["result"],
        registry=registry,
    )


class Pools(Collector):
    """What is known of the workers of each pool, looked up when the page is asked for.

    Args:
        pools: those of now, by role.
    """

    def __init__(self, pools: Callable[[], Mapping[str, PoolHealth]]) -> None:
        self._pools = pools

    def collect(self) -> Iterator[Metric]:
        workers = GaugeMetricFamily("coordinator_workers", "Workers of a pool, by state.", labels=["role", "state"])
        ejections = CounterMetricFamily(
            "coordinator_ejections", "Workers that were left out because their legs failed.", labels=["role"]
        )
        for role, health in self._pools().items():
            for state, count in health.states().items():
                workers.add_metric([role, state], count)
            ejections.add_metric([role], health.ejections)
        yield from (workers, ejections)


class Metrics:
    """The coordinator's instruments. Implements ``coordinator.step.Events``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.build_info = Gauge(
            "coordinator_build_info", "1; the release and its Python.", ["version", "python"], registry=registry
        )
        self.requests = Count(
            "coordinator_requests",
            "Requests that are over, by route, outcome and model.",
            ["route", "outcome", "model"],
            registry,
        )
        self.request_seconds = Times(
            "coordinator_request_seconds",
            "From the request's head to the last byte of its answer.",
            ["route"],
            _SECONDS,
            registry,
        )
        self.in_flight = Level(
            "coordinator_requests_in_flight",
            "Requests whose answer is not yet whole, those in the queue included.",
            ["route"],
            registry,
        )
        self.requests_queued = Gauge(
            "coordinator_requests_queued", "Requests that wait for a place.", registry=registry
        )
        self.queue_seconds = Histogram(
            "coordinator_queue_seconds",
            "How long requests waited for a place, of those that had to: until let_in, timeout, or they left.",
            ["outcome"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.leg_seconds = Times(
            "coordinator_leg_seconds",
            "One step of one request; for a streamed answer, up to the first event.",
            ["step", "outcome"],
            _SECONDS,
            registry,
        )
        self.legs_in_flight = Level(
            "coordinator_legs_in_flight",
            "Calls of a worker whose answer is not yet whole.",
            ["role", "worker"],
            registry,
        )
        self.worker_leg_seconds = Sums(
            "coordinator_worker_leg_seconds",
            "One call of one worker; for a streamed answer, up to the first event.",
            ["role", "worker", "outcome"],
            registry,
        )
        self.streams_broken = Counter(
            "coordinator_streams_broken",
            "Answers that a worker broke off after their first event.",
            ["role", "worker"],
            registry=registry,
        )
        self.answers_unusable = Counter(
            "coordinator_answers_unusable",
            "Workers' answers of no known shape (unreadable), or in another output_mode than asked (not_echoed).",
            ["step", "reason"],
            registry=registry,
        )
        self.ttft_seconds = Times(
            "coordinator_time_to_first_token_seconds",
            "From the request read to the first frame with content written to the client (streams only).",
            ["route", "model"],
            _SECONDS,
            registry,
        )
        self.itl_seconds = Times(
            "coordinator_inter_token_latency_seconds",
            "Between two frames with content, which may hold several tokens; told when the stream is over.",
            ["route", "model"],
            GAP_SECONDS,
            registry,
        )
        self.tpot_seconds = Times(
            "coordinator_time_per_output_token_seconds",
            "From the first frame with content to the last, divided by the output tokens but one (streams only).",
            ["route", "model"],
            GAP_SECONDS,
            registry,
        )
        self.tokens = Count(
            "coordinator_tokens",
            "Tokens as the workers counted them: prompt, and completion.",
            ["route", "kind", "model"],
            registry,
        )
        self.handover_age_seconds = Times(
            "coordinator_handover_age_seconds",
            "From prefill's answer to the decode leg that carries its hand-over.",
            [],
            _AGES,
            registry,
        )
        self.handovers_missing = Counter(
            "coordinator_handovers_missing",
            "Prefills that left no usable hand-over for decode, by reason and by what was done.",
            ["reason", "policy"],
            registry=registry,
        )
        self.encodings_missing = Counter(
            "coordinator_encodings_missing",
            "Pieces of media that no encode leg left where prefill could fetch them, by reason and by what was done.",
            ["reason", "policy"],
            registry=registry,
        )
        self.encodes_skipped = Counter(
            "coordinator_encodes_skipped",
            "Requests whose media prefill encoded itself, by reason.",
            ["reason"],
            registry=registry,
        )
        self.prefills_skipped = Counter(
            "coordinator_prefills_skipped",
            "Requests that decode computed alone, by reason.",
            ["reason"],
            registry=registry,
        )
        self.retries = Counter(
            "coordinator_retries",
            "Legs sent to another worker, and requests begun again at prefill, by step.",
            ["step"],
            registry=registry,
        )
        self.prefills_failed_over = Counter(
            "coordinator_prefills_failed_over",
            "Requests that decode computed alone because prefill failed, by the failure.",
            ["reason"],
            registry=registry,
        )
        self.handovers_released = Counter(
            "coordinator_handovers_released",
            "Hand-overs that no decode worker took, by what became of them.",
            ["outcome"],
            registry=registry,
        )
        self.stale_connections = Counter(
            "coordinator_stale_connections",
            "Legs sent again because a kept connection had died before any byte of the answer.",
            ["role"],
            registry=registry,
        )
        self.parser_process_ends = Counter(
            "coordinator_parser_process_ends",
            "Parser processes that ended, or could not be started again, by why.",
            ["reason"],
            registry=registry,
        )
        for reason in ("died", "hung", "garbled", "unusable", "not_started"):
            self.parser_process_ends.labels(reason)  # so that the first end is seen as an increase
        self.config_reloads = _config_reloads(registry)
        self.background_faults = Counter(
            "coordinator_background_faults",
            "Faults of the coordinator in what it does beside requests, by task; what failed is begun anew.",
            ["task"],
            registry=registry,
        )
        self._workers: dict[str, str] = {}
        self.workers_discovered = Gauge(
            "coordinator_discovered_workers",
            "Workers of a pool that are looked up, as of now.",
            ["role"],
            registry=registry,
        )
        self.discovery_failures = Counter(
            "coordinator_discovery_failures",
            "Look-ups of a pool's workers that failed; those that were known are used on.",
            ["role"],
            registry=registry,
        )
        self.discovery_succeeded_at = Gauge(
            "coordinator_discovery_last_success_timestamp_seconds",
            "When a pool's workers were last looked up or confirmed; time() minus it is their age.",
            ["role"],
            registry=registry,
        )

    def discovered(self, role: str, workers: int) -> None:
        self.workers_discovered.labels(role).set(workers)

    def discovery_succeeded(self, role: str) -> None:
        self.discovery_succeeded_at.labels(role).set_to_current_time()

    def discovery_failed(self, role: str) -> None:
        self.discovery_failures.labels(role).inc()

    def background_failed(self, task: str) -> None:
        self.background_faults.labels(task).inc()

    def watch_process(self, version: str) -> None:
        """Tell of the process too, as other programs do: its release, CPU time, memory and open files (Linux)."""
        self.build_info.labels(version, platform.python_version()).set(1)
        ProcessCollector(registry=self.registry)

    def watch_pools(self, pools: Callable[[], Mapping[str, PoolHealth]]) -> None:
        self.registry.register(Pools(pools))

    def parser_ended(self, reason: str) -> None:
        self.parser_process_ends.labels(reason).inc()

    def queued(self, change: int) -> None:
        self.requests_queued.inc(change)

    def waited(self, seconds: float, outcome: str) -> None:
        self.queue_seconds.labels(outcome).observe(seconds)

    def handover_missing(self, reason: str, policy: str) -> None:
        self.handovers_missing.labels(reason, policy).inc()

    def encode_skipped(self, reason: str) -> None:
        self.encodes_skipped.labels(reason).inc()

    def encoding_missing(self, reason: str, policy: str) -> None:
        self.encodings_missing.labels(reason, policy).inc()

    def prefill_skipped(self, reason: str) -> None:
        self.prefills_skipped.labels(reason).inc()

    def prefill_failed_over(self, reason: str) -> None:
        self.prefills_failed_over.labels(reason).inc()

    def begun_again(self) -> None:
        self.retries.labels("prefill_again").inc()

    def handover_sent(self, age_s: float) -> None:
        self.handover_age_seconds.observe((), age_s)

    def entered(self, route: str, change: int) -> None:
        self.in_flight.values[(route,)] += change

    def request(self, route: str, outcome: str, model: str, seconds: float) -> None:
        self.requests.values[route, outcome, model] += 1
        self.request_seconds.observe((route,), seconds)

    def leg(self, leg: LegTime) -> None:
        """Count one step, and what it could not use of its workers' answers."""
        self.leg_seconds.observe((leg.step, leg.outcome), leg.seconds)
        # A worker's answer is read where it comes in, which is counted there, and again by its step.
        if leg.outcome in _UNUSABLE and all(attempt.outcome != leg.outcome for attempt in leg.attempts):
            self.unusable(leg.step, leg.outcome)

    def unusable(self, step: str, error: str) -> None:
        if error in _UNUSABLE:
            self.answers_unusable.labels(step, _UNUSABLE[error]).inc()

    def worker(self, url: str) -> str:
        """Return a worker's label: its host and port, or ``other`` where too many have one already."""
        label = self._workers.get(url)
        if label is None:
            if len(self._workers) >= _WORKERS:
                return OTHER
            label = self._workers[url] = url.partition("://")[2]
        return label

    def leg_opened(self, attempt: Attempt) -> None:
        self.legs_in_flight.values[attempt.role, attempt.worker] += 1

    def leg_closed(self, attempt: Attempt) -> None:
        self.legs_in_flight.values[attempt.role, attempt.worker] -= 1

    def attempt(self, attempt: Attempt) -> None:
        self.worker_leg_seconds.observe((attempt.role, attempt.worker, attempt.outcome), attempt.seconds)
        self.unusable(attempt.step, attempt.outcome)

    def stream_broken(self, attempt: Attempt) -> None:
        self.streams_broken.labels(attempt.role, attempt.worker).inc()
        self.unusable(attempt.step, attempt.outcome)

    def stream(self, route: str, model: str, pace: Pace, ttft_s: float, output_tokens: int) -> None:
        """Take the clock points of a stream that is over."""
        self.ttft_seconds.observe((route, model), ttft_s)
        self.itl_seconds.add((route, model), pace.gaps, pace.lasted_s)
        if (per_token_s := pace.per_token_s(output_tokens)) is not None:
            self.tpot_seconds.observe((route, model), per_token_s)

    def usage(self, route: str, model: str, prompt: int, completion: int) -> None:
        self.tokens.values[route, "prompt", model] += prompt
        self.tokens.values[route, "completion", model] += completion

    def page(self) -> tuple[bytes, str]:
        """Return the exposition and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST
