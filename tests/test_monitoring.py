"""Alert rules and dashboard are over the metrics that there are, and each rule fires on what it is for, and no more."""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from coordinator.context import Attempt, LegTime
from coordinator.metrics import Metrics, ProcessMetrics
from coordinator.telemetry.pace import Pace
from scripts import dashboard
from scripts.promql import Scrapes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[1]
DOCS = (ROOT / "docs" / "metrics.md").read_text()
RULES = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text())["groups"][0]["rules"]
BY_NAME = {rule["alert"]: rule for rule in RULES}

# What Prometheus adds: of a target, and to histograms.
TARGET = {"job": "pd-coordinator", "instance": "10.0.0.9:8080"}
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}


def documented() -> dict[str, set[str]]:
    """Return the labels of every sample, by its name, as the docs (which a test holds against the code) have them."""
    found = {"up": set(TARGET)}
    for line in DOCS.splitlines():
        if line.startswith(("| `coordinator_", "| `process_")):
            name, kind, labels = (cell.strip().strip("`") for cell in line.split("|")[1:4])
            for suffix in SUFFIXES.get(kind, ("",)):
                own = {"le"} if suffix == "_bucket" else set()
                found[name + suffix] = {*filter(None, labels.split(", ")), *TARGET, *own}
    return found


SAMPLES = documented()
QUERIES = [query.replace("$__rate_interval", "5m") for panel in dashboard.PANELS for query, _ in panel.queries]
EXPRESSIONS = [*(rule["expr"] for rule in RULES), *QUERIES]


def nodes(node: Any) -> Iterator[Any]:
    yield node
    inner = [getattr(node, name) for name in ("lhs", "rhs", "expr", "vector_selector") if hasattr(node, name)]
    for child in (*inner, *getattr(node, "args", ())):
        yield from nodes(child)


def selectors(expression: str) -> list[Any]:
    every = nodes(promql_parser.parse(expression))
    return [node for node in every if isinstance(node, promql_parser.VectorSelector)]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_is_over_metrics_and_labels_that_there_are(expression: str) -> None:
    found = selectors(expression)
    assert found
    for selector in found:
        assert selector.name in SAMPLES
        assert {matcher.name for matcher in selector.matchers.matchers} <= SAMPLES[selector.name]
    for node in nodes(promql_parser.parse(expression)):
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier:
            inner = {name for selector in selectors(str(node.expr)) for name in SAMPLES[selector.name]}
            assert set(node.modifier.labels) <= inner


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_value_that_is_asked_for_is_one_that_the_docs_tell_of(expression: str) -> None:
    """A word that no code says would never match, and nobody would see it."""
    words = set(re.findall(r"[A-Za-z_]+", DOCS)) | {"LegRejected", "prefill", "let_in", "job", "pd", "coordinator"}
    for selector in selectors(expression):
        for matcher in selector.matchers.matchers:
            assert set(re.findall(r"[A-Za-z_]+", matcher.value)) <= words, matcher.value


@pytest.mark.parametrize("rule", RULES, ids=BY_NAME)
def test_a_rule_says_what_is_wrong_and_where_to_look(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert set(rule["annotations"]) == {"summary", "description"}
    assert rule["annotations"]["description"].endswith((".", "?"))
    shown = set(re.findall(r"\$labels\.(\w+)", "".join(rule["annotations"].values())))
    fired = troubled(rule["alert"])
    assert shown <= {name for labels in fired for name, _ in labels}, "a label that the expression drops"


def test_the_dashboard_is_what_its_script_writes() -> None:
    """``python -m scripts.dashboard`` renews it."""
    assert json.loads(dashboard.FILE.read_text()) == dashboard.dashboard()


def test_its_panels_lie_side_by_side_and_have_a_question_each() -> None:
    panels = dashboard.dashboard()["panels"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)
    assert all(panel["description"].endswith("?") for panel in panels)
    for panel in dashboard.PANELS:
        for query, legend in panel.queries:
            given = {
                name
                for selector in selectors(query.replace("$__rate_interval", "5m"))
                for name in SAMPLES[selector.name]
            }
            assert set(re.findall(r"{{(\w+)}}", legend)) <= given


# --- what they do ---------------------------------------------------------------------------------------------------


class Pool:
    """Implements what ``metrics`` wants to know of a pool."""

    ejections = 0

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def states(self) -> dict[str, int]:
        return self._fleet.states


class Fleet:
    """A coordinator's instruments, and a quarter of an hour of scrapes of them, one every 30 s."""

    def __init__(self) -> None:
        self.metrics = Metrics(CollectorRegistry())
        self.supervisor = ProcessMetrics()
        self.states = {"well": 3}
        self.scrapes = Scrapes()
        self.metrics.watch_pools(lambda: {"decode": Pool(self)})
        self.up, self.files = 1, 100
        self.succeeded_at: float | None = None

    def lasted(self, each: Callable[[Fleet, int], None] | None) -> float:
        """Serve well, and with a trouble beside it from the middle on; return when it ended."""
        now = 0.0
        for step in range(31):
            now = 30.0 * step
            self._serve()
            if self.succeeded_at is None or each is not lookups_fail:
                self.metrics.discovery_succeeded_at.labels("decode").set(now)
                self.succeeded_at = now
            if each is not None and step > 15:
                each(self, step)
            pages = self.metrics.page()[0].decode(), generate_latest(self.supervisor.registry).decode()
            files = f"process_open_fds {self.files}\nprocess_max_fds 1000\n"
            for page in (*pages, files, f"# TYPE up gauge\nup {self.up}\n"):
                self.scrapes.add(now, page, **TARGET)
        return now

    def _serve(self) -> None:
        for _ in range(10):
            self.request("ok")
            self.leg("prefill", "ok")
            self.metrics.handover_sent(0.01)
            self.metrics.waited(0.05, "let_in")
            self.stream(0.3, 0.02)

    def request(self, outcome: str) -> None:
        self.metrics.request("chat", outcome, "m", 1.0)

    def leg(self, step: str, outcome: str, worker: str = "10.0.0.1:8000") -> None:
        attempt = Attempt(step, step, worker, 0, 0.0, 0.1, outcome)
        self.metrics.attempt(attempt)
        self.metrics.leg(LegTime(step, 0.1, outcome, (attempt,)))

    def stream(self, ttft_s: float, gap_s: float) -> None:
        ticks = count(0, gap_s)
        pace = Pace(lambda: next(ticks), -ttft_s)
        for _ in range(10):
            pace.mark()
        self.metrics.stream("chat", "m", pace, ttft_s, 10)


def lookups_fail(fleet: Fleet, step: int) -> None:
    pass


def breaks(fleet: Fleet, step: int) -> None:
    fleet.metrics.stream_broken(Attempt("decode", "decode", "10.0.0.2:8000", 0, 0.0, 0.1, "LegFailed"))


def down(fleet: Fleet, step: int) -> None:
    fleet.up = 0


def files_open(fleet: Fleet, step: int) -> None:
    fleet.files = 950


def left_out(fleet: Fleet, step: int) -> None:
    fleet.states = {"well": 1, "ejected": 1, "down": 1}


def old(fleet: Fleet, step: int) -> None:
    fleet.metrics.handover_sent(9.0)


TROUBLES: dict[str, Callable[[Fleet, int], None]] = {
    "CoordinatorDown": down,
    "RequestsFail": lambda fleet, step: fleet.request("leg_failed"),
    "CoordinatorFault": lambda fleet, step: fleet.request("internal_error") if step == 25 else None,
    "BackgroundFault": lambda fleet, step: fleet.metrics.background_failed("probes") if step == 25 else None,
    "WorkerFails": lambda fleet, step: fleet.leg("decode", "LegTimeout", "10.0.0.2:8000"),
    "WorkersLeftOut": left_out,
    "StreamsBreakOff": breaks,
    "HandoversMissing": lambda fleet, step: [fleet.metrics.handover_missing("absent", "fail") for _ in range(4)],
    "HandoversGrowOld": old,
    "DecodeWorksAlone": lambda fleet, step: [fleet.metrics.prefill_failed_over("LegTimeout") for _ in range(4)],
    "AnswersUnusable": lambda fleet, step: fleet.metrics.unusable("decode", "LegUnechoed"),
    "RequestsQueue": lambda fleet, step: [fleet.metrics.waited(5.0, "let_in") for _ in range(20)],
    "RequestsTurnedAway": lambda fleet, step: fleet.request("overloaded"),
    "FirstTokenSlow": lambda fleet, step: [fleet.stream(25.0, 0.02) for _ in range(5)],
    "TokensSlow": lambda fleet, step: [fleet.stream(0.3, 0.9) for _ in range(5)],
    "WorkersNotFound": lookups_fail,
    "ConfigurationRefused": lambda fleet, step: step == 25 and fleet.metrics.config_reloads.labels("refused").inc(),
    "ParserProcessesEnd": lambda fleet, step: fleet.metrics.parser_ended("hung") if step == 25 else None,
    "FilesRunOut": files_open,
    "ProcessesDie": lambda fleet, step: fleet.supervisor.restarts.inc() if step % 5 == 0 else None,
}


@cache
def troubled(alert: str) -> dict[Any, float]:
    fleet = Fleet()
    at = fleet.lasted(TROUBLES[alert])
    return fleet.scrapes.at(BY_NAME[alert]["expr"], at)


def test_every_rule_has_a_trouble() -> None:
    assert TROUBLES.keys() == BY_NAME.keys()


@pytest.fixture(scope="module")
def healthy() -> tuple[Scrapes, float]:
    fleet = Fleet()
    return fleet.scrapes, fleet.lasted(None)


@pytest.mark.parametrize("alert", BY_NAME)
def test_a_rule_fires_on_its_trouble_and_is_silent_on_a_healthy_fleet(
    healthy: tuple[Scrapes, float], alert: str
) -> None:
    scrapes, at = healthy
    assert scrapes.at(BY_NAME[alert]["expr"], at) == {}
    assert troubled(alert)


def test_a_panel_draws_something_of_a_healthy_fleet(healthy: tuple[Scrapes, float]) -> None:
    scrapes, at = healthy
    drawn = {
        panel.title
        for panel in dashboard.PANELS
        for query, _ in panel.queries
        if scrapes.at(query.replace("$__rate_interval", "5m"), at)
    }
    assert drawn >= {
        "Requests",
        "Time to first token",
        "Time per output token",
        "Legs, 95th percentile",
        "Hand-over age",
    }
