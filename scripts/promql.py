"""Evaluates the part of PromQL that our alert rules and panels use, over scrapes that were kept.

It is there so that a rule can be shown to fire, and a panel be drawn, without a Prometheus. ``rate`` and ``increase``
take the samples of the window as they are; Prometheus extrapolates to the window's ends.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import promql_parser as promql
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]

_STALE_S = 300.0
_MATCHES: dict[str, Callable[[str, str], bool]] = {
    "Equal": lambda value, wanted: value == wanted,
    "NotEqual": lambda value, wanted: value != wanted,
    "Re": lambda value, wanted: re.fullmatch(wanted, value) is not None,
    "NotRe": lambda value, wanted: re.fullmatch(wanted, value) is None,
}
_ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b if b else math.nan,
}
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
    "==": lambda a, b: a == b,
}
_AGGREGATES: dict[str, Callable[[list[float]], float]] = {"sum": sum, "max": max}


@dataclass
class Scrapes:
    """What was scraped, by name and labels: pairs of a time in seconds and a value."""

    series: dict[tuple[str, Labels], list[tuple[float, float]]] = field(default_factory=dict)

    def add(self, at: float, page: str, **target: str) -> None:
        """Keep one page of metrics, with the labels that Prometheus puts on what it scrapes."""
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                key = sample.name, frozenset({**sample.labels, **target}.items())
                self.series.setdefault(key, []).append((at, float(sample.value)))

    def at(self, expression: str, at: float) -> Vector:
        """Return what an expression gives at one time; a scalar has no labels.

        Raises:
            ValueError: it is no PromQL, or uses more of it than is known here.
        """
        value = self._value(promql.parse(expression), at)
        return value if isinstance(value, dict) else {frozenset(): value}

    def _value(self, node: Any, at: float) -> Vector | float:
        match node:
            case promql.NumberLiteral():
                return float(node.val)
            case promql.ParenExpr():
                return self._value(node.expr, at)
            case promql.VectorSelector():
                found = self._select(node, at, _STALE_S)
                return {labels: samples[-1][1] for labels, samples in found}
            case promql.Call():
                return self._call(node, at)
            case promql.AggregateExpr():
                return _aggregate(node, self._value(node.expr, at))
            case promql.BinaryExpr():
                return _binary(str(node.op), self._value(node.lhs, at), self._value(node.rhs, at))
        raise ValueError(f"{type(node).__name__} is not known here")

    def _select(self, node: Any, at: float, window_s: float) -> Iterator[tuple[Labels, list[tuple[float, float]]]]:
        end = at - (node.offset.total_seconds() if node.offset else 0.0)
        for (name, labels), samples in self.series.items():
            if name == node.name and _matches(node, dict(labels)):
                inside = [sample for sample in samples if end - window_s < sample[0] <= end]
                if inside:
                    yield labels, inside

    def _call(self, node: Any, at: float) -> Vector | float:
        name, args = node.func.name, node.args
        if name == "time":
            return at
        if name == "histogram_quantile":
            buckets = self._value(args[1], at)
            assert isinstance(buckets, dict)
            return _quantile(args[0].val, buckets)
        if name not in ("rate", "increase"):
            raise ValueError(f"{name} is not known here")
        window = args[0]
        found: Vector = {}
        for labels, samples in self._select(window.vector_selector, at, window.range.total_seconds()):
            if len(samples) > 1:
                grown = sum(
                    after - before if after >= before else after for (_, before), (_, after) in pairwise(samples)
                )
                found[labels] = grown / (samples[-1][0] - samples[0][0]) if name == "rate" else grown
        return found


def _matches(node: Any, labels: dict[str, str]) -> bool:
    return all(
        _MATCHES[str(matcher.op).rpartition(".")[2]](labels.get(matcher.name, ""), matcher.value)
        for matcher in node.matchers.matchers
    )


def _aggregate(node: Any, value: Vector | float) -> Vector:
    assert isinstance(value, dict)
    by = node.modifier.labels if node.modifier else []
    groups: dict[Labels, list[float]] = {}
    for labels, one in value.items():
        groups.setdefault(frozenset(pair for pair in labels if pair[0] in by), []).append(one)
    return {labels: _AGGREGATES[str(node.op)](values) for labels, values in groups.items()}


def _binary(op: str, left: Vector | float, right: Vector | float) -> Vector | float:
    if isinstance(left, float) and isinstance(right, float):
        return _ARITHMETIC[op](left, right)
    if op in ("and", "or", "unless"):
        assert isinstance(left, dict) and isinstance(right, dict)
        kept = {labels: one for labels, one in left.items() if op == "or" or (labels in right) is (op == "and")}
        return {**right, **kept} if op == "or" else kept
    pairs = _paired(left, right)
    if op in _COMPARISONS:
        return {labels: a for labels, (a, b) in pairs.items() if _COMPARISONS[op](a, b)}
    return {labels: _ARITHMETIC[op](a, b) for labels, (a, b) in pairs.items()}


def _paired(left: Vector | float, right: Vector | float) -> dict[Labels, tuple[float, float]]:
    if isinstance(left, float):
        assert isinstance(right, dict)
        return {labels: (left, one) for labels, one in right.items()}
    if isinstance(right, float):
        return {labels: (one, right) for labels, one in left.items()}
    return {labels: (one, right[labels]) for labels, one in left.items() if labels in right}


def _quantile(q: float, buckets: Vector) -> Vector:
    """Interpolate in the bucket where the quantile lies, as Prometheus does."""
    groups: dict[Labels, list[tuple[float, float]]] = {}
    for labels, count in buckets.items():
        bound = float(dict(labels)["le"])
        groups.setdefault(frozenset(pair for pair in labels if pair[0] != "le"), []).append((bound, count))
    found: Vector = {}
    for labels, counts in groups.items():
        counts.sort()
        rank = q * counts[-1][1]
        if not counts[-1][1]:
            continue
        low = below = 0.0
        for bound, count in counts:
            if count >= rank:
                inside = (rank - below) / (count - below) if count > below else 0.0
                found[labels] = low if math.isinf(bound) else low + (bound - low) * inside
                break
            low, below = bound, count
    return found
