"""Clients that take their time: nothing piles up for them, and one that takes nothing is hung up (H7, S27)."""

import asyncio
import socket
import tracemalloc
import zlib
from contextlib import asynccontextmanager

import pytest

from tests.bounds import HANG_S
from tests.flows.wire import head, post

CHAT = "/v1/chat/completions"
OFFERED = 64 * 2**20
# What the kernel may hold on the way, worker to coordinator and coordinator to client, and a megabyte of ours.
HELD = 24 * 2**20
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"x" * 16000 + b'"}}]}\n\n'


class Firehose:
    """A worker that streams as fast as it is let.

    Attributes:
        sent: bytes that its socket took.
        cut: it was hung up before its end.
    """

    def __init__(self):
        self.url = ""
        self.sent = 0
        self.cut = asyncio.Event()
        self.rest = OFFERED

    async def serve(self, reader, writer):
        try:
            request = await reader.readuntil(b"\r\n\r\n")
            if request.startswith(b"GET"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                return
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
            while self.sent < self.rest:
                writer.write(EVENT)
                await writer.drain()
                self.sent += len(EVENT)
            writer.write(b"data: [DONE]\n\n")
        except (ConnectionError, asyncio.IncompleteReadError):
            self.cut.set()
        finally:
            writer.close()


@pytest.fixture
async def firehose(stack):
    hose = Firehose()
    server = await asyncio.start_server(hose.serve, "127.0.0.1", 0)
    stack.callback(server.close)
    hose.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    return hose


@pytest.fixture
def fronted(coordinator, fleet, firehose):
    """``await fronted(write_stall_timeout=..)``: the firehose is the decode worker."""

    async def start(**server):
        return await coordinator(fleet, "alone", pools={"decode": {"endpoints": [firehose.url]}}, server=server)

    return start


@asynccontextmanager
async def small_client(url, receive_buffer=4096):
    """Connect by hand, with a receive buffer that is soon full."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.setblocking(False)
        host, _, port = url.removeprefix("http://").partition(":")
        await loop.sock_connect(client, (host, int(port)))
        yield client


async def is_hung_up(client):
    """Read to the end, which must come, proper or not; return how much came before it."""
    loop, size = asyncio.get_running_loop(), 0
    try:
        while piece := await asyncio.wait_for(loop.sock_recv(client, 2**20), HANG_S):
            size += len(piece)
    except ConnectionError:
        pass
    return size


async def test_a_client_that_takes_nothing_is_hung_up_and_its_worker_freed(fronted, firehose, eventually):
    """S27: the worker is paused long before its end, and then its connection is closed."""
    at = await fronted(write_stall_timeout="400ms")
    async with small_client(at.url) as client:
        await asyncio.get_running_loop().sock_sendall(client, post(CHAT, b'{"model":"m","messages":[],"stream":true}'))
        await asyncio.wait_for(firehose.cut.wait(), HANG_S)
        assert await is_hung_up(client) < HELD
    assert firehose.sent < HELD
    await eventually(lambda: not at.in_flight())
    assert await at.count("coordinator_requests_total", outcome="client_stalled") == 1


async def test_a_worker_is_paused_while_its_client_takes_nothing(fronted, firehose, eventually):
    """Without a limit: what is on the way stays what it is, however long it takes."""
    at = await fronted(write_stall_timeout=0)
    async with small_client(at.url) as client:
        await asyncio.get_running_loop().sock_sendall(client, post(CHAT, b'{"model":"m","messages":[],"stream":true}'))
        await eventually(lambda: firehose.sent)
        sent = -1
        while sent != firehose.sent:
            sent = firehose.sent
            await asyncio.sleep(0.3)
        assert 0 < sent < HELD
        assert not firehose.cut.is_set()
    await eventually(firehose.cut.is_set)
    assert await at.count("coordinator_requests_total", outcome="client_gone") == 1


async def test_a_client_that_is_slow_and_steady_gets_all_of_it(fronted, firehose):
    """The whole takes several times the limit, and no piece of it does.

    The kernel takes more of an answer only when a third of its own buffer, megabytes on loopback, has gone out.
    """
    at = await fronted(write_stall_timeout="700ms")
    loop = asyncio.get_running_loop()
    firehose.rest, size, begun = 24 * 2**20, 0, loop.time()
    async with small_client(at.url, receive_buffer=2**18) as client:
        request = post(CHAT, b'{"model":"m","messages":[],"stream":true}', "Connection: close")
        await loop.sock_sendall(client, request)
        while piece := await asyncio.wait_for(loop.sock_recv(client, 2**17), HANG_S):
            size += len(piece)
            await asyncio.sleep(0.006)
    assert loop.time() - begun > 1
    assert size > firehose.rest
    assert await at.count("coordinator_requests_total", outcome="ok") == 1


async def test_a_whole_answer_that_nobody_takes_is_given_up_as_well(coordinator, fleet, scripted, eventually):
    """It would have 120 s as a whole; taking nothing ends it earlier."""
    large = scripted.json({"choices": [{"index": 0, "message": {"content": "x" * (12 * 2**20)}}]})
    worker = await scripted(large)
    at = await coordinator(
        fleet, "alone", pools={"decode": {"endpoints": [worker.url]}}, server={"write_stall_timeout": "300ms"}
    )
    async with small_client(at.url) as client:
        await asyncio.get_running_loop().sock_sendall(client, post(CHAT, b'{"model":"m","messages":[]}'))
        await eventually(lambda: at.front.in_flight)
        await eventually(lambda: not at.front.in_flight)
        assert await is_hung_up(client) < 12 * 2**20
    assert await at.count("coordinator_requests_total", outcome="client_stalled") == 1


async def test_a_whole_answer_that_is_not_taken_in_its_time_is_not_kept_for_its_client(
    coordinator, scripted, fleet, eventually
):
    """Also where a client may take nothing for as long as it likes."""
    large = scripted.json({"choices": [{"index": 0, "message": {"content": "x" * (12 * 2**20)}}]})
    worker = await scripted(large)
    server = {"write_stall_timeout": 0, "write_timeout": "300ms"}
    at = await coordinator(fleet, "alone", pools={"decode": {"endpoints": [worker.url]}}, server=server)
    async with small_client(at.url) as client:
        await asyncio.get_running_loop().sock_sendall(client, post(CHAT, b'{"model":"m","messages":[]}'))
        await eventually(lambda: at.app.server.connections)
        await eventually(lambda: not at.app.server.connections)
        assert await is_hung_up(client) < 12 * 2**20
    assert await at.count("coordinator_requests_total", outcome="client_stalled") == 1


@pytest.fixture
async def quick(coordinator, fleet):
    """A coordinator with little patience for heads, and none needed for anything else."""
    return await coordinator(fleet, "alone", server={"read_header_timeout": "200ms", "idle_timeout": "1h"})


@pytest.mark.parametrize(
    "sent", [b"", b"G", b"GET /healthz HTTP/1.1\r\nHost: a\r\n", head("/healthz", method="GET")[:-1]]
)
async def test_a_head_that_does_not_come_to_its_end_is_hung_up(quick, sent):
    loop = asyncio.get_running_loop()
    async with small_client(quick.url) as client:
        begun = loop.time()
        await loop.sock_sendall(client, sent)
        assert await is_hung_up(client) == 0
    assert loop.time() - begun > 0.15


async def test_a_head_that_comes_byte_by_byte_has_one_limit_for_all_of_it(quick):
    """Slowloris: a byte now and then buys no time."""
    loop = asyncio.get_running_loop()
    async with small_client(quick.url) as client:
        with pytest.raises(ConnectionError):
            for byte in head("/healthz", "X-Long: " + "x" * 200, method="GET"):
                await loop.sock_sendall(client, bytes((byte,)))
                await asyncio.sleep(0.02)


async def test_the_limit_holds_for_the_second_head_of_a_connection_too(quick):
    loop, request = asyncio.get_running_loop(), head("/healthz", method="GET")
    async with small_client(quick.url) as client:
        await loop.sock_sendall(client, request)
        assert b"200 OK" in await loop.sock_recv(client, 2**16)
        await asyncio.sleep(0.3)  # longer than a head may take: between requests there is no head to wait for
        begun = loop.time()
        await loop.sock_sendall(client, request[:30])
        assert await is_hung_up(client) == 0
    assert loop.time() - begun > 0.15


async def test_a_connection_without_a_request_is_kept_for_so_long_and_no_longer(coordinator, fleet):
    quick = await coordinator(fleet, "alone", server={"idle_timeout": "1s"})
    loop, request = asyncio.get_running_loop(), head("/healthz", method="GET")
    async with small_client(quick.url) as client:
        for _ in range(3):
            await loop.sock_sendall(client, request)
            assert b"200 OK" in await loop.sock_recv(client, 2**16)
            await asyncio.sleep(0.4)
        assert await is_hung_up(client) == 0


async def test_the_limit_of_a_head_is_none_for_the_request_behind_it(quick, fleet):
    """Its body has a limit of its own, and its answer none."""
    fleet.decode.behave.first_byte_s = 0.4
    assert (await quick.chat()).status == 200


async def test_of_a_stream_that_came_packed_no_more_is_inflated_than_its_client_takes(says, scripted):
    """A few hundred kilobytes, which one read may bring, are 64 MB."""
    packer = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
    packed = b"".join(packer.compress(EVENT) for _ in range(OFFERED // len(EVENT) + 1))
    packed += packer.compress(b"data: [DONE]\n\n") + packer.flush()
    assert len(packed) < 512 * 1024
    at, _ = await says(scripted.sse(packed, head="Content-Encoding: gzip\r\n"))
    size = 0
    async with at.open(CHAT, {"model": "m", "messages": [], "stream": True}) as live:
        tracemalloc.start()
        try:
            while piece := await live.pull(2**18):
                size += len(piece)
                if piece.endswith(b"\r\n0\r\n\r\n"):
                    break
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert (size > OFFERED, peak < 8 * 2**20) == (True, True)
