"""Prometheus metrics: names, labels, buckets. Takes a registry, owns no global.

Every label has a bounded set of values: routes, steps, outcomes and reasons come from the code, never from a body.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from coordinator.context import LegTime

# From a cache hit on a small model to a long prompt on a busy fleet.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """The coordinator's instruments. Implements ``coordinator.step.Events``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = Counter(
            "coordinator_requests", "Requests answered, by route and outcome.", ["route", "outcome"], registry=registry
        )
        self.request_seconds = Histogram(
            "coordinator_request_seconds",
            "From the request's head to the last byte of its answer.",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.in_flight = Gauge(
            "coordinator_requests_in_flight",
            "Requests whose answer is not yet whole, those in the queue included.",
            ["route"],
            registry=registry,
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
        self.leg_seconds = Histogram(
            "coordinator_leg_seconds",
            "One step of one request; for a streamed answer, up to the first event.",
            ["step", "outcome"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.ttft_seconds = Histogram(
            "coordinator_time_to_first_token_seconds",
            "From the request read to the first frame with content written to the client (streams only).",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.tokens = Counter(
            "coordinator_tokens", "Tokens as the workers counted them.", ["route", "kind"], registry=registry
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

        self.config_reloads = Counter(
            "coordinator_config_reloads",
            "Times that the file was read again while running, by result: applied, unchanged, refused.",
            ["result"],
            registry=registry,
        )

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

    def leg(self, leg: LegTime) -> None:
        self.leg_seconds.labels(leg.step, leg.outcome).observe(leg.seconds)

    def usage(self, route: str, prompt: int, completion: int) -> None:
        self.tokens.labels(route, "prompt").inc(prompt)
        self.tokens.labels(route, "completion").inc(completion)

    def page(self) -> tuple[bytes, str]:
        """Return the exposition and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST
