"""Limits that hold for all processes together are divided among them, and nothing is lost or made of it."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.config import Config
from coordinator.processes.shares import share
from coordinator.registry import build
from coordinator.settings.problems import ConfigError


class NoEvents:
    """Nobody asks anything here."""


def config(workers: int, concurrency: int, queue: int, inflight: int) -> Config:
    server = {"workers": workers, "max_concurrency": concurrency, "queue_size": queue}
    decode: dict[str, Any] = {"endpoints": ["http://127.0.0.1:1"], "max_inflight": inflight}
    return Config.model_validate(
        {"server": server, "pools": {"decode": decode}, "pipeline": {"steps": [{"type": "decode"}]}}
    )


def shares(whole: Config) -> list[tuple[int, int, int]]:
    parts = [share(whole, index) for index in range(whole.server.workers)]
    assert all(part.pools.decode is not None and part.pools.prefill is None for part in parts)
    return [
        (part.server.max_concurrency, part.server.queue_size, part.pools.decode.max_inflight)
        for part in parts
        if part.pools.decode is not None
    ]


def test_limits_are_divided_and_the_first_have_what_is_left_over() -> None:
    assert shares(config(3, 10, 100, 5)) == [(4, 34, 2), (3, 33, 2), (3, 33, 1)]


def test_no_limit_is_no_limit_for_each() -> None:
    assert shares(config(2, 0, 0, 0)) == [(0, 0, 0)] * 2


def test_one_process_has_all_of_it() -> None:
    whole = config(1, 7, 9, 3)
    assert share(whole, 0) == whole


@pytest.mark.parametrize(
    ("limits", "path"), [((1, 0), "server.max_concurrency"), ((0, 1), "pools.decode.max_inflight")]
)
def test_a_limit_that_would_be_none_for_somebody_is_refused(limits: tuple[int, int], path: str) -> None:
    with pytest.raises(ConfigError) as told:
        build(config(2, limits[0], 100, limits[1]), NoEvents())
    (problem,) = told.value.problems
    assert problem.endswith(f"{path}: 1 cannot be divided among the 2 processes of server.workers, write 2 or more")


def test_the_places_at_render_servers_are_divided_too() -> None:
    render = {"endpoints": ["http://127.0.0.1:2"], "max_inflight": 1}
    tree = config(2, 0, 100, 0).model_dump(mode="json", exclude_unset=True)
    tree["pools"]["render"], tree["pipeline"]["steps"] = render, [{"type": "render"}, {"type": "decode"}]
    with pytest.raises(ConfigError, match=r"pools\.render\.max_inflight: 1 cannot be divided among the 2 processes"):
        build(Config.model_validate(tree), NoEvents())


def test_as_many_as_there_are_processes_is_enough() -> None:
    build(config(2, 2, 0, 2), NoEvents())
