"""A request's body is read under limits, and each refusal comes before the next thing costs anything."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import zlib
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from coordinator.http.server import Server
from coordinator.intake import Intake, single
from envelope.errors import ApiError, BadRequest, ReadTimeout, TooLarge, UnsupportedMedia
from envelope.formats import Format
from tests.coordinator.http.peer import asked

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from coordinator.http.request import Request

MB = 2**20

BODY = {"model": "m", "é": "\u2028", "seed": 2**53 + 1, "big": 10**30}
RAW = json.dumps(BODY).encode()

Post = Any


@pytest.fixture
async def post() -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    """Send bytes to a server that reads them through an Intake; return what it read, or how it refused."""
    read: list[Any] = []

    async with aiohttp.ClientSession() as session:

        async def send(data: Any, *, limit_bytes: int = MB, timeout_s: float | None = 5.0, **headers: str) -> Any:
            intake = Intake(limit_bytes, timeout_s)

            async def handle(request: Request) -> None:
                try:
                    read.append(await intake.read_json(request, Format.CHAT))
                except ApiError as error:
                    read.append(error)
                request.response.whole(200, (), b"")

            server = Server({"/": {"POST": handle}})
            await server.listen("127.0.0.1", 0)
            named = {"Content-Type": "application/json", **{key.replace("_", "-"): headers[key] for key in headers}}
            try:
                async with session.post(f"http://{server.addresses[0]}/", data=data, headers=named):
                    return read.pop()
            finally:
                await server.close()

        yield send


async def in_pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
        await asyncio.sleep(0)


def refused(error: Any) -> tuple[type, str, dict[str, str]]:
    return type(error), error.message, error.headers


async def test_a_body_is_read_with_every_digit(post: Post) -> None:
    assert repr(await post(RAW)) == repr(BODY)


async def test_it_may_come_in_pieces_of_unknown_length(post: Post) -> None:
    assert await post(in_pieces(RAW[:5], RAW[5:])) == BODY


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "APPLICATION/JSON"])
async def test_the_media_type_may_have_parameters(post: Post, kind: str) -> None:
    assert await post(RAW, Content_Type=kind) == BODY


# Content-Encoding -> the body as it is sent
INFLATED = [
    ("gzip", gzip.compress(RAW, mtime=0)),
    ("GZIP", gzip.compress(RAW, mtime=0)),
    ("deflate", zlib.compress(RAW)),
    ("identity", RAW),
]


@pytest.mark.parametrize(("encoding", "raw"), INFLATED)
async def test_a_compressed_body_is_inflated(post: Post, encoding: str, raw: bytes) -> None:
    assert await post(raw, Content_Encoding=encoding) == BODY


NOT_JSON = [b"", b"null x", b'{"a":', b"\xff", b"NaN", b"[" * 5000]


@pytest.mark.parametrize("raw", NOT_JSON)
async def test_what_is_not_json_is_a_400_that_says_where(post: Post, raw: bytes) -> None:
    kind, message, _ = refused(await post(raw))
    assert kind is BadRequest
    assert message.startswith("the request body is not JSON: ")
    assert len(message) < 250


@pytest.mark.parametrize("raw", [b"null", b"[]", b"3", b'"x"'])
async def test_any_json_is_read_its_shape_is_judged_elsewhere(post: Post, raw: bytes) -> None:
    assert await post(raw) == json.loads(raw)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/octet-stream",
                                  "application/json-seq"])  # fmt: skip
async def test_another_media_type_is_a_415(post: Post, kind: str) -> None:
    assert refused(await post(RAW, Content_Type=kind))[:2] == (
        UnsupportedMedia,
        f"Content-Type is {kind}; send the body as application/json",
    )


async def test_a_compressed_body_that_was_cut_is_a_400(post: Post) -> None:
    assert refused(await post(gzip.compress(RAW)[:40], Content_Encoding="gzip"))[0] is BadRequest


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "x"])
def test_an_encoding_that_we_do_not_offer_is_a_415(encoding: str) -> None:
    head = {"Content-Type": "application/json", "Content-Encoding": encoding}
    with pytest.raises(UnsupportedMedia) as caught:
        Intake(MB, None).check_head(asked(head))
    assert caught.value.message == f"Content-Encoding {encoding} is not understood; send gzip, deflate, or none"


TOO_LARGE = (TooLarge, "the request body is larger than 1 MB", {"Connection": "close"})


async def test_a_body_of_exactly_the_limit_passes_and_one_byte_more_does_not(post: Post) -> None:
    fits = b'"' + b"x" * (MB - 2) + b'"'
    assert len(await post(io.BytesIO(fits))) == MB - 2
    assert refused(await post(io.BytesIO(fits + b" "))) == TOO_LARGE


async def test_a_body_of_unknown_length_is_refused_as_it_grows(post: Post) -> None:
    assert refused(await post(in_pieces(*[b"x" * 300_000] * 4))) == TOO_LARGE


async def test_a_small_body_that_inflates_to_a_large_one_is_refused(post: Post) -> None:
    assert refused(await post(gzip.compress(bytes(4 * MB)), Content_Encoding="gzip")) == TOO_LARGE


async def test_a_body_that_does_not_arrive_is_a_408(post: Post) -> None:
    async def stalled() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    assert refused(await post(stalled(), timeout_s=0.05)) == (
        ReadTimeout,
        "the request body did not arrive within 0.05 s",
        {"Connection": "close"},
    )


async def test_a_body_whose_encoding_is_broken_is_a_400(post: Post) -> None:
    kind, message, headers = refused(await post(b"no gzip at all", Content_Encoding="gzip"))
    assert (kind, headers) == (BadRequest, {"Connection": "close"})
    assert message == "the request body is broken: its encoding or its framing is wrong"


def test_the_head_alone_is_enough_to_refuse() -> None:
    intake = Intake(MB, None)
    head = {"Content-Type": "application/json", "Content-Length": str(MB)}
    intake.check_head(asked(head))
    with pytest.raises(TooLarge):
        intake.check_head(asked({**head, "Content-Length": str(MB + 1)}))
    with pytest.raises(UnsupportedMedia):
        intake.check_head(asked({"Content-Length": "2"}))


def test_a_header_that_names_a_worker_is_sent_once_or_not_at_all() -> None:
    assert single(asked(()), "x-worker") is None
    assert single(asked([("X-Worker", "a:1")]), "x-worker") == "a:1"
    with pytest.raises(BadRequest) as caught:
        single(asked([("X-Worker", "a:1"), ("x-worker", "b:1"), ("x-worker", "c:1")]), "x-worker")
    assert caught.value.message == "the header x-worker was sent 3 times; send it once"
    assert caught.value.param == "x-worker"
