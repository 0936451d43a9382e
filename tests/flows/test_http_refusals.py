"""Whatever is wrong with a request, the answer is an OpenAI error body with a request id, and no worker hears of it."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest

from coordinator.http import connection
from coordinator.inflate import Inflater
from tests.flows.wire import chunked, connect, head, post

if TYPE_CHECKING:
    from coordinator.sim import SimFleet
    from tests.flows.client import Got

CHAT = "/v1/chat/completions"
PATHS = (CHAT, "/v1/completions", "/v1/responses", "/inference/v1/generate")
JSON = "Content-Type: application/json"
BODY = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Say hello."}]}).encode()
MEGABYTE = 2**20
SMALL = {"max_request_body_size": 1}


def asked(fleet: SimFleet) -> list[str]:
    """Return the paths of all legs that workers got; probes of their health carry no request id."""
    return [got.path for worker in fleet.workers for got in worker.received if got.header("x-request-id")]


def check_error(got: Got, status: int, type: str, says: str = "") -> None:
    assert (got.status, got.headers["Content-Type"], got.whole) == (status, "application/json", True)
    assert set(got.body) == {"error"}
    assert set(got.error) == {"message", "type", "param", "code"}
    assert (got.error["type"], got.error["code"]) == (type, status)
    assert says in got.error["message"]
    assert got.headers.getall("X-Request-Id")[0] in got.error["message"]
    assert len(got.headers.getall("X-Request-Id")) == 1


UNREADABLE = {
    "no request line": b"GARBAGE\r\n\r\n",
    "a request line that is cut": b"GET\r\n\r\n",
    "another protocol": b"GET / HTTPX/1.1\r\n\r\n",
    "another version": b"GET / HTTP/9.9\r\n\r\n",
    "HTTP/2 with prior knowledge": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a method that is no token": b"G@T / HTTP/1.1\r\nHost: here\r\n\r\n",
    "a target with a space": b"GET /a b HTTP/1.1\r\nHost: here\r\n\r\n",
    "a header without colon": head("/healthz", "no colon", method="GET"),
    "a header name with a control character": head("/healthz", "X\x01: 1", method="GET"),
    "a header value with NUL": head("/healthz", "X: a\0b", method="GET"),
    "no Host": b"GET /healthz HTTP/1.1\r\n\r\n",
    "length and chunks together": head(CHAT, JSON, "Content-Length: 5", "Transfer-Encoding: chunked") + chunked(BODY),
    "two lengths": head(CHAT, JSON, "Content-Length: 5", "Content-Length: 6") + b"aaaaaa",
    "a negative length": head(CHAT, JSON, "Content-Length: -5") + b"aaaaaa",
    "a length that is no number": head(CHAT, JSON, "Content-Length: 5x") + b"aaaaaa",
    "a chunk without a size": head(CHAT, JSON, "Transfer-Encoding: chunked") + b"zz\r\n{}\r\n0\r\n\r\n",
    "a header that goes on in the next line": head("/healthz", "X: a\r\n b", method="GET"),
    "lines that end at LF": b"GET /healthz HTTP/1.1\nHost: here\n\n",
    "a blank before a colon": head(CHAT, JSON, "Content-Length: 2", "Transfer-Encoding : chunked") + b"{}",
    "two hosts": head("/healthz", "Host: there", method="GET"),
    "a method in small letters": head("/healthz", method="get"),
    "a transfer coding that is not chunked": head(CHAT, JSON, "Transfer-Encoding: gzip") + b"abc",
}


@pytest.mark.parametrize("what", UNREADABLE)
async def test_what_is_no_http_is_refused_in_json_and_ends_the_connection(coordinator, fleet, what):
    """H13, C2: a line of text is what many servers send, which no SDK can parse."""
    at = await coordinator(fleet)
    async with connect(at.url) as wire:
        await wire.send(UNREADABLE[what])
        says = "the request body is broken" if what.startswith("a chunk") else "this is no valid HTTP/1.1 request: "
        check_error(await wire.answer(), 400, "BadRequestError", says)
        assert await wire.is_closed()
    assert asked(fleet) == []


async def test_an_unreadable_request_is_not_repeated_to_its_sender(coordinator, fleet):
    """An error body ends up in logs, and a header may be a key."""
    at = await coordinator(fleet)
    for raw in (b"GET / HTTP/1.1\r\nHost: here\r\nAuthorization Bearer canary\r\n\r\n", b"canary / HTTP/1.1\r\n\r\n"):
        async with connect(at.url) as wire:
            await wire.send(raw)
            assert b"canary" not in (await wire.answer()).raw


async def test_a_long_header_below_the_limit_travels(coordinator, fleet, scripted):
    """H13: a router in front may put a long list into a header; aiohttp's own limit is 8190 bytes."""
    worker = await scripted(scripted.json({"choices": []}))
    at = await coordinator(fleet, "alone", pools={"decode": {"endpoints": [worker.url]}})
    assert (await at.post(CHAT, BODY, ("x-long", "k=v," * 7500))).status == 200
    assert len(worker.received[0][0]["x-long"]) == 30_000


async def test_a_long_baggage_is_taken_and_goes_on_within_its_limits(coordinator, fleet, scripted):
    """H13: 9 KB in a header are well, and what of them has to be carried is."""
    worker = await scripted(scripted.json({"choices": []}))
    at = await coordinator(fleet, "alone", pools={"decode": {"endpoints": [worker.url]}})
    assert (await at.post(CHAT, BODY, ("baggage", ",".join(f"k{i}={'v' * 90}" for i in range(96))))).status == 200
    assert len(worker.received[0][0]["baggage"].split(",")) == 64


async def test_a_head_above_the_limit_is_a_431(coordinator, fleet):
    """H13, H19."""
    at = await coordinator(fleet)
    for too_long in (head(CHAT, "baggage: " + "k" * 33_000), head("/" + "p" * 33_000, method="GET")):
        async with connect(at.url) as wire:
            await wire.send(too_long)
            got = await wire.answer()
            check_error(got, 431, "RequestHeaderFieldsTooLargeError", "server.max_header_size")
            assert b"kkk" not in got.raw
            assert b"ppp" not in got.raw


@pytest.mark.parametrize(
    "many", [[f"X-H{i}: v" for i in range(500)], [f"X-H{i}: " + "v" * 20_000 for i in range(20)]], ids=["many", "large"]
)
async def test_headers_that_are_too_much_together_are_a_431(coordinator, fleet, many):
    """H13, H19."""
    at = await coordinator(fleet)
    async with connect(at.url) as wire:
        await wire.send(post(CHAT, BODY, *many))
        check_error(await wire.answer(), 431, "RequestHeaderFieldsTooLargeError")
        assert await wire.is_closed()
    assert asked(fleet) == []


async def test_the_limit_of_a_header_is_the_operators(coordinator, fleet):
    """H13."""
    at = await coordinator(fleet, server={"max_header_size": 9000})
    async with connect(at.url) as wire:
        await wire.send(post(CHAT, BODY, "baggage: " + "k" * 9100))
        check_error(await wire.answer(), 431, "RequestHeaderFieldsTooLargeError")


@pytest.mark.parametrize("path", [*PATHS, "/v1/messages", "/v1/messages/count_tokens"])
async def test_another_method_than_post_is_a_405_that_names_post(coordinator, fleet, path):
    """H25."""
    at = await coordinator(fleet)
    for method in ("GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE"):
        async with connect(at.url) as wire:
            await wire.send(head(path, method=method))
            got = await wire.answer(bodiless=method == "HEAD")
        assert (got.status, got.headers["Allow"]) == (405, "POST")
        if method == "HEAD":
            assert got.headers["X-Request-Id"]
        else:
            check_error(got, 405, "MethodNotAllowedError", f"{path} takes POST, not {method}")


@pytest.mark.parametrize("path", ["/v1/models", "/healthz", "/readyz", "/metrics"])
async def test_a_page_that_is_read_takes_get_and_head_alone(coordinator, fleet, path):
    """H25."""
    at = await coordinator(fleet)
    got = await at.post(path, {})
    check_error(got, 405, "MethodNotAllowedError")
    assert got.headers["Allow"] == "GET, HEAD"
    whole = await at.get(path)
    async with connect(at.url) as wire:
        await wire.send(head(path, method="HEAD"))
        bare = await wire.answer(bodiless=True)
    assert (bare.status, bare.headers["Content-Type"]) == (200, whole.headers["Content-Type"])


@pytest.mark.parametrize(
    "path",
    [
        "/sleep",
        "/wake_up",
        "/abort_requests",
        "/inference/v1/abort_requests",
        "/collective_rpc",
        "/update_weights",
        "/v1/load_lora_adapter",
        "/v1/chat/completions/render",
        "/v1/chat/completions/derender",
        "/tokenize",
        "/v1/embeddings",
        "/nope",
        "/",
        "/v1/chat/completions/",
        "//v1/chat/completions",
        "/v1/chat/completions/../../../sleep",
        "/v1/chat%2Fcompletions",
    ],
)
async def test_a_path_that_is_not_listed_is_a_404_and_reaches_no_worker(coordinator, fleet, path):
    """H24, H25: a worker's other routes stop it, abort others' requests or read its state."""
    at = await coordinator(fleet)
    for method in ("POST", "GET"):
        async with connect(at.url) as wire:
            await wire.send(post(path, b"{}") if method == "POST" else head(path, method=method))
            check_error(await wire.answer(), 404, "NotFoundError", "is not served here; the paths are /health, ")
    assert asked(fleet) == []


async def test_the_metrics_page_is_the_coordinators_own_and_no_workers(coordinator, fleet):
    """H24."""
    at = await coordinator(fleet)
    page = (await at.get("/metrics")).raw
    assert b"coordinator_requests" in page
    assert b"vllm:" not in page
    assert asked(fleet) == []


BAD_BODIES = {
    "nothing": b"",
    "blanks": b"  \n",
    "null": b"null",
    "a list": b"[]",
    "a number": b"3",
    "a string": b'"x"',
    "something behind the object": b'{"a":1}x',
    "two objects": b'{"a":1}{"b":2}',
    "half an object": b'{"model":"tiny"',
    "bytes that are no UTF-8": b'{"model":"\xff"}',
    "half a surrogate pair": b'{"model":"\\ud800"}',
    "NaN": b'{"temperature":NaN}',
    "nested 20,000 deep": b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
    "lists nested 20,000 deep": b"[" * 20_000 + b"]" * 20_000,
}


@pytest.mark.parametrize("path", [*PATHS, "/v1/messages/count_tokens"])
async def test_a_body_that_is_no_json_object_is_a_400(coordinator, fleet, path):
    """V27, V30."""
    at = await coordinator(fleet, "text")
    for what, raw in BAD_BODIES.items():
        got = await at.post(path, raw)
        assert (what, got.status) == (what, 400)
        assert got.error["type"] in ("BadRequestError", "invalid_request_error")
    assert asked(fleet) == []


@pytest.mark.parametrize("depth", [251, 400, 900, 1020])
async def test_a_body_nested_deeper_than_can_be_sent_on_is_a_400(coordinator, fleet, depth):
    """V27: what could be read and not be written again was a 500."""
    at = await coordinator(fleet)
    for seed in (b"1", b"99999999999999999999"):
        deep = b'{"model":"tiny","seed":' + seed + b',"messages":[],"x":' + b"[" * depth + b"]" * depth + b"}"
        check_error(await at.post(CHAT, deep), 400, "BadRequestError", "nested too deeply")
    assert asked(fleet) == []


async def test_a_body_nested_200_deep_is_answered(coordinator, fleet):
    """V27: a JSON schema may be deep."""
    at = await coordinator(fleet)
    deep = BODY[:-1] + b',"x":' + b'{"a":' * 200 + b"1" + b"}" * 201
    assert (await at.post(CHAT, deep)).status == 200
    assert b'{"a":' * 200 in fleet.decode.received[-1].raw


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ((), "Content-Type is missing; send the body as application/json"),
        (("Content-Type: text/plain",), "Content-Type is text/plain"),
        (("Content-Type: application/x-www-form-urlencoded",), "Content-Type is application/x-www-form-urlencoded"),
        ((JSON, "Content-Encoding: br"), "Content-Encoding"),
        ((JSON, "Content-Encoding: zstd"), "Content-Encoding"),
        ((JSON, "Content-Encoding: gzip, gzip"), "Content-Encoding gzip, gzip is not understood"),
        ((JSON, "Content-Encoding: x-new"), "Content-Encoding x-new is not understood; send gzip, deflate, or none"),
    ],
)
async def test_a_body_in_another_type_or_encoding_is_a_415(coordinator, fleet, headers, says):
    """H04: an encoding that is not undone would be passed on as if it were the body."""
    at = await coordinator(fleet)
    async with connect(at.url) as wire:
        await wire.send(head(CHAT, f"Content-Length: {len(BODY)}", *headers), BODY)
        check_error(await wire.answer(), 415, "UnsupportedMediaTypeError", says)
    assert asked(fleet) == []


async def test_a_json_type_with_parameters_or_in_capitals_is_taken(coordinator, fleet):
    at = await coordinator(fleet)
    for media in ("application/json; charset=utf-8", "Application/JSON", "application/json;charset=UTF-8;x=1"):
        async with connect(at.url) as wire:
            await wire.send(head(CHAT, f"Content-Type: {media}", f"Content-Length: {len(BODY)}"), BODY)
            assert (await wire.answer()).status == 200


async def test_a_length_above_the_limit_is_a_413_before_the_body_comes(coordinator, fleet):
    """H10."""
    at = await coordinator(fleet, server=SMALL)
    async with connect(at.url) as wire:
        await wire.send(head(CHAT, JSON, f"Content-Length: {MEGABYTE + 1}"))
        got = await wire.answer()
        check_error(got, 413, "RequestEntityTooLargeError", "larger than 1 MB")
        assert got.headers["Connection"] == "close"
    assert asked(fleet) == []


async def test_chunks_above_the_limit_are_a_413_before_they_end(coordinator, fleet):
    """H10: nobody says how long the body is, so it is counted, and never cut short and read as bad JSON."""
    at = await coordinator(fleet, server=SMALL)
    async with connect(at.url) as wire:
        await wire.send(head(CHAT, JSON, "Transfer-Encoding: chunked"))
        for _ in range(17):
            await wire.send(b"10000\r\n" + b" " * 65536 + b"\r\n")
        got = await wire.answer()
        check_error(got, 413, "RequestEntityTooLargeError", "larger than 1 MB")
        assert got.headers["Connection"] == "close"
        await wire.send(b"0\r\n\r\n")
        assert await wire.is_closed()
    assert asked(fleet) == []


async def test_a_body_of_exactly_the_limit_is_taken(coordinator, fleet):
    """H10."""
    at = await coordinator(fleet, server=SMALL)
    full = BODY + b" " * (MEGABYTE - len(BODY))
    for raw in (post(CHAT, full), head(CHAT, JSON, "Transfer-Encoding: chunked") + chunked(full[:7], full[7:])):
        async with connect(at.url) as wire:
            await wire.send(raw)
            assert (await wire.answer()).status == 200


async def test_a_gzip_bomb_is_a_413_and_is_never_inflated_whole(coordinator, fleet):
    """H05: 100 KB become 100 MB; what is inflated at once is bounded."""
    at = await coordinator(fleet, server=SMALL)
    bomb = gzip.compress(bytes(100 * MEGABYTE), compresslevel=9)
    assert len(bomb) < 110_000
    async with connect(at.url) as wire:
        tracemalloc.start()
        try:
            await wire.send(post(CHAT, bomb, "Content-Encoding: gzip"))
            got = await wire.answer()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    check_error(got, 413, "RequestEntityTooLargeError", "larger than 1 MB")
    assert got.headers["Connection"] == "close"
    assert peak < 8 * MEGABYTE
    assert asked(fleet) == []


async def test_others_have_their_turn_while_a_body_is_inflated(coordinator, fleet, monkeypatch):
    """H05: below the limit a body is inflated whole, and by no more at a time than a socket brings of plain ones."""
    step, at_once, most = Inflater.step, 0, 0

    def counted(self, data):
        nonlocal at_once, most
        part, rest = step(self, data)
        at_once += len(part)
        most = max(most, at_once)
        return part, rest

    async def others():
        nonlocal at_once
        while True:
            at_once = 0
            await asyncio.sleep(0)

    monkeypatch.setattr(Inflater, "step", counted)
    at = await coordinator(fleet)
    raw = gzip.compress(b" " * (20 * MEGABYTE) + BODY, compresslevel=9)
    waiting = asyncio.create_task(others())
    async with connect(at.url) as wire:
        await wire.send(post(CHAT, raw, "Content-Encoding: gzip"))
        assert (await wire.answer()).status == 200
    waiting.cancel()
    assert 0 < most <= MEGABYTE


@pytest.mark.parametrize(("path", "status", "most"), [(CHAT, 413, 4), ("/nowhere", 404, 0)])
async def test_what_is_left_of_a_bomb_is_not_inflated_to_be_thrown_away(
    coordinator, fleet, monkeypatch, path, status, most
):
    """H05: the rest of it would keep everybody else waiting, whoever sent it and wherever to."""
    step, inflated = Inflater.step, 0

    def counted(self, data):
        nonlocal inflated
        part, rest = step(self, data)
        inflated += len(part)
        return part, rest

    monkeypatch.setattr(Inflater, "step", counted)
    at = await coordinator(fleet, server=SMALL)
    bomb = gzip.compress(bytes(30 * MEGABYTE), compresslevel=9)
    async with connect(at.url) as wire:
        await wire.send(post(path, bomb, "Content-Encoding: gzip"))
        got = await wire.answer()
        assert got.status == status
    assert inflated <= most * MEGABYTE


@pytest.mark.parametrize(
    "raw",
    [b"this is no gzip", gzip.compress(BODY, mtime=0)[:-12], gzip.compress(BODY, mtime=0) + b"more", b"\x1f\x8b\x08"],
    ids=["no gzip", "cut short", "with something behind it", "its magic number alone"],
)
async def test_a_broken_gzip_body_is_a_400(coordinator, fleet, raw):
    """H04."""
    at = await coordinator(fleet)
    async with connect(at.url) as wire:
        await wire.send(post(CHAT, raw, "Content-Encoding: gzip"))
        check_error(await wire.answer(), 400, "BadRequestError", "the request body is")
    assert asked(fleet) == []


@pytest.mark.parametrize(
    ("rest", "status", "kind", "says"),
    [
        (b"", 408, "RequestTimeoutError", "did not arrive within 0.2 s"),
        (b"no size\r\n", 400, "BadRequestError", "its framing is wrong"),
    ],
    ids=["that stops", "whose framing breaks"],
)
async def test_a_body_that_does_not_come_to_its_end_ends_the_connection(coordinator, fleet, rest, status, kind, says):
    """H8: wrong framing must not hold a connection for ever, and what follows it cannot be told from a request."""
    at = await coordinator(fleet, server={"read_timeout": "200ms"})
    async with connect(at.url) as wire:
        await wire.send(head(CHAT, JSON, "Transfer-Encoding: chunked"), b'5\r\n{"mod\r\n')
        await asyncio.sleep(0.05)
        await wire.send(rest)
        got = await wire.answer()
        check_error(got, status, kind, says)
        assert got.headers["Connection"] == "close"
    assert asked(fleet) == []


@pytest.mark.parametrize("sends", [False, True], ids=["is silent", "goes on sending"])
async def test_a_connection_whose_body_was_not_read_is_closed_soon(coordinator, fleet, monkeypatch, eventually, sends):
    """H8: a client that is told 408 and stays does not hold its connection, and one that sends has its answer."""
    monkeypatch.setattr(connection, "_SILENT_S", 0.05)
    monkeypatch.setattr(connection, "_LINGERS_S", 0.3)
    at = await coordinator(fleet, server={"read_timeout": "100ms"})
    async with connect(at.url) as wire:
        await wire.send(head(CHAT, JSON, "Content-Length: 1000000"), b'{"model":')
        check_error(await wire.answer(), 408, "RequestTimeoutError")
        assert len(at.app.server.connections) == 1

        async def is_closed() -> bool:
            if sends:
                with contextlib.suppress(ConnectionError):
                    await wire.send(b" ")
            return not at.app.server.connections

        await eventually(is_closed)


async def test_a_body_that_is_shorter_than_its_length_is_a_408(coordinator, fleet):
    """H8."""
    at = await coordinator(fleet, server={"read_timeout": "200ms"})
    async with connect(at.url) as wire:
        await wire.send(head(CHAT, JSON, "Content-Length: 100"), b'{"model":')
        check_error(await wire.answer(), 408, "RequestTimeoutError", "did not arrive within 0.2 s")
    assert asked(fleet) == []


async def test_a_fault_of_the_coordinator_is_a_500_that_tells_nothing(coordinator, fleet, monkeypatch, caplog):
    """C2: a traceback belongs into the log."""
    at = await coordinator(fleet)

    def broken(*args: Any) -> None:
        raise ZeroDivisionError("canary")

    monkeypatch.setattr("steps.prefill.prefill_openai", broken)
    got = await at.post(CHAT, BODY)
    check_error(got, 500, "InternalServerError")
    assert b"canary" not in got.raw
    assert "canary" in caplog.text
    monkeypatch.setattr("coordinator.questions._context", broken)
    got = await at.get("/v1/models")
    check_error(got, 500, "InternalServerError")
    assert b"canary" not in got.raw


async def test_an_errors_request_id_is_the_clients_own_and_stands_in_its_text(coordinator, fleet):
    """H19: support can find the request, from the header or from the words that a user pastes."""
    at = await coordinator(fleet, server=SMALL)
    refused = {
        404: post("/nope", b"{}", "X-Request-Id: ask-7"),
        405: head(CHAT, "X-Request-Id: ask-7", method="GET"),
        400: post(CHAT, b"[]", "X-Request-Id: ask-7"),
        413: head(CHAT, JSON, f"Content-Length: {2 * MEGABYTE}", "X-Request-Id: ask-7"),
        415: head(CHAT, "Content-Length: 0", "X-Request-Id: ask-7"),
    }
    for status, raw in refused.items():
        async with connect(at.url) as wire:
            await wire.send(raw)
            got = await wire.answer()
        assert (got.status, got.headers.getall("X-Request-Id")) == (status, ["ask-7"])
        assert "(request id ask-7)" in got.error["message"]
