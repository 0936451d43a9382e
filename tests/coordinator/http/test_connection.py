"""One connection: requests are read however they are cut, answered in their order, and bounded in every direction."""

from __future__ import annotations

import asyncio
import gc
import gzip
import zlib
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.http import connection as connection_module
from coordinator.http.connection import Patience
from coordinator.inflate import BodyBroken
from envelope.errors import BadRequest, ClientGone, HeadersTooLarge
from tests.coordinator.http.peer import Peer

if TYPE_CHECKING:
    from coordinator.http.request import Request

HOST = "Host: here\r\n"


def get(target: str = "/", *headers: str, version: str = "1.1") -> bytes:
    lines = "".join(f"{header}\r\n" for header in headers)
    return f"GET {target} HTTP/{version}\r\n{HOST}{lines}\r\n".encode()


def post(body: bytes, *headers: str, chunked: bool = False) -> bytes:
    framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
    lines = "".join(f"{header}\r\n" for header in (framing, *headers))
    if chunked:
        body = b"".join(b"1;a=b\r\n%c\r\n" % byte for byte in body) + b"0\r\nX-Trailer: 1\r\n\r\n"
    return f"POST / HTTP/1.1\r\n{HOST}{lines}\r\n".encode() + body


UPGRADE = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA")

# Requests, and what the route sees of each: method, target and body.
REQUESTS: dict[str, tuple[bytes, tuple[str, str, bytes]]] = {
    "a question": (get(), ("GET", "/", b"")),
    "with a query": (get("/?a=b%20c"), ("GET", "/?a=b%20c", b"")),
    "in absolute form": (get("http://here/"), ("GET", "http://here/", b"")),
    "with a body": (post(b"hello"), ("POST", "/", b"hello")),
    "with no bytes in it": (post(b""), ("POST", "/", b"")),
    "in chunks": (post(b"hello", chunked=True), ("POST", "/", b"hello")),
    "with an offer": (post(b"hello", *UPGRADE), ("POST", "/", b"hello")),
    "in chunks, with an offer": (post(b"hello", *UPGRADE, chunked=True), ("POST", "/", b"hello")),
    "a question with an offer": (get("/", *UPGRADE), ("GET", "/", b"")),
    "behind empty lines": (b"\r\n\r\n" + get(), ("GET", "/", b"")),
}


def cut(data: bytes, at: list[int]) -> list[bytes]:
    ends = sorted({end for end in at if end < len(data)} | {len(data)})
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(sorted(REQUESTS)), min_size=1, max_size=6), st.lists(st.integers(1, 900), max_size=12))
def test_requests_are_read_in_their_order_however_they_are_cut(names: list[str], at: list[int]) -> None:
    async def conversation() -> None:
        peer = Peer()
        for part in cut(b"".join(REQUESTS[name][0] for name in names), at):
            await peer.send(part)
        for _ in range(20):
            await asyncio.sleep(0)
        assert [(method, target, body) for method, target, _, body in peer.seen] == [REQUESTS[n][1] for n in names]
        assert peer.answers == [200] * len(names)
        assert not peer.transport.closing

    asyncio.run(conversation())


@pytest.mark.parametrize("name", REQUESTS)
async def test_requests_are_read_byte_by_byte(name: str) -> None:
    peer = Peer()
    raw, seen = REQUESTS[name]
    for byte in raw * 2:
        await peer.send(bytes((byte,)))
    assert [(method, target, body) for method, target, _, body in peer.seen] == [seen] * 2


async def test_headers_keep_their_bytes_and_their_order() -> None:
    seen = list[list[tuple[str, str]]]()

    async def note(request: Request) -> None:
        seen.append(list(request.headers.items()))
        request.response.whole(200, (), b"")

    await Peer(note).send(get("/", "X-B: 1", "x-a: é", "X-B: 2").replace("é".encode(), b"\xe9"))
    assert seen == [[("Host", "here"), ("X-B", "1"), ("x-a", "\udce9"), ("X-B", "2")]]


async def test_blanks_around_a_value_are_none_of_it() -> None:
    """Source: RFC 9112, section 5.1."""
    peer = Peer()
    await peer.send(get("/", "X-A: \ta b \t", "X-B:  "))
    assert peer.seen == [("GET", "/", {"Host": "here", "X-A": "a b", "X-B": ""}, b"")]


async def test_a_trailer_is_no_header() -> None:
    """What stands in front of us has checked the headers, and may have passed a trailer on as it was."""
    peer = Peer()
    raw = post(b"hello", chunked=True).replace(b"X-Trailer: 1", b"X-User: root\r\nX-Trailer: 1")
    await peer.send(raw + get())
    assert peer.seen == [
        ("POST", "/", {"Host": "here", "Transfer-Encoding": "chunked"}, b"hello"),
        ("GET", "/", {"Host": "here"}, b""),
    ]


async def test_a_target_that_is_no_url_is_not_found() -> None:
    peer = Peer()
    await peer.send(get("http://") + get("http://here:99999999/"))
    assert peer.answers == [404, 404]


LONG = "x" * 1000

# (what is sent, the status, whether it is told by us in a callback of the parser or by the parser itself)
REFUSED: dict[str, tuple[bytes, int]] = {
    "a line that is too long": (get("/" + LONG), 431),
    "a header that is too long": (get("/", f"X: {LONG}"), 431),
    "headers that are too long together": (get("/", *(f"X-{i}: {LONG[:900]}" for i in range(5))), 431),
    "too many headers": (get("/", *("X: 1" for _ in range(200))), 431),
    "no HTTP": (b"hello\r\n\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "HTTP/0.9": (b"GET / HTTP/0.9\r\nHost: here\r\n\r\n", 400),
    "two hosts": (get("/", "Host: there"), 400),
    "a coding that is not known": (post(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: x, chunked"), 501),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_cannot_be_read_is_told_and_nothing_behind_it_is_run(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "_SILENT_S", 0.01)
    raw, status = REFUSED[name]
    peer = Peer(max_field_bytes=999)
    await peer.send(raw + get())
    assert (peer.answers, peer.seen, len(peer.refused)) == ([status], [], 1)
    assert b"\r\nConnection: close\r\n" in peer.transport.written
    await peer.send(get())
    assert peer.answers == [status]
    await asyncio.wait_for(peer.connection.task or asyncio.sleep(0), 10)
    assert peer.transport.closing


async def test_a_head_that_goes_on_and_on_is_refused() -> None:
    peer = Peer(max_field_bytes=1000)
    await peer.send(get()[:-2] + b"X: ")
    for _ in range(60):
        await peer.send(b"x" * 100)
    (error,) = peer.refused
    assert isinstance(error, HeadersTooLarge)


# How it begins, and how it goes on.
ENDLESS = {
    "a trailer": (b"0\r\nX: ", b"x" * 60),
    "trailers": (b"0\r\n", b"X: a\r\n" * 10),
    "a chunk's extension": (b"5;", b"x" * 60),
}


@pytest.mark.parametrize("what", ENDLESS)
async def test_what_goes_on_and_on_and_is_no_body_is_refused(what: str) -> None:
    failed = list[BodyBroken]()

    async def read(request: Request) -> None:
        try:
            [part async for part in request.body.parts()]
        except BodyBroken as broken:
            failed.append(broken)
            raise BadRequest("broken") from broken

    peer = Peer(read, max_field_bytes=1000)
    begun, more = ENDLESS[what]
    await peer.send(post(b"", chunked=True).partition(b"0\r\n")[0] + b"1\r\nx\r\n" + begun)
    for _ in range(80):
        await peer.send(more)
    assert [type(broken.__cause__) for broken in failed] == [HeadersTooLarge]
    assert peer.answers == [400]


async def test_heads_that_are_cut_are_not_counted_together() -> None:
    """One read may end a head, hold others whole, and begin the next."""
    peer, raw = Peer(max_field_bytes=100), get() * 30
    await peer.send(raw[:10])
    await peer.send(raw[10:-10])
    await peer.send(raw[-10:])
    while len(peer.answers) < 30:
        await peer.send(b"")
    assert set(peer.answers) == {200}


async def test_offers_may_come_in_any_number() -> None:
    peer, count = Peer(), 2000
    await peer.send(get("/", *UPGRADE) * count)
    while len(peer.answers) < count:
        await peer.send(b"")
    assert set(peer.answers) == {200}


async def test_requests_that_wait_have_a_bound_and_all_are_answered() -> None:
    gate = asyncio.Event()

    async def wait(request: Request) -> None:
        await gate.wait()
        request.response.whole(200, (), b"")

    peer = Peer(wait)
    for i in range(30):
        assert peer.transport.paused == (i > connection_module._WAITING)
        await peer.send(get())
    assert peer.transport.paused
    gate.set()
    while len(peer.answers) < 30:
        await asyncio.sleep(0)
    assert not peer.transport.paused


async def test_garbage_behind_a_request_is_told_after_its_answer() -> None:
    gate = asyncio.Event()

    async def wait(request: Request) -> None:
        await gate.wait()
        request.response.whole(200, (), b"")

    peer = Peer(wait)
    await peer.send(get() + b"garbage\r\n\r\n")
    assert peer.answers == []
    gate.set()
    await peer.send(b"")
    assert peer.answers == [200, 400]


async def test_a_body_whose_framing_breaks_fails_its_reader_alone() -> None:
    peer, heard = Peer(), []

    async def read(request: Request) -> None:
        try:
            [part async for part in request.body.parts()]
        except Exception as error:
            heard.append(error.__cause__)
            raise BadRequest("broken") from error

    peer = Peer(read)
    await peer.send(post(b"x", chunked=True)[:-20] + b"zz\r\n" + get())
    assert [type(error) for error in heard] == [BadRequest]
    assert peer.answers == [400]


async def test_a_client_that_leaves_stops_its_request() -> None:
    stopped = asyncio.Event()

    async def wait(request: Request) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            stopped.set()
            raise

    peer = Peer(wait)
    await peer.send(get() + get())
    peer.transport.closing = True
    peer.connection.connection_lost(None)
    await asyncio.wait_for(stopped.wait(), 10)
    await asyncio.sleep(0)
    assert (peer.connection.task, peer.server.connections, peer.answers) == (None, set(), [])


@pytest.mark.parametrize("raised", [ClientGone("left"), ConnectionResetError()])
async def test_who_left_is_told_nothing(raised: Exception) -> None:
    async def leave(request: Request) -> None:
        raise raised

    peer = Peer(leave)
    await peer.send(get())
    assert (peer.answers, peer.refused, peer.transport.closing) == ([], [], True)


async def test_who_left_unnoticed_is_not_waited_for_and_no_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While its body is held back nothing is read, and so nobody has told us."""

    def gone() -> None:
        raise OSError(107, "Transport endpoint is not connected")

    async def refuse(request: Request) -> None:
        request.response.whole(503, (), b"")

    peer = Peer(refuse)
    monkeypatch.setattr(peer.transport, "write_eof", gone)
    await peer.send(post(bytes(300_000))[:280_000])
    assert (peer.answers, peer.transport.closing, peer.connection.task) == ([503], True, None)
    gc.collect()  # of a task that failed, the loop is told when it goes
    assert caplog.records == []


async def test_an_answer_that_does_not_end_ends_the_connection() -> None:
    async def half(request: Request) -> None:
        request.response.begin(200, ())
        request.response.put(b"x")

    peer = Peer(half)
    await peer.send(get() + get())
    assert peer.answers == [200]
    assert peer.transport.closing
    assert not peer.transport.written.endswith(b"0\r\n\r\n")


async def test_a_fault_of_ours_is_a_500_or_a_broken_answer(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(request: Request) -> None:
        if request.query:
            request.response.begin(200, ())
        raise ZeroDivisionError

    peer = Peer(fail)
    await peer.send(get())
    assert (peer.answers, peer.transport.closing) == ([500], False)
    await peer.send(get("/?begun"))
    assert (peer.answers, peer.transport.closing) == ([500, 200], True)
    assert len(caplog.records) == 2


# --- limits in time --------------------------------------------------------------------------------------------------


async def test_a_head_has_its_time_and_so_has_an_idle_connection() -> None:
    peer = Peer(patience=Patience(head_s=10.0, idle_s=20.0))
    now = asyncio.get_running_loop().time()

    def aborted_at(after_s: float) -> bool:
        peer.connection.look(now + after_s)
        return peer.transport.aborted

    assert not aborted_at(9.0)
    await peer.send(get()[:-2])
    assert not aborted_at(9.0)
    await peer.send(b"\r\n")
    assert peer.answers == [200]
    assert not aborted_at(19.0)
    await peer.send(b"G")  # the next head begins: its time is shorter
    assert aborted_at(11.0)


async def test_a_trailer_begins_no_head() -> None:
    peer = Peer(patience=Patience(head_s=10.0, idle_s=20.0))
    await peer.send(post(b"x", chunked=True))
    peer.connection.look(asyncio.get_running_loop().time() + 15)
    assert (peer.answers, peer.transport.aborted) == ([200], False)


async def test_a_request_has_all_the_time_it_takes() -> None:
    async def wait(request: Request) -> None:
        await asyncio.sleep(60)

    peer = Peer(wait, patience=Patience(head_s=1.0, idle_s=1.0))
    await peer.send(get())
    peer.connection.look(asyncio.get_running_loop().time() + 1000)
    assert not peer.transport.aborted
    peer.connection.give_up()


async def test_a_client_that_takes_nothing_is_hung_up_and_one_that_takes_little_is_not() -> None:
    peer = Peer(patience=Patience(write_stall_s=5.0))
    now = asyncio.get_running_loop().time()
    peer.transport.waiting = 100_000
    peer.connection.pause_writing()
    peer.transport.waiting -= 1
    peer.connection.look(now + 6)
    assert not peer.transport.aborted
    peer.connection.look(now + 12)
    assert peer.transport.aborted and peer.connection.stalled


async def test_who_is_behind_is_waited_for_and_who_leaves_meanwhile_is_told_of() -> None:
    peer = Peer()
    await peer.connection.drain()
    for leaves in (False, True):
        peer.connection.pause_writing()
        assert peer.connection.behind
        waiting = asyncio.create_task(peer.connection.drain())
        await asyncio.sleep(0)
        assert not waiting.done()
        peer.transport.closing = leaves
        peer.connection.resume_writing()
        if leaves:
            with pytest.raises(ConnectionError):
                await waiting
        else:
            await waiting


async def test_who_takes_no_answers_is_given_no_more_of_them() -> None:
    """Else what waits for a client that only asks would have no bound, and always grow."""
    peer = Peer(patience=Patience(write_stall_s=5.0))
    peer.connection.pause_writing()
    await peer.send(get() * 30)
    assert (peer.answers, peer.transport.paused) == ([200], True)
    peer.connection.resume_writing()
    while len(peer.answers) < 30:
        await peer.send(b"")
    assert not peer.transport.paused


async def test_who_takes_no_answer_is_not_waited_for_when_its_connection_is_closed_either() -> None:
    peer = Peer(patience=Patience(write_stall_s=5.0))
    peer.transport.waiting = 100
    await peer.send(get("/", "Connection: close"))
    assert (peer.answers, peer.transport.closing) == ([200], True)
    peer.connection.resume_writing()  # below the low-water mark: some is left all the same
    now = asyncio.get_running_loop().time()
    peer.connection.look(now + 4)
    assert not peer.transport.aborted
    peer.connection.look(now + 6)
    assert peer.transport.aborted


async def test_a_body_that_nobody_takes_does_not_stop_the_next_request() -> None:
    gate = asyncio.Event()

    async def refuse(request: Request) -> None:
        await gate.wait()
        request.response.whole(429, (), b"")

    peer = Peer(refuse)
    await peer.send(post(bytes(300_000)))
    assert peer.transport.paused
    gate.set()
    await peer.send(b"")
    assert (peer.answers, peer.transport.paused) == ([429], False)


async def test_a_body_that_nobody_reads_stops_the_client() -> None:
    gate = asyncio.Event()

    async def late(request: Request) -> None:
        await gate.wait()
        request.response.whole(200, (), b"".join([part async for part in request.body.parts()]))

    peer, body = Peer(late), bytes(600_000)
    raw = post(body)
    await peer.send(raw[:200_000])
    assert not peer.transport.paused
    await peer.send(raw[200_000:400_000])
    assert peer.transport.paused
    gate.set()
    await peer.send(b"")
    assert not peer.transport.paused
    await peer.send(raw[400_000:])
    assert peer.transport.written.endswith(body)


# --- packed bodies ---------------------------------------------------------------------------------------------------

TEXT = b"hello " * 100_000
PACKED = {
    "gzip": gzip.compress(TEXT, mtime=0),
    "x-gzip": gzip.compress(TEXT[:7], mtime=0) + gzip.compress(TEXT[7:], mtime=0),
    "deflate": zlib.compress(TEXT),
}
RAW_DEFLATE = zlib.compress(TEXT)[2:-4]


@pytest.mark.parametrize(("encoding", "packed"), [*PACKED.items(), ("deflate", RAW_DEFLATE), ("", TEXT)])
async def test_a_packed_body_is_unpacked_in_bounded_steps(encoding: str, packed: bytes) -> None:
    parts = list[bytes]()

    async def read(request: Request) -> None:
        parts.extend([part async for part in request.body.parts(encoding)])
        request.response.whole(200, (), b"")

    peer = Peer(read)
    for piece in cut(post(packed), [99, 5000]):
        await peer.send(piece)
    while not peer.answers:
        await asyncio.sleep(0)
    assert b"".join(parts) == TEXT
    assert max(map(len, parts)) <= 1 << 20


async def test_members_of_a_packed_body_have_a_bound() -> None:
    """Each is unpacked by a new engine: twenty bytes would cost what thousands do."""
    failed = list[BodyBroken]()

    async def read(request: Request) -> None:
        try:
            [part async for part in request.body.parts("gzip")]
        except BodyBroken as broken:
            failed.append(broken)
        request.response.whole(400, (), b"")

    peer = Peer(read)
    await peer.send(post(gzip.compress(b"") * 5000))
    while not peer.answers:
        await asyncio.sleep(0)
    assert len(failed) == 1
