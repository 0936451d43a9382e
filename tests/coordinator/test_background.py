"""What runs beside requests outlives its faults, is told of each, and ends when its owner says so."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from coordinator import background
from coordinator.app import build
from coordinator.background import wait_s
from coordinator.config import Config
from coordinator.processes.member import Member
from coordinator.serve import Alone
from coordinator.telemetry.model_names import ModelNames
from tests.background import FaultsTold
from tests.bounds import HANG_S

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

CONFIG = {"pools": {"decode": {"endpoints": ["http://127.0.0.1:1"]}}, "pipeline": {"steps": [{"type": "decode"}]}}


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """After how many failures in a row there was a wait, which is none."""
    found: list[int] = []

    def at_once(failures: int) -> float:
        found.append(failures)
        return 0.0

    monkeypatch.setattr(background, "wait_s", at_once)
    return found


def failing(times: int) -> Callable[[], Awaitable[None]]:
    left = iter(range(times))

    async def run() -> None:
        for _ in left:
            raise ZeroDivisionError

    return run


async def test_what_fails_is_begun_anew_and_what_returns_is_over(waits: list[int]) -> None:
    faults = FaultsTold()
    async with asyncio.timeout(HANG_S):
        await faults.keep_up("probes", failing(3))
    assert (faults.counts, waits) == ({"probes": 3}, [1, 2, 3])


async def test_what_ran_for_long_begins_to_fail_anew(waits: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_LONGEST_WAIT_S", 0.0)
    async with asyncio.timeout(HANG_S):
        await FaultsTold().keep_up("probes", failing(3))
    assert waits == [1, 1, 1]


async def test_each_is_counted_and_one_in_a_while_is_logged_with_its_traceback(
    waits: list[int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = FaultsTold()
    async with asyncio.timeout(HANG_S):
        await faults.keep_up("probes", failing(5))
        await faults.keep_up("load", failing(1))
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: 1e9)  # a while later
        await faults.keep_up("load", failing(1))
    assert faults.counts == {"probes": 5, "load": 2}
    assert [record.getMessage().split()[0] for record in caplog.records] == ["probes", "load", "load"]
    assert all(record.exc_info and record.exc_info[0] is ZeroDivisionError for record in caplog.records)


async def test_it_ends_at_once_when_its_owner_cancels_it_in_a_wait_too() -> None:
    faults = FaultsTold()
    waiting = asyncio.create_task(faults.keep_up("probes", failing(1)))
    async with asyncio.timeout(HANG_S):
        while not faults.counts:
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_failures_in_a_row_are_waited_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background.random, "uniform", lambda low, high: high)
    assert [wait_s(failures) for failures in (1, 2, 3, 6, 2000)] == [1.0, 2.0, 4.0, 30.0, 30.0]


class Steered:
    """Stands for a reloader, a file and a supervisor, each of which fails whenever it is heard."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    async def run(self, *_: object) -> None:
        raise ZeroDivisionError


@pytest.mark.parametrize(("steering", "parts"), [("alone", ("_reloader", "_file")), ("member", ("_apply", "_obey"))])
async def test_a_process_goes_on_whatever_fails_in_its_steering(
    waits: list[int], monkeypatch: pytest.MonkeyPatch, steering: str, parts: tuple[str, str]
) -> None:
    app, faults = build(Config.model_validate(CONFIG)), FaultsTold()
    app.faults = faults  # type: ignore[assignment]
    made = Alone("/no/such") if steering == "alone" else Member(None)  # type: ignore[arg-type]
    monkeypatch.setattr(made, "_app", app, raising=False)
    for part in parts:
        monkeypatch.setattr(made, part, Steered() if steering == "alone" else Steered().run, raising=False)
    running = asyncio.create_task(made.run())
    async with asyncio.timeout(HANG_S):
        while faults.counts.total() < 6:
            await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert set(faults.counts) == ({"reload"} if steering == "alone" else {"reload", "supervisor"})


async def test_names_that_could_not_be_asked_for_by_a_fault_are_asked_for_again(waits: list[int]) -> None:
    names, faults, asked = ModelNames(), FaultsTold(), asyncio.Event()

    async def ask() -> bytes:
        if not faults.counts:
            raise ZeroDivisionError
        asked.set()
        return b'{"data": [{"id": "m"}]}'

    running = asyncio.create_task(faults.keep_up("models", lambda: names.run(ask)))
    async with asyncio.timeout(HANG_S):
        await asked.wait()
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait((running,))
    assert names.label("m") == "m"
