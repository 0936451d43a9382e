"""Requests and answers as HTTP: expectations, encodings, versions, framing, and several requests on one connection."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from typing import Any

import pytest

from coordinator.http.response import Response
from tests.flows.wire import chunked, connect, head, post

CHAT = "/v1/chat/completions"
JSON = "Content-Type: application/json"
ANSWER = "Hello! How can I help you today?"
MEGABYTE = 2**20


def encoded(text: str = "Say hello.", **fields: Any) -> bytes:
    thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **thinking, **fields}
    return json.dumps(body).encode()


BODY = encoded()


async def test_a_body_is_sent_after_the_100_and_no_worker_sees_the_expectation(coordinator, fleet):
    """H01."""
    at = await coordinator(fleet)
    large = BODY + b" " * 5 * MEGABYTE
    async with connect(at.url) as wire:
        await wire.send(head(CHAT, JSON, f"Content-Length: {len(large)}", "Expect: 100-continue"))
        assert (await wire.answer()).status == 100
        await wire.send(large)
        got = await wire.answer()
    assert (got.status, got.text, got.whole) == (200, ANSWER, True)
    for worker in (fleet.prefill, fleet.decode):
        assert worker.received[-1].header("expect") is None


async def test_a_stream_may_follow_a_100(coordinator, fleet):
    """H01: the interim answer has no headers of the final one."""
    at = await coordinator(fleet)
    async with connect(at.url) as wire:
        await wire.send(post(CHAT, encoded(stream=True), "Expect: 100-Continue"))
        interim, got = await wire.answer(), await wire.answer()
    assert (interim.status, dict(interim.headers)) == (100, {})
    assert (got.status, got.text, got.whole) == (200, ANSWER, True)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ((JSON, f"Content-Length: {MEGABYTE + 1}"), 413),
        (("Content-Type: text/plain", "Content-Length: 9"), 415),
        ((JSON, "Content-Length: 9", "Content-Encoding: x-new"), 415),
    ],
)
async def test_what_the_head_alone_refuses_is_refused_without_a_100(coordinator, fleet, headers, status):
    """H02: the upload is spared; the client may send it all the same, so the connection ends."""
    at = await coordinator(fleet, server={"max_request_body_size": 1})
    async with connect(at.url) as wire:
        await wire.send(head(CHAT, *headers, "Expect: 100-continue", "X-Request-Id: ask-1"))
        got = await wire.answer()
        assert (got.status, got.error["code"], got.headers["Connection"]) == (status, status, "close")
        assert got.headers["X-Request-Id"] == "ask-1"


@pytest.mark.parametrize("path", [CHAT, "/v1/messages/count_tokens"])
async def test_who_left_before_the_100_has_left_and_nothing_failed(coordinator, fleet, monkeypatch, path):
    def write(response: Response) -> None:
        raise ConnectionResetError

    monkeypatch.setattr(Response, "go_on", write)
    at = await coordinator(fleet)
    async with connect(at.url) as wire:
        await wire.send(head(path, JSON, "Content-Length: 9", "Expect: 100-continue"))
        assert await wire.is_closed()
    assert await at.count("coordinator_requests_total", outcome="client_gone") == 1


async def test_an_expectation_that_is_not_known_is_ignored(coordinator, fleet):
    """H6: RFC 9110 lets it be ignored; aiohttp's own answer is a 417 in text."""
    at = await coordinator(fleet)
    async with connect(at.url) as wire:
        await wire.send(post(CHAT, BODY, "Expect: 200-ok"))
        assert (await wire.answer()).text == ANSWER
    assert fleet.decode.received[-1].header("expect") is None


@pytest.mark.parametrize("shape", ["openai", "text"])
@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        ("gzip", gzip.compress(BODY, mtime=0)),
        ("GZIP", gzip.compress(BODY, mtime=0)),
        ("gzip, identity", gzip.compress(BODY, mtime=0)),
        ("deflate", zlib.compress(BODY)),
        ("deflate", zlib.compress(BODY)[2:-4]),
        ("identity", BODY),
    ],
    ids=["gzip", "GZIP", "gzip and identity", "deflate", "deflate without its header", "identity"],
)
async def test_a_packed_body_reaches_workers_as_plain_json(coordinator, fleet, shape, encoding, packed):
    """H04."""
    at = await coordinator(fleet, shape)
    async with connect(at.url) as wire:
        await wire.send(post(CHAT, packed, f"Content-Encoding: {encoding}"))
        assert (await wire.answer()).text == ANSWER
    for worker in fleet.workers:
        for leg in (leg for leg in worker.received if leg.header("x-request-id")):
            assert leg.header("content-encoding") is None
            assert leg.header("content-length") == str(len(leg.raw))
            assert leg.body["model"] == "tiny"


async def test_a_chunked_body_reaches_workers_with_its_length(coordinator, fleet):
    """H04: the framing of each leg is its own."""
    at = await coordinator(fleet)
    async with connect(at.url) as wire:
        await wire.send(head(CHAT, JSON, "Transfer-Encoding: chunked"), chunked(BODY[:5], BODY[5:40], BODY[40:]))
        assert (await wire.answer()).text == ANSWER
    leg = fleet.prefill.received[-1]
    assert leg.header("transfer-encoding") is None
    assert leg.header("content-length") == str(len(leg.raw))


@pytest.mark.parametrize("shape", ["openai", "text", "derender"])
async def test_an_http_1_0_client_gets_its_stream_up_to_the_end_of_the_connection(coordinator, fleet, shape):
    """H07: that version knows no chunks."""
    at = await coordinator(fleet, shape)
    async with connect(at.url) as wire:
        await wire.send(post(CHAT, encoded(stream=True), version="1.0"))
        got = await wire.answer()
        assert got.status == 200
        assert "Transfer-Encoding" not in got.headers
        assert "Content-Length" not in got.headers
        assert got.headers.get("Connection", "close") == "close"
        assert (got.text, got.events[-1]) == (ANSWER, "[DONE]")
        assert await wire.is_closed()


async def test_an_http_1_0_client_gets_whole_answers_and_errors_by_length(coordinator, fleet):
    """H07."""
    at = await coordinator(fleet)
    for raw, status in ((BODY, 200), (b"[]", 400)):
        async with connect(at.url) as wire:
            await wire.send(post(CHAT, raw, version="1.0"))
            got = await wire.answer()
            assert (got.status, got.headers["Content-Length"]) == (status, str(len(got.raw)))
            assert await wire.is_closed()


async def test_an_http_1_0_client_is_sent_no_100(coordinator, fleet):
    """H01, H07: that version has no interim answers, so it would be taken for the answer."""
    at = await coordinator(fleet)
    async with connect(at.url) as wire:
        await wire.send(post(CHAT, BODY, "Expect: 100-continue", version="1.0"))
        assert (await wire.answer()).text == ANSWER


async def test_an_http_1_0_client_that_keeps_its_connection_may_ask_again(coordinator, fleet):
    """H07."""
    at = await coordinator(fleet)
    async with connect(at.url) as wire:
        for _ in range(2):
            await wire.send(post(CHAT, BODY, "Connection: keep-alive", version="1.0"))
            got = await wire.answer()
            assert (got.text, got.headers["Connection"]) == (ANSWER, "keep-alive")


async def test_chunks_may_have_extensions_and_trailers_and_a_packed_body(coordinator, fleet):
    """H04: neither is part of the body, and the next request on the connection is read after them."""
    at = await coordinator(fleet)
    packed = gzip.compress(BODY, mtime=0)
    async with connect(at.url) as wire:
        await wire.send(head(CHAT, JSON, "Transfer-Encoding: Chunked", "Trailer: X-Sum"))
        await wire.send(b"%x;name=value\r\n%s\r\n0\r\nX-Sum: 1\r\n\r\n" % (len(BODY), BODY))
        assert (await wire.answer()).text == ANSWER
        await wire.send(head(CHAT, JSON, "Transfer-Encoding: chunked", "Content-Encoding: gzip"))
        await wire.send(chunked(packed[:20], packed[20:]))
        assert (await wire.answer()).text == ANSWER


async def test_requests_on_one_connection_are_answered_in_their_order(coordinator, fleet):
    """A client may send the next request before it has the answer to the last."""
    at = await coordinator(fleet)
    questions = ["Repeat: one", "Repeat: two", "Repeat: three", "Repeat: four"]
    async with connect(at.url) as wire:
        for i, question in enumerate(questions):
            await wire.send(post(CHAT, encoded(question, stream=bool(i % 2)), f"X-Request-Id: ask-{i}"))
        answers = [await wire.answer() for _ in questions]
    assert [got.text for got in answers] == ["one", "two", "three", "four"]
    assert [got.headers["X-Request-Id"] for got in answers] == ["ask-0", "ask-1", "ask-2", "ask-3"]


async def test_requests_in_one_write_are_answered_in_their_order(coordinator, fleet):
    at = await coordinator(fleet)
    async with connect(at.url) as wire:
        await wire.send(
            post(CHAT, encoded("Repeat: one")),
            head("/healthz", method="GET"),
            post("/nope", b"{}"),
            post(CHAT, b"null"),
            post(CHAT, encoded("Repeat: two", stream=True)),
        )
        answers = [await wire.answer() for _ in range(5)]
        assert [got.status for got in answers] == [200, 200, 404, 400, 200]
        assert (answers[0].text, answers[4].text) == ("one", "two")


async def test_a_connection_outlives_refusals_that_leave_its_framing_whole(coordinator, fleet):
    """A 4xx of a body that was read, or of one that was skipped, costs nobody a new connection."""
    at = await coordinator(fleet)
    refused = {
        400: post(CHAT, b"[]"),
        404: post("/nope", b"{}"),
        405: head(CHAT, method="GET"),
        415: head(CHAT, "Content-Type: text/plain", "Content-Length: 2") + b"hi",
    }
    async with connect(at.url) as wire:
        for status, raw in refused.items():
            await wire.send(raw)
            assert (await wire.answer()).status == status
            await wire.send(post(CHAT, BODY))
            assert (await wire.answer()).text == ANSWER


async def test_a_whole_answer_has_a_length_and_the_json_type(coordinator, fleet):
    """V33."""
    for shape in ("openai", "text", "derender", "unwrapped", "alone"):
        at = await coordinator(fleet, shape)
        got = await at.chat()
        assert got.headers["Content-Type"] == "application/json"
        assert got.headers.getall("Content-Length") == [str(len(got.raw))]
        assert "Transfer-Encoding" not in got.headers
        assert json.loads(got.raw)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("shape", ["openai", "text", "derender"])
async def test_a_stream_is_chunked_and_typed_and_may_not_be_held_back(coordinator, fleet, shape, path):
    """V33, H19: the reverse; each has the request id before its first event."""
    at = await coordinator(fleet, shape)
    own = {"prompt": "Say hello."} if path == "/v1/completions" else {"input": "Say hello."}
    if path in (CHAT, "/v1/messages"):
        own = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 40}
    got = await at.post(path, {"model": "tiny", "stream": True, **own}, ("X-Request-Id", "ask-5"))
    assert (got.status, got.whole) == (200, True)
    assert got.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert got.headers["Transfer-Encoding"] == "chunked"
    assert "Content-Length" not in got.headers
    assert (got.headers["Cache-Control"], got.headers["X-Accel-Buffering"]) == ("no-cache", "no")
    assert got.headers.getall("X-Request-Id") == ["ask-5"]


async def test_a_body_that_is_rewritten_has_the_length_of_the_new_one(coordinator, fleet, scripted):
    """H16: the hand-over is taken out of what the client gets, so the worker's length would cut the JSON."""
    reply = {"choices": [{"index": 0, "text": "Hi"}], "kv_transfer_params": {"remote_host": "10.9.9.9"}}
    worker = await scripted(
        scripted.json(reply), scripted.sse(b"data: %s\n\ndata: [DONE]\n\n" % json.dumps(reply).encode())
    )
    at = await coordinator(fleet, "alone", pools={"decode": {"endpoints": [worker.url]}})
    got = await at.post("/v1/completions", {"model": "tiny", "prompt": "x"})
    assert got.headers["Content-Length"] == str(len(got.raw))
    assert got.body == {**reply, "kv_transfer_params": None}
    got = await at.post("/v1/completions", {"model": "tiny", "prompt": "x", "stream": True})
    assert got.events == [{**reply, "kv_transfer_params": None}, "[DONE]"]


async def test_a_worker_is_spoken_to_in_http_1_1_alone(coordinator, fleet):
    """H28: uvicorn answers an HTTP/2 preface with a parse error."""
    first_lines: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first_lines.append(await reader.readline())
        writer.close()

    async with await asyncio.start_server(listen, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        at = await coordinator(fleet, "alone", pools={"decode": {"endpoints": [url]}}, ready=False)
        assert (await at.chat()).status == 502
    asked = {line.decode().strip() for line in first_lines}
    assert asked >= {"POST /v1/chat/completions HTTP/1.1", "GET /health HTTP/1.1"}
    assert all(line.endswith(" HTTP/1.1") for line in asked)


async def test_a_clients_upgrade_to_http_2_is_not_passed_on(coordinator, fleet):
    """H09, H28."""
    at = await coordinator(fleet)
    upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA")
    async with connect(at.url) as wire:
        await wire.send(post(CHAT, BODY, *upgrade))
        got = await wire.answer()
    assert (got.status, got.text) == (200, ANSWER)
    for worker in (fleet.prefill, fleet.decode):
        names = {name.lower() for name, _ in worker.received[-1].headers}
        assert names.isdisjoint({"upgrade", "http2-settings", "connection"})


async def test_an_upgrade_to_a_websocket_is_not_made(coordinator, fleet):
    at = await coordinator(fleet)
    upgrade = (
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZQ==",
        "Sec-WebSocket-Version: 13",
    )
    async with connect(at.url) as wire:
        await wire.send(head("/v1/models", *upgrade, method="GET"))
        assert (await wire.answer()).body["data"][0]["id"] == "tiny"


@pytest.mark.parametrize(
    "target", ["http://elsewhere/v1/chat/completions", "/v1/chat/completions?x=1", "/v1/chat%2fcompletions"]
)
async def test_an_absolute_target_or_a_query_is_read_as_its_path(coordinator, fleet, target):
    """A forward proxy's form of the target is legal; where it points to is not where the request goes."""
    at = await coordinator(fleet)
    async with connect(at.url) as wire:
        await wire.send(post(target, BODY))
        got = await wire.answer()
    if "%2f" in target:
        assert got.status == 404
    else:
        assert got.text == ANSWER
        assert fleet.decode.received[-1].path == CHAT
