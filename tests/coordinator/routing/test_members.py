"""The workers of a pool may change: who stays keeps its count, and who leaves with open legs is not forgotten."""

from __future__ import annotations

from coordinator.routing.members import Members


def urls(members: Members) -> list[str]:
    return [worker.url for worker in members.workers]


def test_workers_stand_in_the_order_in_which_they_were_named_each_once() -> None:
    assert urls(Members(["http://b", "http://a", "http://b"])) == ["http://b", "http://a"]
    assert Members().workers == ()


def test_who_stays_is_the_same_worker() -> None:
    members = Members(["http://a", "http://b"])
    a, b = members.workers
    members.replace(["http://b", "http://c"])
    assert members.workers[0] is b and urls(members) == ["http://b", "http://c"]
    assert a not in members.workers


def test_every_worker_carries_the_headers_of_the_pool() -> None:
    headers = [("Authorization", "Bearer old")]
    members = Members(["http://a"], headers)
    members.replace(["http://b"])
    headers[0] = ("Authorization", "Bearer new")
    assert [worker.headers for worker in members.workers] == [[("Authorization", "Bearer new")]]


def test_who_left_with_open_legs_is_leaving_until_they_end() -> None:
    members = Members(["http://a", "http://b"])
    a, b = members.workers
    a.in_flight = 1
    members.replace([])
    assert members.workers == () and members.leaving == (a,)
    a.in_flight = 0
    assert members.leaving == ()
    assert b not in members.leaving


def test_who_comes_back_before_its_legs_have_ended_is_the_same_worker() -> None:
    members = Members(["http://a"])
    (a,) = members.workers
    a.in_flight = 2
    members.replace(["http://b"])
    members.replace(["http://b", "http://c"])
    members.replace(["http://a"])
    assert members.workers == (a,) and members.leaving == ()


def test_the_generation_changes_with_the_workers_and_only_then() -> None:
    members = Members(["http://a"])
    first = members.generation
    members.replace(["http://a"])
    assert members.generation == first
    members.replace(["http://b"])
    assert members.generation != first
