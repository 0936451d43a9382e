"""Requests without an SDK: to a worker itself, and where the bytes of an answer are the point."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from tests.bounds import HANG_S

if TYPE_CHECKING:
    from collections.abc import Callable
    from email.message import Message


class Reply(NamedTuple):
    status: int
    headers: Message
    raw: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.raw)

    @property
    def events(self) -> list[Any]:
        """The JSON of each event of a stream that ends in [DONE]."""
        lines = [line for line in self.raw.split(b"\n") if line.startswith(b"data: ")]
        assert lines and lines[-1] == b"data: [DONE]", self.raw[-200:]
        return [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]


def post(url: str, body: Any, headers: dict[str, str] | None = None) -> Reply:
    data = json.dumps(body).encode()
    return _replied(urllib.request.Request(url, data, {"Content-Type": "application/json"} | (headers or {})))


def get(url: str) -> Reply:
    return _replied(urllib.request.Request(url))


def _replied(request: urllib.request.Request) -> Reply:
    try:
        with urllib.request.urlopen(request, timeout=HANG_S) as response:
            return Reply(response.status, response.headers, response.read())
    except urllib.error.HTTPError as error:
        with error:
            return Reply(error.code, error.headers, error.read())


class Metrics:
    """One look at the numbers of a worker."""

    def __init__(self, worker: str) -> None:
        with urllib.request.urlopen(f"{worker}/metrics", timeout=HANG_S) as response:
            families = text_string_to_metric_families(response.read().decode())
        self._samples = [sample for family in families for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of ``name`` that have these labels."""
        return sum(s.value for s in self._samples if s.name == name and labels.items() <= s.labels.items())

    def prompt_tokens(self, source: str) -> float:
        """Return how many prompt tokens came from ``source``: external_kv_transfer, local_compute, ..."""
        return self.total("vllm:prompt_tokens_by_source_total", source=source)

    @property
    def kv_usage(self) -> float:
        """The part of the KV blocks that is held, 0 to 1."""
        return self.total("vllm:kv_cache_usage_perc")

    @property
    def steps(self) -> float:
        """Steps of the engine that made tokens, also for a request that the server alone has given up."""
        return self.total("vllm:iteration_tokens_total_count")

    @property
    def leases_ended(self) -> float:
        """Hand-overs that nobody fetched before prefill gave up their blocks, which it does after 30 s."""
        return self.total("vllm:nixl_num_kv_expired_reqs_total")

    @property
    def at_rest(self) -> bool:
        """Whether no request runs or waits, and no block is held."""
        return self.kv_usage == 0 and self.running == 0 and self.waiting == 0

    @property
    def running(self) -> float:
        return self.total("vllm:num_requests_running")

    @property
    def waiting(self) -> float:
        return self.total("vllm:num_requests_waiting")


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Wait for numbers that a worker publishes a little later than the answer that they count."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)
