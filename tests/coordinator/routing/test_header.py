"""The worker that a request header names: read strictly, inside an allow-list, never the worker of the next leg."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.context import RequestContext
from coordinator.routing.header import HeaderRouter
from coordinator.settings.units import parse_allow_entry
from envelope.errors import BadRequest, Forbidden
from envelope.formats import Format
from tests.coordinator.routing import pools

HEADER = "x-prefiller-host-port"


def named(value: str | None) -> RequestContext:
    routing = {} if value is None else {HEADER: value}
    return RequestContext("req", "req-1", Format.CHAT, {}, (), routing, False)


def router(*allow: str, other: str = "", **options: Any) -> HeaderRouter:
    made = HeaderRouter(HEADER, [parse_allow_entry(entry) for entry in allow or ("0.0.0.0/0", "::/0")], **options)
    made.other = pools.made("round_robin", [other]) if other else None
    return made


# (what the header says, the base URLs that it means)
NAMED = [
    ("10.0.0.1:8000", ["http://10.0.0.1:8000"]),
    (" 10.0.0.1:8000 ", ["http://10.0.0.1:8000"]),
    ("10.0.0.1", ["http://10.0.0.1"]),
    ("http://10.0.0.1:8000", ["http://10.0.0.1:8000"]),
    ("https://10.0.0.1", ["https://10.0.0.1"]),
    ("[2001:db8::1]:8000", ["http://[2001:db8::1]:8000"]),
    ("[2001:db8::1]", ["http://[2001:db8::1]"]),
    ("10.0.0.1:1,10.0.0.2:2 , http://10.0.0.3:3", ["http://10.0.0.1:1", "http://10.0.0.2:2", "http://10.0.0.3:3"]),
    (",10.0.0.1:1,,", ["http://10.0.0.1:1"]),
]


@pytest.mark.parametrize(("value", "urls"), NAMED)
def test_the_workers_are_tried_in_the_order_in_which_they_are_named(value: str, urls: list[str]) -> None:
    made, ctx = router(), named(value)
    assert made.serves(ctx)
    tried: list[Any] = []
    while worker := made.pick(ctx, tried):
        tried.append(worker)
    assert [worker.url for worker in tried] == urls
    assert all(worker.headers == () for worker in tried)


@pytest.mark.parametrize("value", [None, "", " ", ",", " , "])
def test_without_a_name_there_is_no_such_leg(value: str | None) -> None:
    assert router().serves(named(value)) is False
    with pytest.raises(BadRequest) as caught:
        router().pick(named(value))
    assert caught.value.message == f"the request needs the header {HEADER}: host:port of a worker"
    assert caught.value.param == HEADER


def test_where_the_leg_cannot_be_left_out_a_request_without_a_name_is_refused() -> None:
    with pytest.raises(BadRequest, match="the request needs the header"):
        router(required=True).serves(named(None))
    assert router(required=True).serves(named("10.0.0.1:8000"))


@pytest.mark.parametrize("value", ["not a host", "10.0.0.1:99999", "10.0.0.1:x", "http://", "ftp://10.0.0.1", "a:1/x",
                                   "u:p@10.0.0.1:1", "10.0.0.1:1?x", "10.0.0.1:1,not a host"])  # fmt: skip
def test_what_names_no_worker_is_refused(value: str) -> None:
    for ask in (router().serves, router().pick):
        with pytest.raises(BadRequest) as caught:
            ask(named(value))
        assert (caught.value.message, caught.value.param) == (f"{HEADER} must be host:port of a worker", HEADER)


# (allow-list, what the header says, whether the worker may be called)
ALLOWED = [
    (["10.0.0.0/8"], "10.1.2.3:8000", True),
    (["10.0.0.0/8"], "11.0.0.1:8000", False),
    (["10.0.0.0/8:8000"], "10.1.2.3:8000", True),
    (["10.0.0.0/8:8000"], "10.1.2.3:8001", False),
    (["10.0.0.0/8:8000-8010"], "10.1.2.3:8010", True),
    (["10.0.0.7"], "10.0.0.7", True),
    (["10.0.0.7:80"], "10.0.0.7", True),
    (["10.0.0.7:80"], "https://10.0.0.7", False),
    (["10.0.0.7:443"], "https://10.0.0.7", True),
    (["worker-0.decode"], "worker-0.decode:8000", True),
    (["worker-0.decode"], "WORKER-0.decode:8000", True),
    (["worker-0.decode"], "worker-1.decode:8000", False),
    (["10.0.0.0/8"], "worker-0.decode:8000", False),
    (["2001:db8::/32"], "[2001:db8::1]:8000", True),
    (["[2001:db8::/32]:8000"], "[2001:db8::1]", False),
    (["10.0.0.0/8"], "[::ffff:10.0.0.1]:8000", True),
    (["10.0.0.0/8"], "[::ffff:11.0.0.1]:8000", False),
    (["10.0.0.0/8", "11.0.0.1"], "11.0.0.1:8000", True),
    (["10.0.0.0/8"], "10.0.0.1:1,11.0.0.1:1", False),
]


@pytest.mark.parametrize(("allow", "value", "allowed"), ALLOWED)
def test_only_a_worker_of_the_allow_list_is_called(allow: list[str], value: str, allowed: bool) -> None:
    made = router(*allow)
    if allowed:
        assert made.serves(named(value)) and made.pick(named(value))
        return
    for ask in (made.serves, made.pick):
        with pytest.raises(Forbidden) as caught:
            ask(named(value))
        assert caught.value.message == f"{HEADER} names a worker outside the allow-list"


# (the worker of the next leg as the file has it, as the header has it)
SPELLINGS = [
    ("http://127.0.0.1:8200", "127.0.0.1:8200"),
    ("http://127.0.0.1", "127.0.0.1:80"),
    ("http://127.0.0.1:80", "127.0.0.1"),
    ("https://127.0.0.1", "https://127.0.0.1:443"),
    ("http://[::1]", "[::1]:80"),
]


@pytest.mark.parametrize(("url", "value"), SPELLINGS)
def test_a_worker_that_does_the_next_leg_is_no_worker_of_this_one(url: str, value: str) -> None:
    """It would fetch blocks from itself, however it is spelled."""
    made = router(other=url)
    assert made.serves(named(value)) is False
    assert made.serves(named("127.0.0.1:8201")) is True


def test_nor_is_it_when_the_first_that_is_named_has_failed() -> None:
    made, ctx = router(other="http://127.0.0.1:8200"), named("127.0.0.1:8201,127.0.0.1:8200")
    first = made.pick(ctx)
    assert first is not None and first.url == "http://127.0.0.1:8201"
    assert made.pick(ctx, [first]) is None


def test_a_role_with_many_legs_spreads_them_over_the_workers_that_are_named() -> None:
    made, ctx = router(spread=True), named("10.0.0.1:1,10.0.0.2:1,10.0.0.3:1")
    picked = [worker.url[-3] for _ in range(5) if (worker := made.pick(ctx)) is not None]
    assert "".join(picked) == "12312"
    first = made.pick(ctx)
    assert first is not None
    second = made.pick(ctx, [first])
    assert second is not None and second is not first


def test_a_worker_is_told_what_every_leg_carries() -> None:
    key = (("Authorization", "Bearer k"),)
    worker = router(headers=key).pick(named("10.0.0.1:1"))
    assert worker is not None and worker.headers == key


def test_a_worker_is_remembered_for_its_count_and_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.routing.header._REMEMBERED", 2)
    made = router()
    first = made.pick(named("10.0.0.1:1"))
    assert made.pick(named("10.0.0.1:1")) is first
    made.pick(named("10.0.0.2:1"))
    assert made.pick(named("10.0.0.1:1")) is first, "asked for again, so it is the younger one"
    made.pick(named("10.0.0.3:1"))
    assert made.pick(named("10.0.0.1:1")) is first
    made.pick(named("10.0.0.4:1"))
    made.pick(named("10.0.0.5:1"))
    assert made.pick(named("10.0.0.1:1")) is not first


def test_nobody_can_be_asked_for_their_health_before_a_request_names_them() -> None:
    made = router()
    made.pick(named("10.0.0.1:1"))
    assert made.known() == ()


def test_many_legs_of_one_request_begin_with_the_next_worker_each() -> None:
    made, ctx = router(spread=True), named("10.0.0.1:1,10.0.0.2:2,10.0.0.3:3")
    first = [made.pick(ctx) for _ in range(4)]
    assert [worker and worker.url for worker in first] == [f"http://10.0.0.{n}:{n}" for n in (1, 2, 3, 1)]
    assert {worker and worker.url for worker in (made.pick(ctx, first[:2]) for _ in range(3))} == {"http://10.0.0.3:3"}
    assert made.pick(ctx, first) is None
