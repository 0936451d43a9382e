"""Which worker each policy chooses by turn, chance or load, and that none is chosen that may not be."""

from __future__ import annotations

import random
from collections import Counter
from itertools import count, islice
from typing import TYPE_CHECKING, get_args

import pytest

from coordinator.routing.policies import LeastLoaded, PowerOfTwo, Random
from coordinator.routing.router import PoolLoad, Worker
from coordinator.settings.pools import PolicyName
from tests.coordinator.routing.pools import URLS, asked, letters, made

if TYPE_CHECKING:
    from collections.abc import Sequence

POLICIES = get_args(PolicyName)


def test_round_robin_takes_each_in_its_turn() -> None:
    assert letters(made("round_robin"), 7) == "abcabca"


def test_a_retry_takes_no_turn() -> None:
    """Else of two workers the one that fails would be the first for every request."""
    router = made("round_robin", URLS[:2])
    firsts = []
    for _ in range(6):
        worker = router.pick(asked())
        assert worker is not None
        firsts.append(worker.url[-1])
        if worker.url[-1] == "a":
            again = router.pick(asked(), [worker])
            assert again is not None and again.url[-1] == "b"
    assert "".join(firsts) == "ababab"


def test_random_takes_any_about_as_often_as_another() -> None:
    policy = Random(random.Random(1).random)
    workers = [Worker(url) for url in URLS]
    policy.use(workers)
    counts = Counter(policy.choose(asked()) for _ in range(3000))
    assert set(counts) == set(workers) and min(counts.values()) > 900


def test_power_of_two_takes_the_less_loaded_of_two_different_ones() -> None:
    """Of two workers it is always the less loaded; the most loaded of three is never chosen."""
    policy = PowerOfTwo(random.Random(1).random)
    a, b, c = workers = [Worker(url) for url in URLS]
    policy.use(workers[:2])
    b.begin(10)
    assert {policy.choose(asked()) for _ in range(50)} == {a}
    policy.use(workers)
    c.begin(5)
    counts = Counter(policy.choose(asked()) for _ in range(3000))
    assert counts[b] == 0 and counts[c] > 500


def test_least_inflight_takes_the_one_with_the_fewest_and_among_equals_each_in_its_turn() -> None:
    router = made("least_inflight")
    a, b, c = router.known()
    assert letters(router, 4) == "abca"
    for worker, legs in ((a, 3), (c, 2)):
        for _ in range(legs):
            worker.begin(256)
    assert letters(router, 2) == "bb"
    b.begin(256)
    b.begin(256)
    assert sorted(letters(router, 2)) == ["b", "c"]
    for _ in range(3):
        a.end(256)
    assert letters(router, 2) == "aa"


def test_least_inflight_goes_by_tokens_a_long_prompt_weighs_more_than_two_short_ones() -> None:
    router = made("least_inflight", URLS[:2])
    a, b = router.known()
    a.begin(router.sending(asked(range(5000)), a))
    for _ in range(3):
        b.begin(router.sending(asked(range(10)), b))
    assert letters(router, 3) == "bbb"


def test_what_a_leg_weighs_is_its_prompt_and_its_place_but_its_place_alone_where_it_carries_media() -> None:
    routers = made("least_inflight"), made("least_inflight", role="encode"), made("round_robin")
    assert [router.sending(asked(range(1000)), router.known()[0]) for router in routers] == [1256, 256, 0]


@pytest.mark.parametrize("loads", [[5, 3, 9, 1, 7], [0, 0, 0, 0], [2, 2, 1]])
def test_the_least_loaded_is_found_however_loads_have_moved_meanwhile(loads: Sequence[int]) -> None:
    """Against a look at every worker, over a thousand random changes."""
    pool = PoolLoad()
    policy, chance = LeastLoaded(pool), random.Random(7)
    workers = [Worker(f"http://{number}", (), pool) for number in range(len(loads))]
    for worker, load in zip(workers, loads, strict=True):
        worker.begin(load)
    policy.use(workers)
    begun = [*zip(workers, loads, strict=True)]
    for _ in range(1000):
        if begun and chance.random() < 0.5:
            worker, load = begun.pop(chance.randrange(len(begun)))
            worker.end(load)
        chosen = policy.choose(asked())
        assert chosen is not None and chosen.tokens == min(worker.tokens for worker in workers)
        load = chance.randrange(1, 100)
        chosen.begin(load)
        begun.append((chosen, load))
    assert pool.tokens == sum(worker.tokens for worker in workers) == sum(load for _, load in begun)


def test_the_heap_of_loads_does_not_grow_with_the_legs_that_end() -> None:
    pool = PoolLoad()
    policy = LeastLoaded(pool)
    worker = Worker("http://a", (), pool)
    policy.use([worker])
    for _ in range(10_000):
        worker.begin(1)
        worker.end(1)
    assert len(policy._heap) <= 4 + 64 + 1


def test_a_leg_that_ends_on_a_worker_that_has_left_brings_it_not_back() -> None:
    router = made("least_inflight")
    a, *_ = router.known()
    a.begin(256)
    router.members.replace(URLS[1:])
    assert set(letters(router, 4)) == set("bc")
    a.end(256)
    assert set(letters(router, 4)) == set("bc")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_worker_that_was_tried_is_not_picked_again(policy: str) -> None:
    router = made(policy)
    tried: list[Worker] = []
    for _ in URLS:
        worker = router.pick(asked(range(500)), tried)
        assert worker is not None and worker not in tried
        tried.append(worker)
    assert router.pick(asked(range(500)), tried) is None


@pytest.mark.parametrize("policy", POLICIES)
def test_a_full_worker_is_left_out_while_another_has_room(policy: str) -> None:
    router = made(policy, max_inflight=2)
    a, b, c = router.known()
    for worker, legs in ((a, 2), (b, 3), (c, 1)):
        for _ in range(legs):
            worker.begin(router.sending(asked(), worker))
    assert letters(router, 3, asked(range(500))) == "ccc"
    c.begin(router.sending(asked(), c))
    assert set(letters(router, 6)) <= set("abc"), "admission let it in, so somebody must do it"
    assert router.pick(asked(), [a, b]) is c


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pool_without_workers_picks_none(policy: str) -> None:
    router = made(policy, [])
    assert router.pick(asked(range(500))) is None and router.known() == ()
    router.members.replace(["http://a"])
    assert letters(router, 2) == "aa"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_worker_that_left_is_picked_no_more_and_one_that_came_is(policy: str) -> None:
    router = made(policy)
    letters(router, 2)
    router.members.replace(["http://c", "http://d"])
    picked = [router.pick(asked(range(number, number + 500))) for number in range(50)]
    assert {worker.url for worker in picked if worker} == {"http://c", "http://d"}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_served_and_the_choice_can_be_explained(policy: str) -> None:
    router = made(policy)
    ctx = asked(range(500))
    assert router.serves(ctx)
    worker = router.pick(ctx)
    assert worker is not None
    assert router.why(ctx, worker).startswith(f"by {policy}: ")


def test_the_only_worker_needs_no_explanation() -> None:
    router = made("least_inflight", URLS[:1])
    worker = router.pick(asked())
    assert worker is not None and router.why(asked(), worker) == "the only worker"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_leg_goes_only_to_those_that_serve_what_it_needs_as_long_as_others_do_not(policy: PolicyName) -> None:
    router = made(policy)
    a, *others = router.known()
    starts = count(0, 1000)

    def sent(needs: str) -> set[Worker]:
        prompts = [asked(range(start, start + 300)) for start in islice(starts, 60)]
        found = [router.pick(ctx, (), needs) for ctx in prompts]
        for ctx, worker in zip(prompts, found, strict=True):
            assert worker is not None and router.why(ctx, worker)
            router.sending(ctx, worker)
        return {worker for worker in found if worker is not None}

    assert sent("derender") == {a, *others}
    router.learn(a, {"derender": "it is too old"})
    assert sent("derender") == set(others)
    assert sent("text") == {a, *others}
    assert router.pick(asked(), others[:1], "derender") is others[1]
    router.learn(others[0], {"derender": "it is too old"})
    assert sent("derender") == {others[1]}
    router.learn(a, {})
    assert sent("derender") == {a, others[1]}
    for worker in router.known():
        router.learn(worker, {"derender": "it is too old"})
    assert router.pick(asked(), (), "derender") is None
    router.members.replace(["http://d"])
    assert {worker.url for worker in sent("derender")} == {"http://d"}


def test_the_least_loaded_of_those_that_serve_what_a_leg_needs_has_it() -> None:
    """Also by what was begun and has ended since others lacked it."""
    router = made("least_inflight")
    a, b, c = router.known()
    router.learn(a, {"derender": "it is too old"})
    router.pick(asked(), (), "derender")
    b.begin(1000)
    assert [router.pick(asked(), (), "derender") for _ in range(3)] == [c, c, c]
    c.begin(2000)
    b.end(1000)
    assert [router.pick(asked(), (), "derender") for _ in range(3)] == [b, b, b]
    assert router.pick(asked()) in (a, b)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_choice_looks_at_all_of_those_that_lack_what_it_needs(policy: PolicyName) -> None:
    """Half of 500 do, and what they lack is read when it is learnt, and no more."""
    router = made(policy, [f"http://10.0.{number // 250}.{number % 250}" for number in range(500)])
    reads: list[str] = []

    class Lacks(dict[str, str]):
        def __contains__(self, need: object) -> bool:
            reads.append(str(need))
            return super().__contains__(need)

    for number, worker in enumerate(router.known()):
        router.learn(worker, Lacks({"derender": "it is too old"} if number % 2 else {}))
    router.pick(asked(range(300)), (), "derender")
    reads.clear()
    for number in range(100):
        ctx = asked(range(number, number + 300))
        worker = router.pick(ctx, (), "derender")
        assert worker is not None and not dict(worker.lacks)
        router.sending(ctx, worker)
    assert len(reads) < 100 * 10
