"""A plan takes another's place: what is known of workers that stay goes on, and their legs are counted once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from coordinator.routing.choice import pool_router
from coordinator.routing.members import Members
from coordinator.settings.pools import Pool
from envelope.errors import LegFailed
from tests.coordinator.routing.pools import asked

if TYPE_CHECKING:
    from coordinator.routing.pool import PoolRouter

A, B, C = "http://a:1", "http://b:1", "http://c:1"
PROMPT = list(range(2000))


def router(*urls: str, key: str = "k", **params: Any) -> PoolRouter:
    pool = Pool.model_validate({"endpoints": list(urls), **params})
    return pool_router("decode", pool, Members(urls, [("Authorization", key)]), None)


def picks(of: PoolRouter, count: int) -> list[str]:
    found, ctx = [], asked(PROMPT)
    for _ in range(count):
        if worker := of.pick(ctx):
            of.sending(ctx, worker)
            found.append(worker.url)
    return found


def test_a_worker_that_stays_is_the_same_with_its_legs_and_the_pool_has_their_tokens() -> None:
    old, new = router(A, B), router(B, C)
    a, b = old.members.workers
    b.begin(300)
    a.begin(50)
    new.take_over(old)
    assert new.members.workers[0] is b and [worker.url for worker in new.members.workers] == [B, C]
    assert new.members.leaving == (a,)
    assert new.members.load.tokens == 350
    b.end(300)
    assert new.members.load.tokens == 50


def test_the_new_policy_hears_of_a_leg_of_the_old_plan_that_ends() -> None:
    """Its heap has the load that each worker had; one that has become less must be told."""
    old, new = router(A, B, policy="least_inflight"), router(A, B, policy="least_inflight")
    a, b = old.members.workers
    a.begin(5000)
    new.take_over(old)
    assert picks(new, 3) == [B, B, B]
    b.begin(400)
    a.end(5000)
    assert picks(new, 3) == [A, A, A]


def test_who_was_left_out_stays_left_out() -> None:
    old, new = router(A, B, health={"failures": 1}), router(A, B, health={"failures": 1})
    a, _ = old.members.workers
    old.report(a, LegFailed("decode", "no"))
    assert old.health is not None and old.health.state(a) == "ejected"
    new.take_over(old)
    assert new.health is not None and new.health.state(a) == "ejected"
    assert set(picks(new, 4)) == {B}


def test_what_workers_were_sent_is_remembered_and_the_old_plan_goes_on_alone() -> None:
    urls = [f"http://10.0.0.{number}:1" for number in range(20)]
    old, new = router(*urls, policy="prefix_affinity"), router(*reversed(urls), policy="prefix_affinity")
    (sent,) = picks(old, 1)
    new.take_over(old)
    assert picks(new, 1) == [sent]
    worker = next(worker for worker in new.members.workers if worker.url == sent)
    assert "was sent" in new.why(asked(PROMPT), worker)
    (again,) = picks(old, 1)
    assert "by hash" in old.why(asked(PROMPT), next(one for one in old.members.workers if one.url == again))


@pytest.mark.parametrize("policy", ["round_robin", "least_inflight", "prefix_affinity", "power_of_two", "random"])
def test_another_key_makes_another_worker_of_it(policy: str) -> None:
    """Requests under way go on with the old key, and nobody is sent one that is not of his plan."""
    old, new = router(A, policy=policy), router(A, key="other", policy=policy)
    (before,) = old.members.workers
    before.begin(10)
    new.take_over(old)
    (after,) = new.members.workers
    assert after is not before and (after.in_flight, new.members.load.tokens) == (0, 0)
    assert (before.headers, after.headers) == ([("Authorization", "k")], [("Authorization", "other")])
    assert picks(new, 1) == [A]


def test_what_the_new_plan_has_found_a_worker_to_lack_holds() -> None:
    """It has asked the workers by then, and may need other things of them than the old plan."""
    old, new = router(A), router(A)
    old.learn(old.members.workers[0], {"text": "an old word"})
    new.learn(new.members.workers[0], {"derender": "too old"})
    new.take_over(old)
    assert new.pick(asked(), needs="derender") is None and new.pick(asked(), needs="text") is not None
    assert new.why_none("derender") == "too old"
