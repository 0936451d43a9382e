"""Which models metrics may name: those that are configured or listed by a worker, and no client's inventions."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from coordinator.telemetry.model_names import ModelNames
from tests.bounds import HANG_S


def listing(*names: Any) -> bytes:
    return json.dumps({"object": "list", "data": [{"id": name, "object": "model"} for name in names]}).encode()


def test_a_name_that_nobody_lists_is_other() -> None:
    names = ModelNames()
    names.add(["configured"])
    names.learn(listing("base", "adapter"))
    asked = ["configured", "base", "adapter", "invented", "", None, ["base"], {"id": "base"}, 3]
    assert [names.label(name) for name in asked] == ["configured", "base", "adapter", *["other"] * 6]


NO_LISTS = [b"", b"[", b"[]", b"null", b'{"data":{}}', b'{"data":[1,null,{}]}', b"[" * 9999]


@pytest.mark.parametrize("raw", [*NO_LISTS, listing(None, 3, "", ["x"])])
def test_what_is_no_list_teaches_nothing(raw: bytes) -> None:
    names = ModelNames()
    names.learn(raw)
    assert names._known == set()


def test_a_list_without_end_is_cut() -> None:
    """I1: each name is as many series as there are routes, outcomes and buckets."""
    names = ModelNames()
    names.learn(listing(*map(str, range(1000))))
    assert sum(names.label(str(i)) != "other" for i in range(1000)) == 100


class Asked:
    """Workers that answer with these lists, one after another, and with the last one for ever."""

    def __init__(self, *answers: bytes | None) -> None:
        self._answers = list(answers)
        self.times = 0

    async def __call__(self) -> bytes | None:
        self.times += 1
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between two questions are over at once."""
    pause = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda s: pause(0))


async def until(asked: Asked, times: int) -> None:
    async with asyncio.timeout(HANG_S):
        while asked.times < times:
            await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)


async def test_workers_are_asked_until_one_answers_and_then_for_a_reason(hurried: None) -> None:
    names, asked = ModelNames(), Asked(None, None, listing("base"), listing("base", "adapter"))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(names.run(asked))
        await until(asked, 3)
        assert (asked.times, names.label("base")) == (3, "base")
        assert names.label("adapter") == "other"  # refused by the workers, perhaps: no reason to ask
        await until(asked, 3)
        assert asked.times == 3
        assert names.label("adapter", answered=True) == "other"
        await until(asked, 4)
        assert names.label("adapter", answered=True) == "adapter"
        running.cancel()
