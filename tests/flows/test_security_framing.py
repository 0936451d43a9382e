"""Requests whose end could be read in two ways: refused, the connection closed, and what hides behind them not run.

A proxy in front that reads such a request otherwise than we do would let one client's bytes become another's request.
"""

import asyncio
import json

import pytest

from tests.flows.wire import connect, head, post

CHAT = "/v1/chat/completions"
JSON = "Content-Type: application/json"


def asking(text):
    return json.dumps({"model": "tiny", "messages": [{"role": "user", "content": text}]}).encode()


FIRST, HIDDEN = asking("first"), asking("hidden")
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(FIRST), FIRST)
LENGTH = f"Content-Length: {len(FIRST)}"


def framed(*headers, body=FIRST, version="1.1"):
    return head(CHAT, JSON, *headers, version=version) + body


def in_chunks(body):
    return framed("Transfer-Encoding: chunked", body=body)


def coded(*values):
    return framed(*(f"Transfer-Encoding:{value}" for value in values), body=CHUNKS)


AMBIGUOUS = {
    "a length and chunks": framed("Content-Length: 5", "Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
    "chunks and their length": framed("Transfer-Encoding: chunked", f"Content-Length: {len(CHUNKS)}", body=CHUNKS),
    "two lengths": framed("Content-Length: 2", LENGTH),
    "one length twice": framed(LENGTH, LENGTH),
    "a list of lengths": framed(f"{LENGTH}, {len(FIRST)}"),
    "a signed length": framed(LENGTH.replace(": ", ": +")),
    "a hexadecimal length": framed("Content-Length: 0x2"),
    "an endless length": framed("Content-Length: 99999999999999999999999"),
    "a blank before the colon of a length": framed(LENGTH.replace(":", " :")),
    "a folded length": framed(LENGTH.replace(": ", ":\r\n ")),
    "no chunked at the end": coded(" chunked, identity"),
    "chunked twice": coded(" chunked", " chunked"),
    "chunked, then another": coded(" chunked", " identity"),
    "another coding before chunked": coded(" gzip, chunked"),
    "identity before chunked": coded(" identity, chunked"),
    "a coding that is not known": coded(" xchunked"),
    "chunked in quotes": coded(' "chunked"'),
    "a control character before chunked": coded("\x0bchunked"),
    "a NUL behind chunked": coded(" chunked\0"),
    "a folded coding": coded("\r\n chunked"),
    "a blank before the colon of a coding": framed("Transfer-Encoding : chunked", body=CHUNKS),
    "chunks in HTTP/1.0": framed("Transfer-Encoding: chunked", "Connection: keep-alive", body=CHUNKS, version="1.0"),
    "a negative chunk": in_chunks(b"-1\r\n\r\n0\r\n\r\n"),
    "a chunk with a prefix": in_chunks(b"0x2\r\n{}\r\n0\r\n\r\n"),
    "a chunk with a sign": in_chunks(b"+2\r\n{}\r\n0\r\n\r\n"),
    "a chunk with an underscore": in_chunks(b"1_0\r\n{}\r\n0\r\n\r\n"),
    "a chunk without a size": in_chunks(b"\r\n{}\r\n0\r\n\r\n"),
    "a size with a blank": in_chunks(CHUNKS.replace(b"\r\n", b" \r\n", 1)),
    "a size that overflows": in_chunks(b"fffffffffffffffff\r\n{}\r\n0\r\n\r\n"),
    "a chunk that is longer than its size": in_chunks(b"1\r\n{}\r\n0\r\n\r\n"),
    "a chunk without its line end": in_chunks(b"2\r\n{}0\r\n\r\n"),
    "chunks with bare line feeds": in_chunks(CHUNKS.replace(b"\r\n", b"\n")),
    "a line feed in a chunk's extension": in_chunks(CHUNKS.replace(b"\r\n", b";a\nb\r\n", 1)),
    "a carriage return in a chunk's extension": in_chunks(CHUNKS.replace(b"\r\n", b";a\rb\r\n", 1)),
    "a length in the trailer": in_chunks(CHUNKS.removesuffix(b"\r\n") + b"Content-Length: 3\r\n\r\n"),
    "a trailer that is no header": in_chunks(CHUNKS.removesuffix(b"\r\n") + b"X T: 3\r\n\r\n"),
    "a folded header": framed(LENGTH, "X-A: b\r\n c"),
    "a blank line start": framed(" X: y", LENGTH),
    "a bare line feed": framed(LENGTH).replace(b"json\r\n", b"json\n"),
    "bare line feeds": framed(LENGTH).replace(b"\r\n", b"\n"),
    "a bare carriage return": framed(LENGTH, "X: a\rTransfer-Encoding: chunked"),
    "a carriage return at the end of the head": framed(LENGTH).replace(b"\r\n\r\n", b"\r\n\r"),
    "a NUL in a name": framed(LENGTH, "X\0: a"),
    "a NUL in a value": framed(LENGTH, "X: a\0b"),
    "a blank in a name": framed(LENGTH, "X A: a"),
    "no name": framed(LENGTH, ": a"),
    "two hosts": framed(LENGTH, "Host: there"),
    "no host": framed(LENGTH).replace(b"Host: here\r\n", b""),
    "a blank in the path": head("/v1/chat /completions", JSON, LENGTH) + FIRST,
    "a tab in the path": head("/v1/chat\t/completions", JSON, LENGTH) + FIRST,
}


async def conversation(at, *parts):
    """Send bytes; return the status of each answer until the connection closes."""
    statuses = []
    async with connect(at.url) as wire:
        await wire.send(*parts)
        try:
            while True:
                statuses.append((await wire.answer()).status)
        except (asyncio.IncompleteReadError, ConnectionError):
            return statuses


@pytest.mark.parametrize("what", AMBIGUOUS)
async def test_a_request_that_could_end_in_two_places_is_refused_and_nothing_behind_it_is_run(
    coordinator, fleet, legs, what
):
    at = await coordinator(fleet, "alone")
    (status,) = await conversation(at, AMBIGUOUS[what], post(CHAT, HIDDEN))
    assert status == (501 if "before chunked" in what and "control" not in what else 400)
    assert legs(fleet.decode) == []


CLEAR = {
    "a length": framed(LENGTH),
    "chunks": in_chunks(CHUNKS),
    "chunks in capitals and behind a tab": coded("\tCHUNKED"),
    "a chunk's extension": in_chunks(CHUNKS.replace(b"\r\n", b";a=b\r\n", 1)),
    "a trailer": in_chunks(CHUNKS.removesuffix(b"\r\n") + b"X-T: 3\r\n\r\n"),
    "empty lines before": b"\r\n\r\n" + framed(LENGTH),
}


@pytest.mark.parametrize("what", CLEAR)
async def test_a_request_that_is_clear_is_answered_and_the_next_one_too(coordinator, fleet, legs, what):
    at = await coordinator(fleet, "alone")
    last = post(CHAT, HIDDEN, "Connection: close")
    assert await conversation(at, CLEAR[what], last) == [200, 200]
    assert [leg.body["messages"][0]["content"] for leg in legs(fleet.decode)] == ["first", "hidden"]


async def test_a_body_where_none_is_wanted_is_not_run_as_a_request(coordinator, fleet, legs):
    """It is as long as its own head says, whatever it looks like."""
    at = await coordinator(fleet, "alone")
    inside = post(CHAT, HIDDEN)
    for path, method, status in (("/healthz", "GET", 200), ("/nope", "POST", 404), (CHAT, "GET", 405)):
        first = head(path, f"Content-Length: {len(inside)}", method=method) + inside
        assert await conversation(at, first, head("/healthz", "Connection: close", method="GET")) == [status, 200]
    assert legs(fleet.decode) == []


@pytest.mark.parametrize("pieces", [1, 40])
async def test_a_head_that_is_too_large_as_a_whole_is_a_431(coordinator, fleet, pieces):
    """Field by field it is within the limit; what one connection can make us hold has an end all the same."""
    at = await coordinator(fleet, "alone", server={"max_header_size": 2000})
    large = head("/healthz", *(f"X-{n}: {'x' * 1900}" for n in range(60)), method="GET")[:-2]
    size = len(large) // pieces
    async with connect(at.url) as wire:
        try:
            for start in range(0, len(large), size):
                await wire.send(large[start : start + size])
                await asyncio.sleep(0)
            got = await wire.answer()
        except ConnectionError:
            return  # hung up while it was still sending
        assert (got.status, got.error["type"]) == (431, "RequestHeaderFieldsTooLargeError")
        assert "larger than 8000 bytes" in got.error["message"]
        assert await wire.is_closed()


async def test_a_head_that_is_large_and_within_the_limit_is_read(coordinator, fleet):
    at = await coordinator(fleet, "alone", server={"max_header_size": 2000})
    fields = [f"X-{n}: {'x' * 1900}" for n in range(4)]
    assert await conversation(at, head("/healthz", *fields, "Connection: close", method="GET")) == [200]


EVENTS = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "header", ["X: a\0b", "X: a\rSet-Cookie: b", "X: a\nSet-Cookie: b", "X: a\r\n b", "X Y: a", "X: \1"]
)
async def test_a_worker_cannot_write_a_client_s_head(coordinator, fleet, scripted, header, stream):
    """What is no header in its answer is a 502 and never a line of ours."""
    answer = (
        scripted.sse(EVENTS, head=f"{header}\r\n") if stream else scripted.json({"choices": []}, head=f"{header}\r\n")
    )
    worker = await scripted(answer)
    at = await coordinator(fleet, "alone", pools={"decode": {"endpoints": [worker.url]}})
    got = await at.chat(stream=stream)
    assert (got.status, "Set-Cookie" in got.headers, "X" in got.headers) == (502, False, False)
