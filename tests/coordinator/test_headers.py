"""Which headers travel, which are ours to set, and which a client may not send."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from coordinator.context import RequestContext
from coordinator.headers import ROUTING, downstream_headers, leg_headers, leg_id, request_id, upstream_headers
from coordinator.routing.router import Worker
from coordinator.step import Leg
from envelope.formats import Format


def context(*headers: tuple[str, str], **slots: Any) -> RequestContext:
    return RequestContext("req", "req-1234", Format.CHAT, {}, headers, {}, False, **slots)


def leg(body: dict[str, Any] | None = None, *headers: tuple[str, str]) -> Leg:
    return Leg("decode", "decode", "/v1/chat/completions", body or {}, headers=headers)


OWN = [("Accept", "application/json"), ("Accept-Encoding", "identity"), ("X-Request-Id", "req-1234")]

END_TO_END = [
    ("Authorization", "Bearer sk-1"),
    ("traceparent", "00-1-2-01"),
    ("tracestate", "a=b"),
    ("X-Session-ID", "s"),
    ("X-Vllm-Priority", "3"),
    ("User-Agent", "openai"),
    ("OpenAI-Organization", "o"),
]


def test_end_to_end_headers_travel_as_they_came() -> None:
    assert upstream_headers(END_TO_END) == tuple(END_TO_END)


NOT_UPSTREAM = [
    "Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Proxy-Connection", "TE", "Trailer",
    "Trailers", "Transfer-Encoding", "Upgrade", "Accept", "Accept-Encoding", "Content-Encoding", "Content-Length",
    "Content-MD5", "Content-Type", "Digest", "Expect", "Host", "X-Request-Id", *sorted(ROUTING),
]  # fmt: skip


@pytest.mark.parametrize("name", NOT_UPSTREAM)
def test_what_belongs_to_one_connection_or_one_body_or_chooses_a_worker_does_not(name: str) -> None:
    for spelled in (name, name.lower(), name.upper()):
        assert upstream_headers([(spelled, "1"), ("X-Kept", "2")]) == (("X-Kept", "2"),)


def test_the_headers_that_choose_a_worker_are_those_of_the_field() -> None:
    assert {"epp-profile", "prefer", "x-prefiller-host-port", "x-data-parallel-rank"} < ROUTING
    assert all(name == name.lower() for name in ROUTING)


def test_a_header_that_connection_names_is_hop_by_hop_too() -> None:
    sent = [("Connection", "close, X-Hop"), ("X-Hop", "1"), ("connection", " x-other "), ("X-Other", "1"), ("X", "2")]
    assert upstream_headers(sent) == downstream_headers(sent) == (("X", "2"),)


def test_a_configuration_s_own_routing_headers_are_dropped_too() -> None:
    assert upstream_headers([("X-Worker", "a:1"), ("X", "2")], frozenset(("x-worker",))) == (("X", "2"),)


def test_repeated_headers_keep_their_order() -> None:
    assert upstream_headers([("X-Tag", "1"), ("A", "2"), ("x-tag", "3")]) == (
        ("X-Tag", "1"),
        ("A", "2"),
        ("x-tag", "3"),
    )


@pytest.mark.parametrize("name", ["Date", "Server", "X-Request-Id", "Set-Cookie", "Alt-Svc", "Transfer-Encoding",
                                  "Content-Length", "Content-Type", "Content-Encoding", "Connection"])  # fmt: skip
def test_a_worker_s_framing_and_identity_stay_here(name: str) -> None:
    assert downstream_headers([(name, "x"), ("Retry-After", "2")]) == (("Retry-After", "2"),)


def test_a_worker_s_own_headers_go_on_to_the_client() -> None:
    kept = (("Retry-After", "2"), ("endpoint-load-metrics", "JSON {}"), ("X-Data-Parallel-Rank", "1"))
    assert downstream_headers(kept) == kept


@pytest.mark.parametrize(("body", "accept"), [({}, "application/json"), ({"stream": False}, "application/json"),
                                              ({"stream": True}, "text/event-stream")])  # fmt: skip
def test_a_leg_accepts_what_it_asks_for_uncompressed_under_its_own_id(body: dict[str, Any], accept: str) -> None:
    assert leg_headers(context(), leg(body), Worker("http://a")) == [("Accept", accept), *OWN[1:]]


def test_a_leg_is_sent_the_client_s_headers_the_worker_s_its_own_and_what_is_carried() -> None:
    ctx = context(("Authorization", "Bearer sk-1"), carried={"x-llm-d-disagg-revision": "7"})
    worker = Worker("http://g", headers=(("EPP-Profile", "decode"),))
    assert leg_headers(ctx, leg({}, ("Prefer", "if-available")), worker) == [
        ("Authorization", "Bearer sk-1"),
        *OWN,
        ("EPP-Profile", "decode"),
        ("Prefer", "if-available"),
        ("x-llm-d-disagg-revision", "7"),
    ]


def test_what_is_ours_to_set_replaces_the_client_s() -> None:
    ctx = context(("accept", "*/*"), ("epp-profile", "prefill"), ("X", "1"))
    worker = Worker("http://g", headers=(("EPP-Profile", "decode"),))
    assert leg_headers(ctx, leg(), worker) == [("X", "1"), *OWN, ("EPP-Profile", "decode")]


@pytest.mark.parametrize("name", ["Authorization", "authorization", "X-API-Key"])
def test_our_key_goes_in_the_place_of_the_client_s_in_whichever_header_it_came(name: str) -> None:
    """Two keys would leave it to the worker which of them counts, and tell it the client's."""
    worker = Worker("http://a", headers=(("Authorization", "Bearer ours"),))
    sent = leg_headers(context((name, "theirs"), ("X", "1")), leg(), worker)
    assert sent == [("X", "1"), *OWN, ("Authorization", "Bearer ours")]


def test_legs_that_are_made_at_the_same_time_have_ids_of_their_own() -> None:
    twin = Leg("encode", "encode", "/v1/chat/completions", {}, id_suffix="-m1")
    assert ("X-Request-Id", "req-1234-m1") in leg_headers(context(), twin, Worker("http://a"))
    assert ("X-Request-Id", "req-1234-m1-2") in leg_headers(context(), twin, Worker("http://a"), 1)


def test_repeated_names_are_all_sent_in_their_order_however_they_are_spelled() -> None:
    sent = [("X-Tag", "1"), ("x-tag", "2"), ("Other", "3"), ("X-TAG", "4")]
    assert leg_headers(context(*sent), leg(), Worker("http://a"))[:4] == sent


def test_a_repeated_leg_keeps_an_id_by_which_workers_know_it() -> None:
    """NIXL in push mode pairs the legs by it."""
    leg_ = replace(leg(), one_id=True)
    assert ("X-Request-Id", "req-1234") in leg_headers(context(), leg_, Worker("http://a"), 1)


@pytest.mark.parametrize(("attempt", "own_id"), [(0, "req-1234"), (1, "req-1234-2"), (2, "req-1234-3")])
def test_a_repeated_leg_has_an_id_of_its_own(attempt: int, own_id: str) -> None:
    """The first may still be running, and a worker mixes up two requests with one id."""
    assert ("X-Request-Id", own_id) in leg_headers(context(), leg(), Worker("http://a"), attempt)


@pytest.mark.parametrize("sent", ["a", "req_1-2.3", "x" * 128, "0"])
def test_a_client_s_request_id_is_kept_when_it_is_safe(sent: str) -> None:
    assert request_id(sent) == sent


@pytest.mark.parametrize("sent", [None, "", "x" * 129, "a b", "a\nb", "a\n", "é", "a/b", "{}", "a:b"])
def test_any_other_is_replaced_by_a_new_one(sent: str | None) -> None:
    made = request_id(sent)
    assert re.fullmatch("[0-9a-f]{32}", made)
    assert made != request_id(sent)


def test_the_id_that_workers_get_begins_with_the_client_s_and_is_never_used_twice() -> None:
    ids = {leg_id("req") for _ in range(50)}
    assert len(ids) == 50
    assert all(re.fullmatch("req-[0-9a-f]{8}", made) for made in ids)
