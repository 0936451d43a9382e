"""Routes of the local worker that are passed on: only those that are listed, and each byte as it is."""

import asyncio
import gzip
import logging

import pytest
from aiohttp import web

from coordinator.config import ConfigError
from tests.bounds import HANG_S
from tests.flows.wire import chunked, connect, head, post

LISTED = ["POST /tokenize", "GET /version", "POST /v1/embeddings", "GET /stream", "POST /echo"]


class Local:
    """A worker with routes of its own; the body of each request is read part by part.

    Attributes:
        seen: method, path with query, headers and body of each request.
        parts: what has been read of the body that is being sent.
        go_on: lets a stream go on.
        cut: the stream breaks off instead of going on.
    """

    def __init__(self):
        self.seen, self.parts, self.go_on, self.cut = [], [], asyncio.Event(), False
        self.left = asyncio.Event()

    async def echo(self, request):
        async for part in request.content.iter_any():
            self.parts.append(part)
        self.seen.append((request.method, request.path_qs, request.headers, b"".join(self.parts)))
        self.parts = []
        headers = {"X-Worker": "yes", "Connection": "X-Hop", "X-Hop": "1", "Set-Cookie": "a=b", "Content-Type": "a/b"}
        return web.Response(status=int(request.query.get("status", 200)), body=b"echo", headers=headers)

    async def stream(self, request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.left.set()
            raise
        if self.cut:
            request.transport.abort()
            return response
        await response.write(b"data: 2\n\n")
        return response


async def healthy(request):
    return web.Response()


@pytest.fixture
async def local(aiohttp_server):
    worker, app = Local(), web.Application(client_max_size=0)
    app.add_routes([web.route("*", path, worker.echo) for path in ("/tokenize", "/v1/embeddings", "/echo", "/sleep")])
    app.add_routes([web.get("/version", worker.echo), web.get("/stream", worker.stream), web.get("/health", healthy)])
    server = await aiohttp_server(app)
    worker.url = f"http://127.0.0.1:{server.port}"
    return worker


@pytest.fixture
def sidecar(coordinator, fleet, local):
    async def start(pool=None, **server):
        own = {"proxied_routes": LISTED, **server}
        steps = {"prefill": None}
        decode = {"endpoints": [local.url], **(pool or {})}
        at = await coordinator(fleet, "alone", steps=steps, pools={"decode": decode}, server=own)
        local.seen.clear()  # what readiness asked
        return at

    return start


async def test_a_listed_route_is_passed_on_as_it_is(sidecar, local):
    at = await sidecar()
    async with connect(at.url) as wire:
        await wire.send(post("/tokenize?a=%20b&c", b'{"x":  1}', "X-Request-Id: me", "Accept: x/y", "Connection: X-My"))
        got = await wire.answer()
    assert (got.status, got.raw, got.headers["X-Worker"]) == (200, b"echo", "yes")
    assert (got.headers["Content-Type"], got.headers["X-Request-Id"]) == ("a/b", "me")
    [(method, path, headers, body)] = local.seen
    assert (method, path, body) == ("POST", "/tokenize?a=%20b&c", b'{"x":  1}')
    assert (headers["Content-Type"], headers["Content-Length"], headers["Accept"]) == ("application/json", "9", "x/y")
    assert headers["X-Request-Id"] == "me"
    assert await at.count("coordinator_requests_total", route="proxied", outcome="ok") == 1


async def test_what_belongs_to_a_connection_or_steers_a_worker_does_not_pass(sidecar, local):
    """H22: nor does a cookie that a worker sets."""
    at = await sidecar()
    sent = ("X-Data-Parallel-Rank: 3", "x-prefiller-host-port: 10.0.0.1:80", "EPP-Profile: decode", "TE: trailers")
    async with connect(at.url) as wire:
        await wire.send(post("/echo", b"{}", "Keep-Alive: 5", "Connection: X-Mine", "X-Mine: 1", *sent))
        got = await wire.answer()
    names = {name.lower() for name in local.seen[0][2]}
    assert not names & {"x-data-parallel-rank", "x-prefiller-host-port", "epp-profile", "te", "keep-alive", "x-mine"}
    assert not {name.lower() for name in got.headers} & {"x-hop", "connection", "set-cookie"}


@pytest.mark.parametrize("path", ["/sleep", "/metrics/", "/tokenize/", "/v1/embeddings/x", "/echo%2F", "//echo"])
async def test_a_route_that_is_not_listed_is_a_404(sidecar, local, path):
    """H24, with other routes listed."""
    at = await sidecar()
    for raw in (post(path, b"{}"), head(path, method="GET")):
        async with connect(at.url) as wire:
            await wire.send(raw)
            assert (await wire.answer()).status == 404
    assert local.seen == []


async def test_another_method_of_a_listed_path_is_a_405(sidecar, local):
    at = await sidecar()
    async with connect(at.url) as wire:
        await wire.send(head("/tokenize", method="GET"))
        got = await wire.answer()
    assert (got.status, got.headers["Allow"]) == (405, "POST")
    assert local.seen == []


async def test_an_answer_passes_while_it_comes(sidecar, local):
    at = await sidecar()
    async with at.open("/stream", method="GET") as live:
        await live.head()
        assert await live.event() == b"data: 1"
        local.go_on.set()
        assert (await live.rest()).raw == b"data: 1\n\ndata: 2\n\n"
        assert live.whole


async def test_an_answer_that_breaks_off_does_not_look_whole(sidecar, local):
    at = await sidecar()
    local.cut = True
    async with at.open("/stream", method="GET") as live:
        await live.head()
        await live.event()
        local.go_on.set()
        got = await live.rest()
    assert not got.whole
    assert await at.count("coordinator_requests_total", route="proxied", outcome="stream_broken") == 1


@pytest.fixture
def says(coordinator, fleet, scripted):
    """Start a coordinator whose local worker answers the one listed route with these writes."""

    async def start(*writes):
        worker = await scripted(list(writes))
        pools = {"decode": {"endpoints": [worker.url]}}
        server = {"proxied_routes": ["POST /echo"]}
        return await coordinator(fleet, "alone", steps={"prefill": None}, pools=pools, server=server)

    return start


CHUNK = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"


@pytest.mark.parametrize("broken", [b"zz\r\n", b"-1\r\n", b"3\r\nabcdef\r\n"])
async def test_an_answer_whose_framing_is_wrong_does_not_look_whole(says, broken):
    go_on = asyncio.Event()
    at = await says(CHUNK, go_on, broken)
    async with at.open("/echo", {"a": 1}) as live:
        await live.head()
        assert await live.read() == b"abc"
        go_on.set()
        got = await live.rest()
    assert (got.status, got.raw[:3], got.whole) == (200, b"abc", False)
    assert await at.count("coordinator_requests_total", route="proxied", outcome="stream_broken") == 1


@pytest.mark.parametrize("status", [b"101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x", b"099 What"])
async def test_a_status_that_is_no_answer_does_not_pass(says, status):
    at = await says(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\n\r\n")
    assert (await at.post("/echo", {"a": 1})).status == 502


async def test_a_client_that_leaves_frees_the_worker(sidecar, local, eventually):
    at = await sidecar()
    async with at.open("/stream", method="GET") as live:
        await live.head()
        live.cut()
        async with asyncio.timeout(HANG_S):
            await local.left.wait()
    await eventually(lambda: not at.in_flight())
    assert await at.count("coordinator_requests_total", route="proxied", outcome="client_gone") == 1


async def test_a_body_passes_while_it_comes(sidecar, local, eventually):
    """A file that is uploaded is not held in memory first."""
    at = await sidecar()
    async with connect(at.url) as wire:
        await wire.send(head("/echo", "Content-Type: a/b", "Transfer-Encoding: chunked"), b"3\r\nabc\r\n")
        await eventually(lambda: local.parts == [b"abc"])
        await wire.send(chunked(b"def"))
        assert (await wire.answer()).status == 200
    assert local.seen[0][3] == b"abcdef"


async def test_a_compressed_body_arrives_in_plain(sidecar, local):
    at = await sidecar()
    raw = gzip.compress(b"x" * 5000)
    async with connect(at.url) as wire:
        await wire.send(post("/echo", raw, "Content-Encoding: gzip"))
        assert (await wire.answer()).status == 200
        await wire.send(post("/echo", raw, "Content-Encoding: zstd"))
        assert (await wire.answer()).status == 415
        await wire.send(post("/echo", raw, "Content-Encoding: gzip", "Content-Encoding: gzip"))
        assert (await wire.answer()).status == 415
        await wire.send(post("/echo", raw, "Content-Encoding: identity", "Content-Encoding: gzip"))
        assert (await wire.answer()).status == 200
    for _, _, headers, body in local.seen:
        assert (body, "Content-Encoding" in headers) == (b"x" * 5000, False)
    assert len(local.seen) == 2


async def test_a_body_that_is_too_large_or_too_slow_is_refused(sidecar, local):
    """By its length at once; in chunks, when it has become so."""
    at = await sidecar(max_request_body_size=1, read_timeout="300ms")
    async with connect(at.url) as wire:
        await wire.send(head("/echo", "Content-Length: 2000000"))
        assert (await wire.answer()).status == 413
    async with connect(at.url) as wire:
        await wire.send(head("/echo", "Transfer-Encoding: chunked"), chunked(b"x" * 2**20, b"x"))
        assert (await wire.answer()).status == 413
    async with connect(at.url) as wire:
        await wire.send(head("/echo", "Content-Length: 10"), b"abc")
        assert (await wire.answer()).status == 408
    assert local.seen == []


@pytest.mark.parametrize(("status", "outcome"), [(404, "rejected"), (503, "leg_failed"), (204, "ok"), (302, "ok")])
async def test_a_status_passes(sidecar, local, status, outcome):
    """A redirect too: it is not followed."""
    at = await sidecar()
    assert (await at.post(f"/echo?status={status}", {})).status == status
    assert await at.count("coordinator_requests_total", route="proxied", outcome=outcome) == 1


async def test_a_worker_that_is_not_there_is_a_503(sidecar, local, coordinator, fleet):
    at = await coordinator(
        fleet,
        "alone",
        steps={"prefill": None},
        pools={"decode": {"endpoints": ["http://127.0.0.1:9"]}},
        server={"proxied_routes": LISTED},
        ready=False,
    )
    got = await at.get("/version")
    assert (got.status, got.headers["Retry-After"]) == (503, "1")
    assert got.error["message"].startswith("proxied route: the worker cannot be reached")


async def test_keys_hold_for_them_too_and_ours_goes_in_place_of_the_clients(sidecar, local, excuse):
    excuse("in_flight", "the metrics page wants a key too")
    at = await sidecar(pool={"api_key": "workers"}, api_keys=["clients"])
    assert (await at.get("/version")).status == 401
    assert (await at.get("/version", ("X-Api-Key", "clients"))).status == 200
    [(_, _, headers, _)] = local.seen
    assert (headers["Authorization"], "X-Api-Key" in headers) == ("Bearer workers", False)


async def test_a_post_waits_for_its_place_like_any_other_request(sidecar, local, eventually):
    at = await sidecar(max_concurrency=1, queue_size=0)
    async with at.open("/stream", method="GET") as looking, connect(at.url) as wire:
        await looking.head()
        await wire.send(head("/echo", "Content-Length: 2"), b"x")
        await eventually(lambda: local.parts)
        assert (await at.post("/echo", {})).status == 429
        await wire.send(b"y")
        assert (await wire.answer()).status == 200
        local.go_on.set()
        await looking.rest()


async def test_a_dangerous_route_is_passed_on_when_it_is_named_and_warned_of(sidecar, local, caplog):
    with caplog.at_level(logging.WARNING, "coordinator"):
        at = await sidecar(proxied_routes=["POST /sleep"])
    assert [record.getMessage() for record in caplog.records] == [
        "server.proxied_routes: POST /sleep stops the worker's work, and whoever may ask here may call it"
    ]
    assert (await at.post("/sleep", {})).status == 200


# (pools.decode, routes, the sentence)
REFUSED = [
    ({"endpoints": ["http://a", "http://b"]}, "they are those of one worker"),
    ({"endpoints": None, "dns": "a:80"}, "they are those of one worker"),
    ({"endpoints": None, "header": "x-a", "allow": ["10.0.0.0/8"]}, "they are those of one worker"),
]


@pytest.mark.parametrize(("pool", "sentence"), REFUSED)
async def test_they_are_those_of_one_worker_that_is_written_down(coordinator, fleet, pool, sentence):
    with pytest.raises(ConfigError, match=rf"^configuration: server\.proxied_routes: {sentence}"):
        await coordinator(
            fleet, "alone", steps={"prefill": None}, pools={"decode": pool}, server={"proxied_routes": LISTED}
        )


async def test_the_workers_metrics_need_another_place_for_our_own(sidecar, local, unused_tcp_port):
    with pytest.raises(ValueError, match="write metrics_port to have it elsewhere"):
        await sidecar(proxied_routes=["GET /metrics"])
