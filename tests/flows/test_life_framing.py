"""How workers frame their answers: every legal way is read, and what is broken is a 502 and spoils no other answer."""

import gzip
import json
import zlib

import pytest

DONE = b"data: [DONE]\n\n"
BODY = json.dumps({"choices": [{"index": 0, "message": {"content": "Zoë"}}]}, ensure_ascii=False).encode()
STREAM = b'data: {"choices":[{"index":0,"delta":{"content":"Zo\xc3\xab"}}]}\n\n' + DONE
JSON, SSE = "application/json", "text/event-stream"


def head(content_type, *lines, version="1.1", status="200 OK"):
    return "\r\n".join([f"HTTP/{version} {status}", f"Content-Type: {content_type}", *lines, "", ""]).encode()


def chunked(raw, size=7, extension=b"", trailer=b""):
    pieces = [raw[at : at + size] for at in range(0, len(raw), size)]
    framed = b"".join(b"%X%s\r\n%s\r\n" % (len(piece), extension, piece) for piece in pieces)
    return framed + b"0\r\n" + trailer + b"\r\n"


FRAMINGS = {
    "a length": lambda kind, raw: [head(kind, f"Content-Length: {len(raw)}") + raw],
    "chunks": lambda kind, raw: [head(kind, "Transfer-Encoding: chunked") + chunked(raw)],
    "chunks with extensions": lambda kind, raw: [
        head(kind, "transfer-encoding: Chunked") + chunked(raw, extension=b';a="b"')
    ],
    "chunks and a trailer": lambda kind, raw: [
        head(kind, "Transfer-Encoding: chunked", "Trailer: X-Sum") + chunked(raw, trailer=b"X-Sum: 1\r\n")
    ],
    "until it closes": lambda kind, raw: [head(kind, "Connection: close") + raw, "end"],
    "HTTP/1.0": lambda kind, raw: [head(kind, version="1.0") + raw, "end"],
    "an early hint first": lambda kind, raw: [
        b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + head(kind, f"Content-Length: {len(raw)}") + raw
    ],
    "gzip": lambda kind, raw: [
        head(kind, "Content-Encoding: gzip", f"Content-Length: {len(gzip.compress(raw))}") + gzip.compress(raw)
    ],
    "deflate in chunks": lambda kind, raw: [
        head(kind, "Content-Encoding: deflate", "Transfer-Encoding: chunked") + chunked(zlib.compress(raw))
    ],
    "a slow writer": lambda kind, raw: [
        bytes([byte]) for byte in head(kind, "Transfer-Encoding: chunked") + chunked(raw)
    ],
}


@pytest.mark.parametrize("framing", FRAMINGS.values(), ids=FRAMINGS)
async def test_every_legal_framing_of_a_whole_answer_is_read(says, framing):
    """Twice on one coordinator, so that what a connection is left with is seen too."""
    at, decode = await says(framing(JSON, BODY))
    for _ in "12":
        got = await at.chat()
        assert (got.status, got.text, got.headers["Content-Length"]) == (200, "Zoë", str(len(got.raw)))
        assert not {"Transfer-Encoding", "Content-Encoding", "Trailer"} & set(got.headers)
    assert len(decode.received) == 2


@pytest.mark.parametrize("framing", FRAMINGS.values(), ids=FRAMINGS)
async def test_every_legal_framing_of_a_stream_is_read(says, framing):
    """S01, S36: one stream, whoever frames it."""
    at, decode = await says(framing(SSE, STREAM))
    for _ in "12":
        got = await at.chat(stream=True)
        assert (got.status, got.raw, got.whole) == (200, STREAM, True)
        assert "Content-Encoding" not in got.headers
    assert len(decode.received) == 2


BROKEN = {
    "no HTTP at all": [b"hello\r\n\r\n", "end"],
    "no status": [b"HTTP/1.1\r\n\r\n", "end"],
    "a header without a colon": [b"HTTP/1.1 200 OK\r\nbroken\r\n\r\n", "end"],
    "half a head": [b"HTTP/1.1 200 OK\r\nContent-", "end"],
    "a length that is none": [head(JSON, "Content-Length: many") + BODY, "end"],
    "a length that is negative": [head(JSON, "Content-Length: -5") + BODY, "end"],
    "two lengths": [head(JSON, "Content-Length: 3", f"Content-Length: {len(BODY)}") + BODY, "end"],
    "a body that is short": [head(JSON, f"Content-Length: {len(BODY) + 1}") + BODY, "end"],
    "a chunk size that is none": [head(JSON, "Transfer-Encoding: chunked") + b"xyz\r\n" + BODY, "end"],
    "a chunk that is short": [head(JSON, "Transfer-Encoding: chunked") + b"ffff\r\n" + BODY, "end"],
    "no last chunk": [head(JSON, "Transfer-Encoding: chunked") + chunked(BODY)[:-5], "end"],
    "a head without end": [head(JSON)[:-2] + b"X: " + b"y" * 2**20, "end"],
    "gzip that is none": [head(JSON, "Content-Encoding: gzip", f"Content-Length: {len(BODY)}") + BODY],
    "half of a gzip": [
        head(JSON, "Content-Encoding: gzip", f"Content-Length: {len(gzip.compress(BODY)) - 30}")
        + gzip.compress(BODY)[:-30]
    ],
    "no content": [b"HTTP/1.1 204 No Content\r\n\r\n"],
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("answer", BROKEN.values(), ids=BROKEN)
async def test_an_answer_whose_framing_is_broken_is_a_502(says, scripted, answer, stream):
    """The worker's fault, and the next answer is whole."""
    good = scripted.sse(STREAM) if stream else scripted.json(BODY)
    at, _ = await says(answer, good)
    got = await at.chat(stream=stream)
    assert (got.status, got.headers["Content-Type"], got.error["code"]) == (502, JSON, 502)
    got = await at.chat(stream=stream)
    assert (got.status, got.text) == (200, "Zoë")


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_worker_sends_behind_an_answer_is_no_answer_to_the_next_request(says, scripted, stream):
    """One client would read what was meant for another."""
    good = scripted.sse(STREAM) if stream else scripted.json(BODY)
    evil = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 11\r\n\r\n" + b'{"evil": 1}'
    at, _ = await says([b"".join(good) + evil], good)
    for _ in "12":
        got = await at.chat(stream=stream)
        assert (got.status, got.text, b"evil" in got.raw) == (200, "Zoë", False)


@pytest.mark.parametrize("line", ["Connection: close", "connection: Close"])
async def test_a_worker_that_says_it_will_close_is_believed(says, line):
    """The next request has a connection of its own, without a failed attempt first."""
    answer = [head(JSON, line, f"Content-Length: {len(BODY)}") + BODY]
    at, decode = await says(answer)
    for _ in "123":
        assert (await at.chat()).status == 200
    assert len(decode.received) == 3
    assert await at.count("coordinator_stale_connections_total") == 0


async def test_an_answer_that_comes_before_the_request_was_read_is_the_answer(coordinator, fleet, scripted):
    """A worker may refuse a large body by its head; the rest of it must not stand before the next request."""
    refused = scripted.json({"error": {"message": "too large", "type": "BadRequestError", "code": 413}}, 413)
    decode = await scripted(refused, scripted.json(BODY))
    decode.reads_bodies = False
    at = await coordinator(fleet, "alone", pools={"decode": {"endpoints": [decode.url]}})
    got = await at.chat("x" * 20_000_000)
    assert (got.status, got.error["message"]) == (413, "too large")
    assert (await at.chat()).text == "Zoë"
    assert await at.count("coordinator_stale_connections_total") == 0
