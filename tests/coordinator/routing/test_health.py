"""Who is left out of a pool for a while, for what, for how long, and how it comes back."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from coordinator.routing.health import Health, HealthLimits
from coordinator.routing.members import Members
from coordinator.routing.policies import RoundRobin
from coordinator.routing.pool import PoolRouter
from envelope.errors import (
    ApiError,
    BadRequest,
    LegBusy,
    LegFailed,
    LegRejected,
    LegTimeout,
    LegUnechoed,
    LegUnreadable,
    NoWorker,
)
from tests.coordinator.routing.pools import asked, letters

if TYPE_CHECKING:
    from coordinator.routing.router import Worker

FAILED = LegFailed("decode", "the worker answered 500")
LIMITS = HealthLimits(failures=3, first_s=10, longest_s=60, least_left=0.2)
FOUR = ["http://a", "http://b", "http://c", "http://d"]


class Pool:
    """A pool, its health, and a clock that stands."""

    def __init__(self, urls: list[str] = FOUR, limits: HealthLimits = LIMITS) -> None:
        self.now = 1000.0
        self.members = Members(urls)
        self.health = Health("decode", self.members, limits, lambda: self.now)
        self.router = PoolRouter(self.members, RoundRobin(), self.health, name="round_robin")

    def worker(self, letter: str) -> Worker:
        return next(worker for worker in self.members.workers if worker.url[-1] == letter)

    def fails(self, letter: str, times: int = 1, error: ApiError = FAILED) -> None:
        for _ in range(times):
            self.router.report(self.worker(letter), error)

    def goes_well(self, letter: str) -> None:
        self.router.report(self.worker(letter), None)

    def picked(self, times: int = 8) -> str:
        return letters(self.router, times)

    def state(self, letter: str) -> str:
        return self.health.state(self.worker(letter))


def test_a_worker_is_left_out_after_so_many_failures_in_a_row() -> None:
    pool = Pool()
    pool.fails("b", 2)
    assert "b" in pool.picked()
    pool.fails("b")
    assert set(pool.picked()) == set("acd")
    assert (pool.state("b"), pool.health.ejections) == ("ejected", 1)


def test_failures_with_a_success_between_them_are_not_in_a_row() -> None:
    pool = Pool()
    for _ in range(5):
        pool.fails("b", 2)
        pool.goes_well("b")
    assert "b" in pool.picked()


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (LegFailed("decode", "500, or cut"), True),
        (LegTimeout("decode", "too late"), True),
        (LegRejected("decode", 400, {"message": "bad"}), False),
        (LegRejected("decode", 429, {"message": "slow down"}), False),
        (LegBusy("decode", "full"), False),
        (NoWorker("decode", "nobody"), False),
        (LegUnechoed("decode", "another mode"), False),
        (LegUnreadable("decode", "no JSON"), False),
        (BadRequest("a header"), False),
    ],
)
def test_what_counts_is_what_the_worker_did(error: ApiError, counts: bool) -> None:
    """R01, E1: never a 4xx. What a request provokes, or what needs another configuration, is no illness either."""
    pool = Pool()
    pool.fails("b", 50, error)
    assert ("b" in pool.picked()) is not counts


def test_on_trial_it_gets_a_leg_a_second_and_one_that_goes_well_brings_it_back() -> None:
    pool = Pool()
    pool.fails("b", 3)
    pool.now += 9.9
    assert "b" not in pool.picked()
    pool.now += 0.1
    assert pool.picked().count("b") == 1 and pool.state("b") == "trial"
    pool.now += 0.5
    assert "b" not in pool.picked()
    pool.now += 0.5
    assert pool.picked().count("b") == 1, "the first may never tell, as its client may leave"
    pool.goes_well("b")
    assert pool.picked().count("b") == 2 and pool.state("b") == "well"


def test_who_is_left_out_has_no_places_beside_those_of_its_legs() -> None:
    """The others would be given theirs, above their own limit."""
    pool = Pool()
    pool.worker("a").begin()
    pool.worker("b").begin()
    assert pool.router.places(8) == 32
    pool.fails("b", 3)
    assert pool.router.places(8) == 24 + 1, "its leg holds a place, and keeps nobody from the others'"
    pool.worker("b").end()
    assert pool.router.places(8) == 24
    pool.now += 10
    assert pool.router.places(8) == 24 and pool.state("b") == "trial"
    pool.goes_well("b")
    assert pool.router.places(8) == 32
    pool.members.replace(FOUR[1:])
    assert pool.router.places(8) == 24 + 1, "a, which left, has a leg"


def test_when_nobody_else_is_left_those_on_trial_have_places() -> None:
    pool = Pool(FOUR[:2], HealthLimits(failures=1, first_s=10, least_left=0))
    pool.fails("a")
    assert pool.router.places(8) == 8
    pool.fails("b")
    assert (pool.router.places(8), pool.router.pick(asked())) == (16, None), "nobody waits for what may not come back"
    pool.now += 10
    assert pool.router.places(8) == 16


def test_each_time_it_is_out_for_twice_as_long_up_to_a_limit() -> None:
    pool = Pool()
    pool.fails("b", 3)
    for seconds in (10, 20, 40, 60, 60):
        pool.now += seconds - 0.1
        assert "b" not in pool.picked()
        pool.now += 0.1
        assert "b" in pool.picked()
        pool.fails("b")
    assert pool.health.ejections == 6


def test_after_it_came_back_the_next_failure_is_enough_until_one_leg_has_gone_well() -> None:
    pool = Pool()
    pool.fails("b", 3)
    pool.now += 10
    pool.goes_well("b")
    pool.fails("b")
    assert pool.state("b") == "ejected"
    pool.now += 19.9
    assert "b" not in pool.picked(), "and for longer than before"
    pool.now += 0.1
    pool.goes_well("b")
    pool.goes_well("b")
    pool.fails("b", 2)
    assert pool.state("b") == "well"


def test_after_a_long_time_without_failure_it_begins_anew() -> None:
    pool = Pool()
    pool.fails("b", 3)
    pool.now += 10
    pool.goes_well("b")
    pool.now += 61
    pool.fails("b", 3)
    pool.now += 10
    assert "b" in pool.picked(), "as long as the first time"


def test_a_stream_from_before_that_ends_well_does_not_end_its_time() -> None:
    pool = Pool()
    pool.fails("b", 3)
    pool.goes_well("b")
    pool.fails("b", 3)
    assert "b" not in pool.picked() and pool.health.ejections == 1


def test_when_too_few_would_be_left_all_are_used(caplog: pytest.LogCaptureFixture) -> None:
    """Below a fifth of the pool our judgement is worth less than the workers."""
    pool = Pool([f"http://{letter}" for letter in "abcdefghij"])
    with caplog.at_level(logging.WARNING, "coordinator"):
        for letter in "abcdefgh":
            pool.fails(letter, 3)
        assert set(pool.picked(20)) == set("ij")
        pool.fails("i", 3)
        assert set(pool.picked(20)) == set("abcdefghij")
    assert caplog.records[-1].getMessage() == "decode: 1 of 10 workers are left, so all are used"
    pool.goes_well("a")
    assert set(pool.picked(20)) == set("aj")


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_pool_of_which_all_fail_is_used_all_the_same(count: int) -> None:
    pool = Pool(FOUR[:count])
    for letter in "abc"[:count]:
        pool.fails(letter, 3)
    assert set(pool.picked()) == set("abc"[:count])


def test_without_a_panic_threshold_nobody_is_picked_then() -> None:
    pool = Pool(FOUR[:2], HealthLimits(failures=1, least_left=0.0))
    pool.fails("a")
    pool.fails("b")
    assert pool.picked() == ""


def test_zero_failures_never_put_anybody_out() -> None:
    pool = Pool(limits=HealthLimits(failures=0))
    pool.fails("b", 1000)
    assert "b" in pool.picked()


def test_a_worker_is_down_after_two_probes_that_failed_until_one_goes_well(caplog: pytest.LogCaptureFixture) -> None:
    pool = Pool()
    b = pool.worker("b")
    with caplog.at_level(logging.WARNING, "coordinator"):
        pool.health.probed(b, "http://b cannot be reached")
        assert "b" in pool.picked()
        pool.health.probed(b, None)
        pool.health.probed(b, "http://b cannot be reached")
        assert "b" in pool.picked()
        pool.health.probed(b, "http://b cannot be reached")
        pool.health.probed(b, "http://b cannot be reached")
        assert set(pool.picked()) == set("acd") and pool.state("b") == "down"
        pool.health.probed(b, None)
    assert "b" in pool.picked()
    assert [record.getMessage() for record in caplog.records] == [
        "decode: http://b is left out: http://b cannot be reached",
        "decode: http://b is back",
    ]


def test_health_that_is_well_does_not_bring_a_worker_back_whose_legs_fail() -> None:
    """An engine may fail every request while its server answers /health."""
    pool = Pool()
    pool.fails("b", 3)
    pool.health.probed(pool.worker("b"), None)
    assert "b" not in pool.picked()


def test_a_worker_that_left_is_forgotten_and_comes_back_as_new() -> None:
    pool = Pool()
    pool.fails("b", 3)
    pool.members.replace(["http://a"])
    assert pool.picked(2) == "aa"
    pool.members.replace(FOUR)
    assert "b" in pool.picked() and pool.state("b") == "well"


def test_how_many_are_in_each_state_is_known() -> None:
    pool = Pool([*FOUR, "http://e"])
    pool.fails("a", 3)
    pool.now += 10
    pool.fails("b", 3)
    for _ in range(2):
        pool.health.probed(pool.worker("c"), "http://c cannot be reached")
    pool.worker("e").begin()
    pool.members.replace(FOUR)
    assert pool.health.states() == {"well": 1, "trial": 1, "ejected": 1, "down": 1, "leaving": 1}
