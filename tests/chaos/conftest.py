"""Prints what the chaos tests have counted. Long forms of them run with CHAOS=full (``make chaos``)."""

from __future__ import annotations

import os
import random
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.chaos.report import LINES

if TYPE_CHECKING:
    from collections.abc import Iterable

FULL = os.environ.get("CHAOS") == "full"


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    if FULL:
        for item in items:
            if "tests/chaos" in item.nodeid:
                item.add_marker(pytest.mark.timeout(0))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # one of several processes: the lines are told by the first
        session.config.workeroutput["chaos"] = LINES


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    LINES.extend(getattr(node, "workeroutput", {}).get("chaos", ()))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if LINES:
        terminalreporter.section("chaos")
        for line in LINES:
            terminalreporter.write_line(line)


@pytest.fixture
def full() -> bool:
    """Whether this is the long form."""
    return FULL


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Chance with a known seed: the same every time in the short form, printed and another one in the long."""
    seed = int(os.environ.get("CHAOS_SEED") or (time.time() if FULL else 20))
    LINES.append(f"{request.node.name}: CHAOS_SEED={seed}")
    return random.Random(seed)
