"""One worker of a pool for each leg, by each of the policies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from coordinator.routing.members import Members
from coordinator.routing.policies import POLICIES
from coordinator.routing.pool import PoolRouter

if TYPE_CHECKING:
    from coordinator.context import RequestContext
    from coordinator.routing.router import Worker

CTX: RequestContext = None  # type: ignore[assignment]  # these policies look at no request

URLS = ["http://a", "http://b", "http://c"]


def picked(router: PoolRouter, times: int) -> str:
    """Return the last letters of the workers that are picked one after the other."""
    return "".join(worker.url[-1] for _ in range(times) if (worker := router.pick(CTX)) is not None)


def test_round_robin_takes_each_in_its_turn() -> None:
    assert picked(PoolRouter(Members(URLS), "round_robin"), 7) == "abcabca"


def test_least_inflight_takes_the_one_with_the_fewest_and_among_equals_each_in_its_turn() -> None:
    router = PoolRouter(Members(URLS), "least_inflight")
    a, b, c = router.known()
    assert picked(router, 4) == "abca"
    a.in_flight, b.in_flight, c.in_flight = 2, 0, 1
    assert picked(router, 2) == "bb"
    b.in_flight = 1
    assert sorted(picked(router, 2)) == ["b", "c"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_worker_that_was_tried_is_not_picked_again(policy: str) -> None:
    router = PoolRouter(Members(URLS), policy)
    tried: list[Worker] = []
    for _ in URLS:
        worker = router.pick(CTX, tried)
        assert worker is not None and worker not in tried
        tried.append(worker)
    assert router.pick(CTX, tried) is None


@pytest.mark.parametrize("policy", POLICIES)
def test_a_full_worker_is_left_out_while_another_has_room(policy: str) -> None:
    router = PoolRouter(Members(URLS), policy, max_inflight=2)
    a, b, c = router.known()
    a.in_flight, b.in_flight, c.in_flight = 2, 3, 1
    assert picked(router, 3) == "ccc"
    c.in_flight = 2
    assert set(picked(router, 6)) <= set("abc"), "admission let it in, so somebody must do it"
    assert router.pick(CTX, [a, b]) is c


def test_every_request_is_served_and_every_worker_can_be_asked_for_its_health() -> None:
    router = PoolRouter(Members(URLS), "round_robin")
    assert router.serves(CTX)
    assert [worker.url for worker in router.known()] == URLS
    assert all((worker.headers, worker.in_flight) == ((), 0) for worker in router.known())


def test_a_pool_without_workers_picks_none() -> None:
    router = PoolRouter(Members(), "round_robin")
    assert router.pick(CTX) is None and router.known() == ()
    router.members.replace(["http://a"])
    assert picked(router, 2) == "aa"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_worker_that_left_is_picked_no_more_and_one_that_came_is(policy: str) -> None:
    router = PoolRouter(Members(URLS), policy)
    picked(router, 2)
    router.members.replace(["http://c", "http://d"])
    assert set(picked(router, 4)) == set("cd")
