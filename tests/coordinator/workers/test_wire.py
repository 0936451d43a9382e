"""HTTP/1.1 to workers: whatever way the bytes of an answer are cut, it is the same answer."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.workers.wire import Broken, ConnectFailed, Connection, Pool, request_head
from tests.bounds import HANG_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

CHUNKED = b"HTTP/1.1 200 OK\r\nX-A: 1\r\nX-A: 2\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
SIZED = b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\nabcde"
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\nX-A: 1\r\n\r\nabcde"
EARLY = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + SIZED
ANSWERS = {"chunked": CHUNKED, "sized": SIZED, "until close": UNTIL_CLOSE, "after early hints": EARLY}


class Worker:
    """A server that answers each request with what the script says: bytes, a pause, or the end of the connection."""

    def __init__(self, *answers: list[Any]) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.connections = 0
        self.origin = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while self.answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                self.requests.append(head + (await reader.readexactly(int(length)) if length else b""))
                for item in self.answers.pop(0):
                    if item is None:
                        return
                    writer.write(item)
                    await writer.drain()
                    await asyncio.sleep(0)
            await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Awaitable[Worker]]]:
    servers: list[asyncio.Server] = []

    async def make(*answers: list[Any]) -> Worker:
        worker = Worker(*answers)
        server = await asyncio.start_server(worker.serve, "127.0.0.1", 0)
        servers.append(server)
        worker.origin = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return worker

    yield make
    for server in servers:
        server.close()


@asynccontextmanager
async def pool(**options: Any) -> AsyncIterator[Pool]:
    made = Pool(**{"idle": 4, "idle_s": 4.0, **options})
    try:
        async with asyncio.timeout(HANG_S):
            yield made
    finally:
        made.close()


async def asked(made: Pool, worker: Worker, **options: Any) -> tuple[Connection, bytes]:
    """Make one exchange and give the connection back."""
    connection = await made.acquire(worker.origin, 1.0, **options)
    connection.send(request_head("POST", worker.origin, "/x", [("X-B", "é")], 2), b"{}")
    await connection.head()
    parts: list[bytes] = []
    while part := await connection.read():
        parts.append(part)
    made.release(worker.origin, connection)
    return connection, b"".join(parts)


async def used_pair(made: Pool, worker: Worker) -> list[Connection]:
    """Have two connections at a time, make an exchange on each, and give them back."""
    pair = [await made.acquire(worker.origin, 1.0) for _ in range(2)]
    for connection in pair:
        connection.send(request_head("POST", worker.origin, "/x", [], 2), b"{}")
        await connection.head()
        assert await connection.read() == b"abcde"
        made.release(worker.origin, connection)
    return pair


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
async def test_an_answer_cut_at_any_byte_is_the_same(start: Any, answer: bytes) -> None:
    cuts = range(1, len(answer))
    worker = await start(*[[answer[:cut], answer[cut:], None] for cut in cuts])
    async with pool() as made:
        for _ in cuts:
            connection, body = await asked(made, worker, fresh=True)
            assert (connection.status in (200, 404), body) == (True, b"abcde")


async def test_an_answer_that_comes_byte_by_byte_is_the_same(start: Any) -> None:
    worker = await start([CHUNKED[i : i + 1] for i in range(len(CHUNKED))])
    async with pool() as made:
        connection, body = await asked(made, worker)
    assert (connection.headers.getall("X-A"), body) == (["1", "2"], b"abcde")


async def test_a_request_is_framed_and_its_headers_go_out_as_they_came(start: Any) -> None:
    worker = await start([SIZED])
    async with pool() as made:
        await asked(made, worker)
    host = worker.origin.removeprefix("http://")
    assert worker.requests == [
        f"POST /x HTTP/1.1\r\nHost: {host}\r\nX-B: é\r\nContent-Type: application/json\r\n"
        f"Content-Length: 2\r\n\r\n{{}}".encode()
    ]


async def test_a_large_body_goes_out_whole(start: Any) -> None:
    worker = await start([SIZED])
    body = bytes(range(200)) * 1_000
    async with pool() as made:
        connection = await made.acquire(worker.origin, 1.0)
        pieces = [b"", body[:7], memoryview(body)[7:150_000], body[150_000:]]
        connection.send(request_head("POST", worker.origin, "/x", [], len(body)), *pieces)
        await connection.head()
    assert worker.requests[0].endswith(b"\r\n\r\n" + body)


async def test_a_connection_serves_one_exchange_after_another(start: Any) -> None:
    worker = await start([SIZED], [CHUNKED], [SIZED])
    async with pool() as made:
        first, _ = await asked(made, worker)
        second, _ = await asked(made, worker)
        third, _ = await asked(made, worker, fresh=True)
    assert (first is second, second is third, worker.connections) == (True, False, 2)


@pytest.mark.parametrize(
    "answer",
    [
        [UNTIL_CLOSE, None],
        [SIZED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")],
        [SIZED.replace(b"1.1", b"1.0")],
    ],
)
async def test_a_connection_that_the_worker_will_close_is_not_kept(start: Any, answer: list[Any]) -> None:
    worker = await start(answer, [SIZED])
    async with pool() as made:
        await asked(made, worker)
        await asked(made, worker)
    assert worker.connections == 2


async def test_no_more_connections_are_kept_than_the_cap(start: Any) -> None:
    worker = await start([SIZED], [SIZED], [SIZED])
    async with pool(idle=1) as made:
        pair = await used_pair(made, worker)
        assert [connection.alive for connection in pair] == [True, False]


async def test_a_connection_that_was_idle_for_too_long_is_not_used(start: Any) -> None:
    worker = await start([SIZED], [SIZED])
    async with pool(idle_s=0.0001) as made:
        first, _ = await asked(made, worker)
        await asyncio.sleep(0.001)
        await asked(made, worker)
    assert (first.alive, worker.connections) == (False, 2)


async def test_connections_that_nobody_comes_to_are_closed_when_their_time_is_over(start: Any) -> None:
    """The last one kept is taken first, so those of a busy minute stay below it."""
    worker = await start([SIZED], [SIZED], [SIZED])
    async with pool() as made:
        pair = await used_pair(made, worker)
        pair[0].idle_since -= 10
        pair[1].idle_since += 60
        assert (await made.acquire(worker.origin, 1.0)) is pair[1]
        assert pair[0].alive
        made.release(worker.origin, pair[1])
        assert [connection.alive for connection in pair] == [False, True]


async def test_nothing_is_kept_to_a_worker_that_nobody_asks_any_more(start: Any) -> None:
    """Pods come and go under new addresses; one whose node has died never hangs up. Nor need there be any other."""
    gone, here = await start([SIZED]), await start([SIZED], [SIZED])
    async with pool(idle_s=0.01) as made:
        left, _ = await asked(made, gone)
        stays, _ = await asked(made, here)
        stays.idle_since += 60
        while left.alive:  # for as long as the pool may take
            await asyncio.sleep(0.005)
        assert (stays.alive, list(made._idle)) == (True, [here.origin])
        stays.idle_since -= 60
        while made._idle:
            await asyncio.sleep(0.005)
        assert (stays.alive, made._sweeping) == (False, None)
        again, _ = await asked(made, here)
        while again.alive:
            await asyncio.sleep(0.005)


async def test_a_pool_that_is_closed_leaves_no_timer_behind(start: Any) -> None:
    worker = await start([SIZED])
    async with pool() as made:
        await asked(made, worker)
        assert made._sweeping is not None
    assert made._sweeping.cancelled()


async def test_what_nobody_asked_for_ends_the_connection(start: Any) -> None:
    worker = await start([SIZED + SIZED], [SIZED])
    async with pool() as made:
        first, _ = await asked(made, worker)
        async with asyncio.timeout(HANG_S):
            while first.alive:
                await asyncio.sleep(0)
        assert (await asked(made, worker))[1] == b"abcde"
    assert worker.connections == 2


async def test_a_port_that_nobody_listens_on_is_told_from_a_broken_answer() -> None:
    async with pool() as made:
        with pytest.raises(ConnectFailed):
            await made.acquire("http://127.0.0.1:1", 1.0)


@pytest.mark.parametrize(
    "answer",
    [
        [None],
        [b"HTTP/1.1 200 OK\r\n", None],
        [SIZED[:-1], None],
        [CHUNKED[:-5], None],
        [b"SSH-2.0-OpenSSH\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"],
        [b"HTTP/1.1 000 OK\r\nContent-Length: 5\r\n\r\nabcde", SIZED],
        [b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 100_000],
        [b"HTTP/1.1 200 OK\r\nX-A: " + b"b" * 1_000_000],
        [b"HTTP/1.1 100 Continue\r\n\r\n" * 50_000],
        [CHUNKED[:-2] + b"X-A: " + b"b" * 1_000_000],
        [CHUNKED[:-5] + b"2;" + b"b" * 1_000_000],
    ],
    ids=[
        "no byte",
        "half a head",
        "half a body",
        "no last chunk",
        "no HTTP",
        "no chunk size",
        "no status",
        "no end of the head",
        "no end of a header",
        "no end of what comes before",
        "no end of a trailer",
        "no end of a chunk's size",
    ],
)
async def test_an_answer_that_is_not_whole_or_not_http_is_broken(start: Any, answer: list[Any]) -> None:
    worker = await start(answer)
    async with pool() as made:
        with pytest.raises(Broken):
            await asked(made, worker)


async def test_a_worker_that_changes_to_another_protocol_is_broken_and_no_fault_of_ours(start: Any) -> None:
    worker = await start([b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n...", SIZED])
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
    async with pool() as made:
        with pytest.raises(Broken, match="another protocol"):
            await asked(made, worker)
    assert faults == []


async def test_a_trailer_is_no_header_and_a_header_has_no_blanks_at_its_end(start: Any) -> None:
    worker = await start([CHUNKED.replace(b"X-A: 2", b"X-A: 2 \t")[:-2] + b"X-A: 3\r\n\r\n"])
    async with pool() as made:
        connection, body = await asked(made, worker)
        assert (connection.headers.getall("X-A"), body) == (["1", "2"], b"abcde")
        assert connection.reusable


async def test_a_stream_may_have_any_number_of_pieces_that_end_within_its_framing(start: Any) -> None:
    """The limit is of bytes that no body comes between."""
    pieces = [piece for _ in range(300) for piece in (b"1;" + b"x" * 1000 + b"\r\n", b"a\r\n")]
    worker = await start([CHUNKED.partition(b"3\r\n")[0], *pieces, b"0\r\n\r\n"])
    async with pool() as made:
        _, body = await asked(made, worker)
        assert body == b"a" * 300


async def test_an_answer_before_anything_was_asked_is_none() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SIZED)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    origin = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, pool() as made:
        connection = await made.acquire(origin, 1.0)
        while connection.alive:
            await asyncio.sleep(0.01)
        connection.send(request_head("GET", origin, "/x", [], None))
        with pytest.raises(Broken):
            await connection.head()


async def test_push_gives_bytes_on_as_they_come_and_stops_when_told(start: Any) -> None:
    worker = await start([CHUNKED[:-12], b"", CHUNKED[-12:]])
    taken: list[bytes] = []

    def take(data: bytes) -> bool:
        taken.append(data)
        return len(taken) != 1

    async with pool() as made:
        connection = await made.acquire(worker.origin, 1.0)
        connection.send(request_head("POST", worker.origin, "/x", [], 2), b"{}")
        await connection.head()
        assert await connection.push(take) is False
        assert await connection.push(take) is True
        assert await connection.push(take) is True
    assert b"".join(taken) == b"abcde"


@pytest.mark.parametrize("answer", [CHUNKED[:-5], CHUNKED, SIZED, UNTIL_CLOSE])
async def test_what_push_is_told_by_its_taker_is_raised(start: Any, answer: bytes) -> None:
    """It closes the connection, which is not taken for the end of an answer."""
    worker = await start([answer])

    def take(data: bytes) -> bool:
        raise RuntimeError("enough")

    async with pool() as made:
        connection = await made.acquire(worker.origin, 1.0)
        connection.send(request_head("POST", worker.origin, "/x", [], 2), b"{}")
        with pytest.raises(RuntimeError, match="enough"):
            await connection.push(take)
        assert not connection.reusable


async def test_a_reader_that_lags_stops_the_worker_and_loses_nothing(start: Any) -> None:
    size = 3_000_000
    worker = await start([b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size, b"x" * size])
    async with pool() as made:
        connection = await made.acquire(worker.origin, 1.0)
        connection.send(request_head("POST", worker.origin, "/x", [], 2), b"{}")
        await connection.head()
        await asyncio.sleep(0.05)
        held = await connection.read()
        total = len(held)
        while part := await connection.read():
            total += len(part)
    assert (total, len(held) < size) == (size, True)


# What a server may write of one chunk: sizes in upper case, with zeros before them, with an extension.
FRAMINGS = [b"%x\r\n%b\r\n", b"%X\r\n%b\r\n", b"0%x\r\n%b\r\n", b"%x;a=b\r\n%b\r\n"]
CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
# Some look like chunks, or like the end of one.
LOOKALIKE = b"1f\r\n%b\r\n" % (b"y" * 31)
PAYLOADS = [b"a", b"\r\n", b"0\r\n\r\n", LOOKALIKE, b"\r\n" + LOOKALIKE, b"x" * 255, b"x" * 256, b"x" * 4096]


@given(
    st.lists(st.tuples(st.sampled_from(FRAMINGS), st.sampled_from(PAYLOADS), st.booleans()), max_size=8),
    st.lists(st.integers(1, 300), max_size=10),
    st.booleans(),
)
def test_chunks_are_the_same_in_whatever_reads_they_come(
    chunks: list[tuple[bytes, bytes, bool]], cuts: list[int], cut_anywhere: bool
) -> None:
    reads = [CHUNKED_HEAD]
    for framing, payload, apart in chunks:
        framed = framing % (len(payload), payload)
        size_line = framed[: framed.index(b"\n") + 1]
        reads += [size_line, payload, b"\r\n"] if apart else [framed]
    reads.append(b"0\r\n\r\n")
    if cut_anywhere:
        raw, reads = b"".join(reads), []
        for cut in cuts:
            reads.append(raw[:cut])
            raw = raw[cut:]
        reads.append(raw)
    assert pushed(reads) == (b"".join(payload for _, payload, _ in chunks), True)


def test_a_size_that_came_in_part_is_not_taken_for_another() -> None:
    payload = LOOKALIKE[len(b"1f\r\n") :].ljust(0x11F, b"z")
    framed = b"11f\r\n%b\r\n" % payload
    reads = [CHUNKED_HEAD, b"1\r\na\r\n1", framed[1 : 1 + len(LOOKALIKE)], framed[1 + len(LOOKALIKE) :], b"0\r\n\r\n"]
    assert pushed(reads) == (b"a" + payload, True)


def pushed(reads: list[bytes]) -> tuple[bytes, bool]:
    """Return what is given on of an answer that comes in these reads, and whether that was all."""
    made, got = Connection(asyncio.new_event_loop()), bytearray()
    try:
        made.connection_made(Mute())
        made.send(b"", b"")
        made._push = lambda data: got.extend(data) is None
        for read in filter(None, reads):
            made.data_received(read)
        return bytes(got), made.complete
    finally:
        made.loop.close()


class Mute(asyncio.Transport):
    """Takes what is written."""

    def write(self, data: Any) -> None: ...

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0
