"""Writes deploy/grafana/dashboard.json: what an operator looks at, in the order of docs/observability.md.

A panel is one question. Run it after a change here: ``python -m scripts.dashboard``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "deploy" / "grafana" / "dashboard.json"

_WIDTH, _HEIGHT, _ACROSS = 8, 8, 3


@dataclass(frozen=True)
class Panel:
    """One graph.

    Attributes:
        unit: Grafana's name of it.
        queries: PromQL, and the legend of what it gives.
    """

    title: str
    question: str
    unit: str
    queries: tuple[tuple[str, str], ...]


def _quantiles(name: str, by: str, *quantiles: float) -> tuple[tuple[str, str], ...]:
    labels, legend = (f"{by}, le", f" {{{{{by}}}}}") if by else ("le", "")
    inner = f"sum by ({labels}) (rate({name}_bucket[$__rate_interval]))"
    return tuple((f"histogram_quantile({q}, {inner})", f"p{q * 100:.0f}{legend}") for q in quantiles)


def _rate(name: str, by: str, matching: str = "") -> tuple[tuple[str, str], ...]:
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    return ((f"sum by ({by}) (rate({name}{matching}[$__rate_interval]))", legend),)


PANELS = (
    Panel("Requests", "Is anything wrong at all?", "reqps", _rate("coordinator_requests_total", "outcome")),
    Panel(
        "In flight",
        "How much is going on, and does it queue?",
        "short",
        (("sum(coordinator_requests_in_flight)", "in flight"), ("sum(coordinator_requests_queued)", "queued")),
    ),
    Panel(
        "Time to first token",
        "How long do users wait?",
        "s",
        _quantiles("coordinator_time_to_first_token_seconds", "model", 0.5, 0.95),
    ),
    Panel(
        "Time per output token",
        "How fast do answers come?",
        "s",
        _quantiles("coordinator_time_per_output_token_seconds", "model", 0.5, 0.95),
    ),
    Panel(
        "Inter-token latency",
        "Do answers falter?",
        "s",
        _quantiles("coordinator_inter_token_latency_seconds", "model", 0.5, 0.99),
    ),
    Panel("Tokens", "How much is read and written?", "short", _rate("coordinator_tokens_total", "kind")),
    Panel(
        "Legs, 95th percentile",
        "Which leg is slow?",
        "s",
        _quantiles("coordinator_leg_seconds", "step", 0.95),
    ),
    Panel(
        "Legs that fail",
        "Which leg fails, and how?",
        "ops",
        _rate("coordinator_leg_seconds_count", "step, outcome", '{outcome!~"ok|skipped|hit|miss|cancelled"}'),
    ),
    Panel(
        "Queue",
        "Are there too few places?",
        "s",
        _quantiles("coordinator_queue_seconds", "outcome", 0.5, 0.95),
    ),
    Panel(
        "Calls in flight by worker",
        "Is a worker full, or left out?",
        "short",
        (("sum by (role, worker) (coordinator_legs_in_flight)", "{{role}} {{worker}}"),),
    ),
    Panel(
        "Mean time of a call by worker",
        "Which worker is slow?",
        "s",
        (
            (
                'sum by (role, worker) (rate(coordinator_worker_leg_seconds_sum{outcome="ok"}[$__rate_interval])) / '
                'sum by (role, worker) (rate(coordinator_worker_leg_seconds_count{outcome="ok"}[$__rate_interval]))',
                "{{role}} {{worker}}",
            ),
        ),
    ),
    Panel(
        "Calls that fail by worker",
        "Which worker is bad?",
        "ops",
        _rate("coordinator_worker_leg_seconds_count", "role, worker", '{outcome!~"ok|cancelled|LegRejected"}'),
    ),
    Panel(
        "Workers by state",
        "Who is left out?",
        "short",
        (('sum by (role, state) (coordinator_workers{state!="well"})', "{{role}} {{state}}"),),
    ),
    Panel(
        "Hand-over age",
        "Does decode come in time?",
        "s",
        _quantiles("coordinator_handover_age_seconds", "", 0.5, 0.99),
    ),
    Panel(
        "Prompts that decode computed",
        "Does prefill still save work?",
        "ops",
        tuple(
            (f"sum by (reason) (rate(coordinator_{name}_total[$__rate_interval]))", f"{why}: {{{{reason}}}}")
            for name, why in (
                ("prefills_skipped", "skipped"),
                ("prefills_failed_over", "prefill failed"),
                ("handovers_missing", "no hand-over"),
            )
        ),
    ),
    Panel("Retries", "What was tried again?", "ops", _rate("coordinator_retries_total", "step")),
    Panel(
        "Answers broken off",
        "Who broke off in the middle?",
        "ops",
        _rate("coordinator_streams_broken_total", "role, worker"),
    ),
    Panel(
        "Answers of no use",
        "Is a worker something else than the file says?",
        "ops",
        _rate("coordinator_answers_unusable_total", "step, reason"),
    ),
    Panel(
        "Parser processes that end",
        "Do the parsers of derender: coordinator stay up?",
        "ops",
        _rate("coordinator_parser_process_ends_total", "reason"),
    ),
)


def dashboard() -> dict[str, Any]:
    return {
        "title": "P/D coordinator",
        "uid": "pd-coordinator",
        "tags": ["vllm", "pd-coordinator"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}]},
        "panels": [_graph(index, panel) for index, panel in enumerate(PANELS)],
    }


def _graph(index: int, panel: Panel) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    across, down = index % _ACROSS, index // _ACROSS
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.question,
        "datasource": source,
        "gridPos": {"h": _HEIGHT, "w": _WIDTH, "x": across * _WIDTH, "y": down * _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": source, "expr": expression, "legendFormat": legend}
            for number, (expression, legend) in enumerate(panel.queries)
        ],
    }


def main() -> None:
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(dashboard(), indent=2) + "\n")


if __name__ == "__main__":
    main()
