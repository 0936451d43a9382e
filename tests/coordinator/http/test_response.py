"""Answers, byte for byte: their framing follows from the request, from what is written, and from nothing else."""

from __future__ import annotations

from http import HTTPStatus
from math import inf
from typing import TYPE_CHECKING, Any

import pytest

from coordinator.http import response as response_module
from coordinator.http.response import Response
from tests.coordinator.http.peer import Peer, asked

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.http.connection import Connection
    from coordinator.http.request import Request

DATE = "Mon, 30 Nov 2026 07:00:00 GMT"


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_module, "_date", lambda: DATE)


def made(request: Request, *, complete: bool = True) -> tuple[Response, Peer]:
    peer = Peer()
    request.body.complete = complete
    return Response(request, peer.connection), peer


def whole(response: Response) -> None:
    response.whole(200, [("X-A", "é"), ("X-A", "2")], b"body")


def stream(response: Response) -> None:
    response.begin(200, [("X-A", "1")])
    assert response.put(b"x" * 17)
    assert response.put(b"")
    response.end()


def measured(response: Response) -> None:
    response.begin(206, [("Content-Length", "2")])
    response.put(b"hi")
    response.end()


def nothing(response: Response) -> None:
    response.begin(204, [("X-A", "1")])
    response.put(b"ignored")
    response.end()


# (the request, what is written, the head behind its date, the body, whether the connection is closed behind it)
ANSWERS: list[tuple[dict[str, Any], Callable[[Response], None], str, bytes, bool]] = [
    ({}, whole, "X-A: é\r\nX-A: 2\r\nContent-Length: 4\r\n", b"body", False),
    ({"method": "HEAD"}, whole, "X-A: é\r\nX-A: 2\r\nContent-Length: 4\r\n", b"", False),
    ({"keep_alive": False}, whole, "X-A: é\r\nX-A: 2\r\nContent-Length: 4\r\nConnection: close\r\n", b"body", True),
    ({"http_1_1": False}, whole, "X-A: é\r\nX-A: 2\r\nContent-Length: 4\r\nConnection: keep-alive\r\n", b"body", False),
    ({}, stream, "X-A: 1\r\nTransfer-Encoding: chunked\r\n", b"11\r\n" + b"x" * 17 + b"\r\n0\r\n\r\n", False),
    ({"http_1_1": False}, stream, "X-A: 1\r\nConnection: close\r\n", b"x" * 17, True),
    ({"method": "HEAD"}, stream, "X-A: 1\r\n", b"", False),
    ({}, measured, "Content-Length: 2\r\n", b"hi", False),
    ({"http_1_1": False}, measured, "Content-Length: 2\r\nConnection: keep-alive\r\n", b"hi", False),
    ({}, nothing, "X-A: 1\r\n", b"", False),
]


@pytest.mark.parametrize(("request_", "write", "head", "body", "closes"), ANSWERS)
async def test_each_answer_has_the_framing_that_its_request_can_read(
    request_: dict[str, Any], write: Callable[[Response], None], head: str, body: bytes, closes: bool
) -> None:
    response, peer = made(asked((), **request_))
    write(response)
    _, _, rest = peer.transport.written.partition(b"\r\n")
    assert rest == f"Date: {DATE}\r\n{head}\r\n".encode() + body
    assert (response.closes, response.ended, response.written) == (closes, True, len(peer.transport.written))


async def test_an_answer_before_the_end_of_its_request_closes_the_connection() -> None:
    response, peer = made(asked(()), complete=False)
    response.whole(413, (), b"")
    assert f"HTTP/1.1 413 {HTTPStatus(413).phrase}\r\n".encode() in peer.transport.written
    assert b"\r\nConnection: close\r\n" in peer.transport.written


async def test_a_long_body_is_not_copied_and_all_there() -> None:
    response, peer = made(asked(()))
    body = bytes(1 << 20)
    response.whole(200, (), body)
    assert peer.transport.written.endswith(b"\r\n\r\n" + body)


@pytest.mark.parametrize("value", ["a\r\nX-B: 2", "a\nb", "a\rb"])
async def test_a_value_that_would_become_another_header_is_not_written(value: str) -> None:
    response, peer = made(asked(()))
    with pytest.raises(ValueError, match="line end"):
        response.whole(200, [("X-A", value)], b"")
    assert peer.transport.written == b""


async def test_a_value_that_is_no_utf_8_goes_out_as_it_came_in() -> None:
    response, peer = made(asked(()))
    response.whole(200, [("X-A", b"\xe9".decode("utf-8", "surrogateescape"))], b"")
    assert b"X-A: \xe9\r\n" in peer.transport.written


@pytest.mark.parametrize("write", [whole, stream])
@pytest.mark.parametrize(
    "leaves",
    [
        lambda connection: connection.eof_received(),
        lambda connection: connection.connection_lost(None),
        lambda connection: connection.close(),
        lambda connection: connection.look(inf),
    ],
    ids=["ended", "lost", "hung up", "timed out"],
)
async def test_a_client_that_is_gone_is_written_nothing(
    write: Callable[[Response], None], leaves: Callable[[Connection], None]
) -> None:
    response, peer = made(asked(()))
    leaves(peer.connection)
    with pytest.raises(ConnectionError):
        write(response)
    assert peer.transport.written == b""


async def test_the_date_is_that_of_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    dates, now = response_module._Dates(), 0.0
    monkeypatch.setattr("time.time", lambda: now)
    now = 1796022000.9
    assert dates() == dates() == DATE
    now += 0.1
    assert dates() == DATE.replace(":00 GMT", ":01 GMT")
