"""Metrics of several processes as one page: counters, histograms and gauges are summed, sample by sample.

Gauges that tell the same of all processes (``metrics.NOT_SUMMED``) are told once.

A process that has ended stays in the sums with its counters and histograms, since a sum that falls would read as a
restart of the whole; its gauges are gone with what they counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, Metric, generate_latest

from coordinator.metrics import NOT_SUMMED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prometheus_client import CollectorRegistry
    from prometheus_client.samples import Sample

Families = list[Metric]
"""What one process counts, as its registry tells it."""


def families(registry: CollectorRegistry) -> Families:
    return list(registry.collect())


def kept(told: Families) -> Families:
    """Return what stays of a process that has ended."""
    return [family for family in told if family.type != "gauge"]


def total(told: Iterable[Families]) -> Families:
    """Return the sums, family by family in the order in which they are first met."""
    found: dict[str, Metric] = {}
    sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for family in (family for process in told for family in process):
        if family.name not in found:
            found[family.name], sums[family.name] = family, {}
        own = sums[family.name]
        for sample in family.samples:
            key = sample.name, tuple(sample.labels.items())
            own[key] = _joined(sample, own[key]) if key in own else sample.value
    return [_summed(found[name], own) for name, own in sums.items()]


def _joined(sample: Sample, so_far: float) -> float:
    if sample.name.endswith("_created"):  # a time: that of the first
        return min(so_far, sample.value)
    return max(so_far, sample.value) if sample.name in NOT_SUMMED else so_far + sample.value


def page(told: Sequence[Metric]) -> tuple[bytes, str]:
    """Return the exposition and its content type."""
    return generate_latest(_Told(told)), CONTENT_TYPE_LATEST


def _summed(family: Metric, sums: dict[tuple[str, tuple[tuple[str, str], ...]], float]) -> Metric:
    summed = Metric(family.name, family.documentation, family.type, family.unit)
    for (name, labels), value in sums.items():
        summed.add_sample(name, dict(labels), value)
    return summed


class _Told:
    """What the exposition wants of a registry."""

    def __init__(self, told: Sequence[Metric]) -> None:
        self._told = told

    def collect(self) -> Iterable[Metric]:
        return self._told
