"""What a pool does with what is looked up: who joins, who leaves, and how long old answers are believed."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from coordinator.routing.discovery import Discovery, Finder, LookupFailed
from coordinator.routing.members import Members
from tests.background import FaultsTold
from tests.bounds import HANG_S

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

A, B, C = (f"http://10.0.0.{number}:8000" for number in (1, 2, 3))


class Script:
    """A source that yields lists, raises errors, and notes how often it was asked from the start."""

    def __init__(self, *says: list[str] | Exception) -> None:
        self._says = list(says)
        self.starts = 0
        self.spent = asyncio.Event()

    async def found(self) -> AsyncGenerator[list[str], None]:
        self.starts += 1
        while self._says:
            says = self._says.pop(0)
            if isinstance(says, Exception):
                raise says
            yield says
        self.spent.set()
        await asyncio.Event().wait()


@dataclass
class Events:
    workers: list[int] = field(default_factory=list)
    succeeded: int = 0
    failed: int = 0

    def discovered(self, role: str, workers: int) -> None:
        self.workers.append(workers)

    def discovery_succeeded(self, role: str) -> None:
        self.succeeded += 1

    def discovery_failed(self, role: str) -> None:
        self.failed += 1


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.background._FIRST_WAIT_S", 0.0)


async def played(
    *says: list[str] | Exception, keep_s: float | None = 600.0, steps_s: float = 0.0
) -> tuple[Finder, Members, Events]:
    """Play a script to its end; the clock goes ``steps_s`` forward each time that it is read."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += steps_s
        return now

    script, members, events = Script(*says), Members(), Events()
    finder = Finder("prefill", members, script, keep_s, events, clock)
    running = asyncio.create_task(FaultsTold().keep_up("discovery", finder.run))
    try:
        async with asyncio.timeout(HANG_S):
            await script.spent.wait()
    finally:
        running.cancel()
        await asyncio.wait((running,))
    return finder, members, events


def urls(members: Members) -> list[str]:
    return [worker.url for worker in members.workers]


async def test_who_is_found_is_a_worker_and_who_is_found_no_more_is_none() -> None:
    _, members, events = await played([A, B], [B, C])
    assert urls(members) == [B, C]
    assert (events.workers, events.succeeded, events.failed) == ([2, 2], 2, 0)


async def test_a_change_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "coordinator"):
        await played([A, B], [A, B], [B, C])
    told = [record.fields for record in caplog.records if record.levelno == logging.INFO]  # type: ignore[attr-defined]
    assert told == [
        {"workers": 2, "joined": [A, B], "left": []},
        {"workers": 2, "joined": [C], "left": [A]},
    ]


async def test_a_failed_look_up_keeps_the_workers_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "coordinator"):
        _, members, events = await played([A], LookupFailed("no answer"), LookupFailed("no answer"), [A])
    assert urls(members) == [A]
    assert (events.succeeded, events.failed) == (2, 2)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "prefill: workers found"),
        ("WARNING", "prefill: workers cannot be looked up: no answer"),
        ("INFO", "prefill: workers are found again"),
    ]


# (how long workers are kept, those that are left after two failures more than 20 s apart)
KEPT: list[tuple[float | None, list[str]]] = [(600.0, [A]), (20.0, []), (None, [A])]


@pytest.mark.parametrize(("keep_s", "left"), KEPT)
async def test_workers_are_given_up_when_look_ups_have_failed_for_too_long(
    keep_s: float | None, left: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    finder, members, _ = await played([A], LookupFailed("x"), LookupFailed("x"), keep_s=keep_s, steps_s=10.0)
    assert urls(members) == left
    assert finder.why_none() == "no workers were found: x"
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == (0 if left else 1)
    assert all(error.startswith("prefill: its workers are given up, no look-up has succeeded for ") for error in errors)


async def test_workers_that_were_given_up_come_back() -> None:
    _, members, events = await played([A], LookupFailed("x"), [A], keep_s=1.0, steps_s=10.0)
    assert urls(members) == [A]
    assert events.workers == [1, 0, 1]


async def test_an_empty_answer_is_an_answer() -> None:
    """It is Kubernetes' word that there is nobody; DNS, whose word is worth less, fails instead."""
    finder, members, _ = await played([A], [])
    assert urls(members) == []
    assert finder.why_none() == "no workers were found"


async def test_a_fault_of_our_own_is_logged_and_does_not_end_the_looking(caplog: pytest.LogCaptureFixture) -> None:
    _, members, events = await played(KeyError("metadata"), [A])
    assert urls(members) == [A]
    assert events.failed == 1
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [KeyError]


async def test_before_the_first_answer_workers_are_being_looked_up() -> None:
    finder = Finder("decode", Members(), Script(), None, Events(), lambda: 0.0)
    assert finder.why_none() == "workers are being looked up"


async def test_the_start_waits_for_every_first_answer_but_not_for_ever() -> None:
    scripts = Script([A]), Script()
    members: Any = Members(), Members()
    finders = [Finder("decode", m, s, None, Events(), lambda: 0.0) for m, s in zip(members, scripts, strict=True)]
    running = [asyncio.create_task(finder.run()) for finder in finders]
    assert not await Discovery(finders).answered(0.05)
    assert finders[0].answered.is_set() and not finders[1].answered.is_set()
    assert await Discovery(finders[:1]).answered(5.0)
    for task in running:
        task.cancel()
    await asyncio.wait(running)


# (seconds from one reading of the clock to the next, how often it has failed in a row each time that it waits)
IN_A_ROW = [(1.0, [1, 2, 3]), (20.0, [1, 1, 1])]


@pytest.mark.parametrize(("steps_s", "in_a_row"), IN_A_ROW)
async def test_an_answer_between_two_failures_is_no_recovery_unless_it_lasted(
    monkeypatch: pytest.MonkeyPatch, steps_s: float, in_a_row: list[int]
) -> None:
    """An account that may list and not watch would be asked every second, and told of twice, for ever."""
    waited: list[int] = []

    def wait_s(failures: int) -> float:
        waited.append(failures)
        return 0.0

    monkeypatch.setattr("coordinator.routing.discovery.wait_s", wait_s)
    failed = LookupFailed("no watch")
    await played([A], failed, [A], failed, [A], failed, steps_s=steps_s)
    assert waited == in_a_row
