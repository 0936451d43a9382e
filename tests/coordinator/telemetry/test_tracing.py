"""Trace context on its way through, while nothing is exported."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from coordinator.telemetry.tracing import PASSING, new_traceparent, valid

GOOD = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
INVALID = [
    "",
    "garbage",
    GOOD.upper(),
    GOOD.replace("00-", "ff-", 1),
    GOOD + "-more",
    GOOD[:-1],
    GOOD + " ",
    GOOD + "\n",
    "00-" + "0" * 32 + "-00f067aa0ba902b7-01",
    "00-4bf92f3577b34da6a3ce929d0e0e4736-" + "0" * 16 + "-01",
    "00-4bf92f3577b34da6a3ce929d0e0e473-00f067aa0ba902b7-01",
    "00-4bf92f3577b34da6a3ce929d0e0e473g-00f067aa0ba902b7-01",
    "0-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
]


@pytest.mark.parametrize("value", [GOOD, GOOD[:-2] + "00", "cc" + GOOD[2:], "cc" + GOOD[2:] + "-what-comes-later"])
def test_a_valid_context_goes_on_as_it_came(value: str) -> None:
    """R10: a version that we do not know is read as far as we know it, and passed on."""
    headers = (("Traceparent", value), ("X-A", "b"), ("tracestate", "v=1"), ("Tracestate", "w=2"))
    assert PASSING.carry(headers) == headers


@pytest.mark.parametrize("value", INVALID)
def test_an_invalid_one_is_replaced_and_its_state_is_dropped(value: str) -> None:
    """R10: a worker that cannot read it would begin a trace of its own."""
    *rest, (name, made) = PASSING.carry((("traceparent", value), ("x-a", "b"), ("tracestate", "v=1")))
    assert (rest, name) == ([("x-a", "b")], "traceparent")
    assert valid(made)
    assert made != value


@pytest.mark.parametrize("headers", [(), (("traceparent", GOOD), ("Traceparent", GOOD))])
def test_none_and_two_of_them_are_replaced_as_well(headers: tuple[tuple[str, str], ...]) -> None:
    ((name, made),) = PASSING.carry(headers)
    assert (name, valid(made), made != GOOD) == ("traceparent", True, True)


def test_a_request_without_any_context_gets_one_and_keeps_its_headers() -> None:
    sent = CIMultiDict({"X-A": "b"})
    *rest, (name, made) = PASSING.begin("POST", "/", CIMultiDictProxy(sent)).carry((("X-A", "b"),))
    assert (rest, name, valid(made)) == ([("X-A", "b")], "traceparent", True)


@pytest.mark.parametrize("name", ["TraceParent", "TRACESTATE", "Baggage"])
def test_whatever_context_there_is_is_looked_at(name: str) -> None:
    sent = (("X-A", "b"), (name, "?" if name != "Baggage" else " , "))
    *rest, (added, _) = PASSING.begin("POST", "/", CIMultiDictProxy(CIMultiDict(sent))).carry(sent)
    assert (rest, added) == ([("X-A", "b")], "traceparent")


def test_no_two_requests_share_a_new_one() -> None:
    assert len({new_traceparent() for _ in range(1000)}) == 1000


BAGGAGE = {
    "as it came": (["a=1, b=2;p"], "a=1,b=2;p"),
    "in one header": (["a=1", "b=2"], "a=1,b=2"),
    "empty members": ([" , a=1,,"], "a=1"),
    "too many": ([",".join(f"k{i}=v" for i in range(100))], ",".join(f"k{i}=v" for i in range(64))),
    "too long": ([f"a=1,b={'x' * 8000},c={'y' * 300},d=4"], f"a=1,b={'x' * 8000}"),
    "at the limit": (["a=" + "x" * 8190], "a=" + "x" * 8190),
}


@pytest.mark.parametrize(("sent", "carried"), BAGGAGE.values(), ids=BAGGAGE)
def test_baggage_is_carried_by_whole_members_within_the_limits(sent: list[str], carried: str) -> None:
    """H13: W3C Baggage, 3.3.2: 64 members and 8,192 bytes have to be carried, and more may be cut."""
    headers = (("traceparent", GOOD), *(("Baggage", value) for value in sent))
    assert PASSING.carry(headers) == (("traceparent", GOOD), ("baggage", carried))


@pytest.mark.parametrize("sent", ["a=" + "x" * 8191, " , "])
def test_baggage_of_which_nothing_can_be_carried_is_no_header(sent: str) -> None:
    headers = (("traceparent", GOOD), ("baggage", sent))
    assert PASSING.carry(headers) == (("traceparent", GOOD),)
