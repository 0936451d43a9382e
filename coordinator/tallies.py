"""What a request counts on its way, cheaply: plain numbers, made into Prometheus' families when the page is asked for.

prometheus_client's own instruments take a lock and four calls for one number, which is a good part of what a request
costs. Everything here is counted by the event loop alone, so that no lock is needed.

Source: prometheus_client's custom collectors.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prometheus_client import CollectorRegistry, Metric

    Labels = tuple[str, ...]


class _Instrument(Collector):
    """
    Args:
        labels: their names.
        registry: tells of it.
    """

    _type: str

    def __init__(self, name: str, documentation: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._name, self._documentation, self._labelnames = name, documentation, tuple(labels)
        registry.register(self)


class _Tally(_Instrument):
    """
    Attributes:
        values: by the labels' values; added to by whoever counts.
    """

    _family: type[CounterMetricFamily | GaugeMetricFamily]

    def __init__(self, name: str, documentation: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self.values: defaultdict[Labels, float] = defaultdict(float)
        super().__init__(name, documentation, labels, registry)

    def collect(self) -> Iterator[Metric]:
        family = self._family(self._name, self._documentation, labels=self._labelnames)
        for labels, value in self.values.items():
            family.add_metric(labels, value)
        yield family


class Count(_Tally):
    """A counter; it never falls."""

    _type, _family = "counter", CounterMetricFamily


class Level(_Tally):
    """A gauge."""

    _type, _family = "gauge", GaugeMetricFamily


class Times(_Instrument):
    """A histogram of seconds.

    Args:
        bounds: upper ones of the buckets, ascending; what is beyond them all has a bucket of its own.
    """

    _type = "histogram"

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str],
        bounds: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._bounds = tuple(bounds)
        self._told = (*map(floatToGoString, bounds), "+Inf")
        # By the labels' values: how many were in each bucket, and behind them the sum of all.
        self._cells: defaultdict[Labels, list[float]] = defaultdict(lambda: [0.0] * (len(self._told) + 1))
        if not labels:
            self._cells[()]  # told from the beginning
        super().__init__(name, documentation, labels, registry)

    def observe(self, labels: Labels, seconds: float) -> None:
        cells = self._cells[labels]
        cells[bisect_left(self._bounds, seconds)] += 1
        cells[-1] += seconds

    def add(self, labels: Labels, counts: Sequence[int], total: float) -> None:
        """Add so many observations to each bucket, the one beyond all bounds included; ``total`` is their sum."""
        cells = self._cells[labels]
        for bucket, count in enumerate(counts):
            cells[bucket] += count
        cells[-1] += total

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labelnames)
        for labels, (*counts, total) in self._cells.items():
            family.add_metric(labels, list(zip(self._told, accumulate(counts), strict=True)), total)
        yield family


class Sums(_Instrument):
    """A summary: how many observations, and their sum."""

    _type = "summary"

    def __init__(self, name: str, documentation: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._cells: defaultdict[Labels, list[float]] = defaultdict(lambda: [0.0, 0.0])
        super().__init__(name, documentation, labels, registry)

    def observe(self, labels: Labels, seconds: float) -> None:
        cells = self._cells[labels]
        cells[0] += 1
        cells[1] += seconds

    def collect(self) -> Iterator[Metric]:
        family = SummaryMetricFamily(self._name, self._documentation, labels=self._labelnames)
        for labels, (count, total) in self._cells.items():
            family.add_metric(labels, int(count), total)
        yield family
