"""Media is fetched from real servers on loopback, which a rule of this module calls public: 127.0.0.1 alone.

Every other address is judged as in production. 127.0.0.2, where a server listens as well, stands for what is inside.
"""

from __future__ import annotations

import asyncio
import gzip
import re
import socket
import ssl
from contextlib import AsyncExitStack
from ipaddress import IPv4Address, ip_address, ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.fetch import USER_AGENT, HttpMediaFetcher
from coordinator.security import addresses
from coordinator.step import Fetched, FetchFailed, FetchLimits
from envelope.media_types import Kind
from tests.bounds import HANG_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from coordinator.security.addresses import Address
    from envelope.media_url import MediaUrl

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
JPEG = b"\xff\xd8\xff\xe0" + bytes(64)
WAV = b"RIFF\x24\x00\x00\x00WAVEfmt " + bytes(64)
MP4 = b"\x00\x00\x00\x18ftypisom\x00\x00\x02\x00isomiso2mp41"
PDF = b"%PDF-1.7\n"
LIMITS = FetchLimits(timeout_s=5.0, max_bytes=2**20)
PUBLIC, INSIDE = "127.0.0.1", "127.0.0.2"
PEM = Path(__file__).resolve().parents[1] / "data" / "tls" / "media.test.pem"

NOWHERE = "its host has no address that media may be fetched from"


def refuses(address: Address, *, allow_private: bool) -> bool:
    return str(address) != PUBLIC and addresses.refused(address, allow_private=allow_private)


class Names:
    """A resolver of which a test says the answers, and which counts the questions.

    ``answers`` has for each host one list of addresses per look-up; the last one is given again.
    """

    def __init__(self) -> None:
        self.answers: dict[str, list[list[str]]] = {}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[Address]:
        self.asked.append(host)
        lists = self.answers.get(host)
        if lists is None:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [ip_address(text) for text in (lists.pop(0) if len(lists) > 1 else lists[0])]


class Origin:
    """A server that records what it is asked and answers by path."""

    def __init__(self) -> None:
        self.asked: list[web.BaseRequest] = []
        self.answers: dict[str, Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]] = {}
        self.port = 0
        self.hung_up = asyncio.Event()

    @property
    def paths(self) -> list[str]:
        return [request.raw_path for request in self.asked]

    def serve(self, path: str, data: bytes = PNG, media_type: str | None = "image/png", **options: Any) -> None:
        headers = {"Content-Type": media_type} if media_type else {}
        headers |= options.pop("headers", {})

        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            return web.Response(body=data, headers=headers, **options)

        self.answers[path] = answer

    def redirect(self, path: str, to: str, status: int = 302, **headers: str) -> None:
        self.serve(path, b"", None, status=status, headers={"Location": to, **headers})

    def pieces(self, path: str, *pieces: bytes | float, **headers: str) -> None:
        """Answer piece by piece; a number is a wait in seconds."""

        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "image/png", **headers})
            try:
                if pieces and isinstance(pieces[0], bytes):
                    await response.prepare(request)
                for piece in pieces:
                    if isinstance(piece, float):
                        await asyncio.sleep(piece)
                    else:
                        await response.write(piece)
            except (ConnectionError, asyncio.CancelledError):
                self.hung_up.set()
                raise
            return response

        self.answers[path] = answer

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        self.asked.append(request)
        return await self.answers[request.raw_path](request)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def listening(stack: AsyncExitStack, host: str, port: int = 0, tls: ssl.SSLContext | None = None) -> Origin:
    origin = Origin()
    runner = web.ServerRunner(web.Server(origin, handler_cancellation=True), shutdown_timeout=0.1)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, host, port, ssl_context=tls).start()
    origin.port = runner.addresses[0][1]
    return origin


@pytest.fixture
async def origin(stack: AsyncExitStack) -> Origin:
    """A server on the address that is public here."""
    return await listening(stack, PUBLIC)


@pytest.fixture
async def inside(stack: AsyncExitStack, origin: Origin) -> AsyncIterator[Origin]:
    """A server on the same port of an address that is refused; nobody may ask it anything."""
    server = await listening(stack, INSIDE, origin.port)
    yield server
    assert server.asked == []


@pytest.fixture
def names() -> Names:
    names = Names()
    names.answers = {"media.test": [[PUBLIC]], "other.test": [[PUBLIC]], "inside.test": [[INSIDE]]}
    return names


@pytest.fixture
async def fetcher(names: Names) -> AsyncIterator[HttpMediaFetcher]:
    fetcher = HttpMediaFetcher(names, refuses)
    await fetcher.start()
    yield fetcher
    await fetcher.close()


@pytest.fixture
def fetch(fetcher: HttpMediaFetcher, origin: Origin) -> Callable[..., Awaitable[Fetched]]:
    """``await fetch("/x")`` fetches a path of the public server, or another URL."""

    async def ask(url: str, kind: Kind = Kind.IMAGE, limits: FetchLimits = LIMITS) -> Fetched:
        return await fetcher.fetch(url if "://" in url else f"http://media.test:{origin.port}{url}", kind, limits)

    return ask


async def failure(asking: Awaitable[Fetched]) -> str:
    """Return why a fetch failed; no reason holds an address."""
    with pytest.raises(FetchFailed) as caught:
        await asking
    assert not re.search(r"\d+\.\d+\.\d+\.\d+|::|\.test", str(caught.value).replace("192.0.2.1", ""))
    return str(caught.value)


# What is fetched.


@pytest.mark.parametrize(
    ("kind", "data", "declared", "media_type"),
    [
        (Kind.IMAGE, PNG, "image/png", "image/png"),
        (Kind.IMAGE, JPEG, "image/png", "image/jpeg"),
        (Kind.IMAGE, JPEG, "IMAGE/Anything; x=y", "image/jpeg"),
        (Kind.IMAGE, PNG, "application/octet-stream", "image/png"),
        (Kind.IMAGE, PNG, "binary/octet-stream", "image/png"),
        (Kind.IMAGE, PNG, None, "image/png"),
        (Kind.AUDIO, WAV, "audio/x-wav", "audio/wav"),
        (Kind.AUDIO, MP4, "video/mp4", "audio/mp4"),
        (Kind.VIDEO, MP4, "video/mp4", "video/mp4"),
        (Kind.DOCUMENT, PDF, "application/pdf", "application/pdf"),
    ],
)
async def test_media_is_what_it_begins_like(
    origin: Origin, fetch: Any, kind: Kind, data: bytes, declared: str | None, media_type: str
) -> None:
    origin.serve("/x?y=%2F", data, declared)
    assert await fetch("/x?y=%2F", kind) == Fetched(media_type, data)


@pytest.mark.parametrize(
    ("data", "declared", "sentence"),
    [
        (b"<!doctype html><html>", "text/html", "what its server sent is not called an image"),
        (PNG, "text/html; charset=utf-8", "what its server sent is not called an image"),
        (b"<svg/>", "image/svg+xml", "what its server sent is not called an image"),
        (MP4, "video/mp4", "what its server sent is not called an image"),
        (b"<svg/>", "image/png", "what its server sent is no PNG, JPEG, GIF, WebP, BMP, TIFF, AVIF or HEIC image"),
        (b"<html>", "image/png", "what its server sent is no PNG, JPEG, GIF, WebP, BMP, TIFF, AVIF or HEIC image"),
        (MP4, "image/png", "what its server sent is no PNG, JPEG, GIF, WebP, BMP, TIFF, AVIF or HEIC image"),
        (b"", "image/png", "what its server sent is no PNG, JPEG, GIF, WebP, BMP, TIFF, AVIF or HEIC image"),
    ],
)
async def test_what_is_no_media_is_refused(
    origin: Origin, fetch: Any, data: bytes, declared: str, sentence: str
) -> None:
    origin.serve("/x", data, declared)
    assert await failure(fetch("/x")) == sentence


@pytest.mark.parametrize("status", [201, 204, 206, 300, 304, 401, 403, 404, 410, 429, 500, 503])
async def test_only_a_200_is_an_answer(origin: Origin, fetch: Any, status: int) -> None:
    origin.serve("/x", b"secret" if status not in (204, 304) else b"", status=status)
    assert await failure(fetch("/x")) == f"its server answered {status}"


async def test_nothing_of_the_client_goes_with_it(origin: Origin, fetch: Any) -> None:
    origin.serve("/x")
    await fetch("/x")
    (request,) = origin.asked
    assert dict(request.headers) == {
        "Host": f"media.test:{origin.port}",
        "User-Agent": USER_AGENT,
        "Accept": "*/*",
        "Accept-Encoding": "identity",
    } | ({"Connection": "close"} if "Connection" in request.headers else {})


async def test_a_connection_is_used_once(origin: Origin, fetch: Any) -> None:
    origin.serve("/x")
    await fetch("/x")
    async with asyncio.timeout(HANG_S):
        while not all(request.transport is None for request in origin.asked):
            await asyncio.sleep(0.01)


# How much, and for how long.


async def test_more_than_the_limit_is_refused_by_its_declared_length(origin: Origin, fetch: Any) -> None:
    origin.pieces("/x", PNG, 9.0, **{"Content-Length": str(11 * 2**20)})
    assert await failure(fetch("/x", limits=FetchLimits(5.0, 10 * 2**20))) == "it is larger than 10 MB"


async def test_more_than_the_limit_is_refused_as_it_comes(origin: Origin, fetch: Any) -> None:
    origin.pieces("/x", PNG, *[bytes(2**20)] * 60)
    assert await failure(fetch("/x", limits=FetchLimits(5.0, 10 * 2**20))) == "it is larger than 10 MB"
    await asyncio.wait_for(origin.hung_up.wait(), HANG_S)


async def test_as_much_as_the_limit_is_taken(origin: Origin, fetch: Any) -> None:
    data = PNG + bytes(2**20 - len(PNG))
    origin.serve("/whole", data)
    origin.pieces("/pieces", data[:1000], data[1000:])
    for path in ("/whole", "/pieces"):
        assert (await fetch(path)).data == data
        assert await failure(fetch(path, limits=FetchLimits(5.0, 2**20 - 1))) == "it is larger than 0.999999 MB"


async def test_what_is_compressed_is_refused(origin: Origin, fetch: Any) -> None:
    """A megabyte of it may be a gigabyte."""
    origin.serve("/x", gzip.compress(PNG), headers={"Content-Encoding": "gzip"})
    assert await failure(fetch("/x")) == "its server sent it compressed, which was not asked for"
    origin.serve("/y", PNG, headers={"Content-Encoding": "Identity"})
    assert (await fetch("/y")).data == PNG


@pytest.mark.parametrize(
    "pieces", [(9.0,), (PNG, 9.0), (PNG, *[0.05, b"."] * 100)], ids=["no head", "no end", "slow drip"]
)
async def test_a_server_that_takes_too_long_is_given_up_in_time(origin: Origin, fetch: Any, pieces: Any) -> None:
    origin.pieces("/x", *pieces)
    assert await failure(fetch("/x", limits=FetchLimits(0.2, 2**20))) == "its server did not send it within 0.2 s"
    await asyncio.wait_for(origin.hung_up.wait(), HANG_S)


async def test_a_chain_of_slow_redirects_has_one_limit(origin: Origin, fetch: Any) -> None:
    async def slowly(request: web.BaseRequest) -> web.StreamResponse:
        await asyncio.sleep(0.1)
        return web.Response(status=302, headers={"Location": request.raw_path + "x"})

    origin.answers = {"/" + "x" * count: slowly for count in range(9)}
    assert await failure(fetch("/", limits=FetchLimits(0.25, 2**20))) == "its server did not send it within 0.25 s"
    assert len(origin.asked) <= 3


async def test_a_look_up_that_hangs_is_given_up_in_time(fetcher: HttpMediaFetcher) -> None:
    async def hang(host: str, port: int) -> Sequence[Address]:
        await asyncio.sleep(9)
        return []

    fetcher._lookup = hang
    asking = fetcher.fetch("http://media.test/", Kind.IMAGE, FetchLimits(0.1, 2**20))
    assert await failure(asking) == "its server did not send it within 0.1 s"


async def test_no_limit_is_no_limit(origin: Origin, fetch: Any) -> None:
    origin.pieces("/x", PNG, 0.05, b".")
    assert (await fetch("/x", limits=FetchLimits(None, 2**20))).data == PNG + b"."


async def test_whoever_cancels_closes_the_connection(origin: Origin, fetch: Any) -> None:
    origin.pieces("/x", PNG, 9.0)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(fetch("/x"))
        while not origin.asked:
            await asyncio.sleep(0.005)
        task.cancel()
    await asyncio.wait_for(origin.hung_up.wait(), HANG_S)


BROKEN = "the connection to its server broke, or what it sent is not HTTP"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\nContent-Type: image/png\r\n\r\n\x89PNG",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: image/png\r\n\r\n4\r\n\x89PNG\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: image/png\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 2**17 + b"\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
    ],
)
async def test_what_is_not_http_or_ends_early_is_a_failure(
    stack: AsyncExitStack, fetcher: HttpMediaFetcher, answer: bytes
) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await stack.enter_async_context(await asyncio.start_server(connected, PUBLIC, 0))
    url = f"http://media.test:{server.sockets[0].getsockname()[1]}/"
    assert await failure(fetcher.fetch(url, Kind.IMAGE, LIMITS)) == BROKEN


# Where to.


async def test_the_address_that_was_checked_is_the_one_connected_to(
    origin: Origin, inside: Origin, names: Names, fetch: Any
) -> None:
    """DNS that answers otherwise the second time is never asked a second time."""
    names.answers["media.test"] = [[PUBLIC], [INSIDE]]
    origin.serve("/x")
    assert (await fetch("/x")).data == PNG
    assert names.asked == ["media.test"]
    assert await failure(fetch("/x")) == NOWHERE
    assert len(origin.asked) == 1


async def test_each_redirect_is_looked_up_and_checked_anew(
    origin: Origin, inside: Origin, names: Names, fetch: Any
) -> None:
    names.answers["media.test"] = [[PUBLIC], [INSIDE]]
    origin.redirect("/x", "/y")
    assert await failure(fetch("/x")) == NOWHERE
    assert (names.asked, origin.paths) == (["media.test"] * 2, ["/x"])


@pytest.mark.parametrize(
    "found",
    [
        [INSIDE],
        [PUBLIC, INSIDE],
        [INSIDE, PUBLIC],
        [PUBLIC, "10.0.0.1"],
        [PUBLIC, "::1"],
        [PUBLIC, "fd00:ec2::254"],
        [PUBLIC] * 5 + ["169.254.169.254"],
        [],
    ],
)
async def test_a_name_with_any_address_that_is_refused_is_refused(
    origin: Origin, inside: Origin, names: Names, fetch: Any, found: list[str]
) -> None:
    names.answers["media.test"] = [found]
    assert await failure(fetch("/x")) == NOWHERE
    assert origin.asked == []


async def test_a_name_that_is_not_there_is_told_as_one_that_is_inside(
    inside: Origin, names: Names, fetch: Any, origin: Origin
) -> None:
    """Otherwise a client could list the names of the cluster."""
    assert await failure(fetch("http://nobody.test/")) == NOWHERE
    assert await failure(fetch(f"http://inside.test:{origin.port}/")) == NOWHERE
    assert names.asked == ["nobody.test", "inside.test"]


async def test_private_networks_are_let_through_by_the_flag_and_nothing_else_is(
    origin: Origin, inside: Origin, names: Names, fetch: Any
) -> None:
    private = FetchLimits(5.0, 2**20, allow_private=True)
    origin.serve("/x")
    names.answers["media.test"] = [[PUBLIC, "10.0.0.1"]]
    assert (await fetch("/x", limits=private)).data == PNG
    names.answers["media.test"] = [[PUBLIC, "100.64.0.1"]]
    assert await failure(fetch("/x", limits=private)) == NOWHERE
    assert await failure(fetch(f"http://inside.test:{origin.port}/x", limits=private)) == NOWHERE


LITERALS = [
    "0.0.0.0", "10.0.0.1", "100.64.0.1", "127.0.0.2", "169.254.169.254", "172.16.0.1", "192.0.2.1", "192.168.0.1",
    "198.18.0.1", "203.0.113.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "[::]", "[::1]", "[::127.0.0.1]",
    "[::ffff:127.0.0.1]", "[::ffff:10.0.0.1]", "[64:ff9b::127.0.0.1]", "[64:ff9b::a9fe:a9fe]", "[64:ff9b:1::1]",
    "[2002:7f00:1::]", "[2001:0:7f00:1::]", "[2001:db8::1]", "[fc00::1]", "[fd00:ec2::254]", "[fe80::1]", "[ff02::1]",
]  # fmt: skip


@pytest.mark.parametrize("host", LITERALS)
async def test_an_address_that_is_refused_is_refused_at_once_and_behind_a_redirect(
    origin: Origin, inside: Origin, names: Names, fetch: Any, host: str
) -> None:
    url = f"http://{host}:{origin.port}/x"
    assert await failure(fetch(url)) == NOWHERE
    origin.redirect("/to", url)
    assert await failure(fetch("/to")) == NOWHERE
    assert origin.paths == ["/to"]


@pytest.mark.parametrize("host", ["2130706434", "0177.0.0.2", "0x7f.2", "127.2", "１２７.2", "%31%32%37.0.0.2"])
async def test_another_spelling_of_an_address_is_refused_at_once_and_behind_a_redirect(
    origin: Origin, inside: Origin, names: Names, fetch: Any, host: str
) -> None:
    url = f"http://{host}:{origin.port}/x"
    assert (await failure(fetch(url))).startswith("its URL's host is ")
    origin.redirect("/to", url)
    assert (await failure(fetch("/to"))).startswith("its server redirects to something that is no valid")
    assert (origin.paths, names.asked) == (["/to"], ["media.test"])


async def test_a_spelling_that_is_an_address_after_all_is_judged_as_one(
    origin: Origin, inside: Origin, fetch: Any
) -> None:
    for host in ("１２７.０.０.２", "127。0。0。2", "127.0.0.2."):
        assert await failure(fetch(f"http://{host}:{origin.port}/x")) == NOWHERE
    origin.serve("/x")
    assert (await fetch(f"http://１２７.０.０.１:{origin.port}/x")).data == PNG
    assert origin.asked[0].headers["Host"] == f"127.0.0.1:{origin.port}"


async def test_the_next_address_is_tried_when_one_does_not_answer(
    origin: Origin, names: Names, fetcher: HttpMediaFetcher
) -> None:
    fetcher._refuses = lambda address, *, allow_private: address not in ip_network("127.0.0.0/30")
    names.answers["media.test"] = [["127.0.0.3", "127.0.0.1"]]
    origin.serve("/x")
    url = f"http://media.test:{origin.port}/x"
    assert (await fetcher.fetch(url, Kind.IMAGE, LIMITS)).data == PNG
    names.answers["media.test"] = [["127.0.0.3"]]
    assert await failure(fetcher.fetch(url, Kind.IMAGE, LIMITS)) == "its server cannot be reached"


async def test_only_the_allowed_hosts_are_asked_on_every_hop(origin: Origin, names: Names, fetch: Any) -> None:
    only = FetchLimits(5.0, 2**20, allowed_hosts=frozenset({"media.test", "inside.test"}))
    refusal = "its host is not one that media may be fetched from here"
    origin.serve("/x")
    assert (await fetch(f"http://MEDIA.test.:{origin.port}/x", limits=only)).data == PNG
    assert await failure(fetch(f"http://other.test:{origin.port}/x", limits=only)) == refusal
    assert await failure(fetch(f"http://sub.media.test:{origin.port}/x", limits=only)) == refusal
    origin.redirect("/to", f"http://other.test:{origin.port}/x")
    assert await failure(fetch("/to", limits=only)) == refusal
    assert names.asked == ["media.test"] * 2
    # The list adds a condition and takes none away.
    assert await failure(fetch(f"http://inside.test:{origin.port}/x", limits=only)) == NOWHERE


# Redirects.


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_followed_without_cookies(origin: Origin, names: Names, fetch: Any, status: int) -> None:
    origin.redirect("/x", f"http://other.test:{origin.port}/y", status, **{"Set-Cookie": "a=b; Domain=test"})
    origin.redirect("/y", "z?q", status, **{"Set-Cookie": "a=b"})
    origin.serve("/z?q")
    assert (await fetch("/x")).data == PNG
    assert origin.paths == ["/x", "/y", "/z?q"]
    assert names.asked == ["media.test", "other.test", "other.test"]
    assert [request.headers["Host"].split(":")[0] for request in origin.asked] == names.asked
    assert not any({"Cookie", "Referer", "Authorization"} & set(request.headers) for request in origin.asked)


async def test_five_redirects_are_followed_and_no_more(origin: Origin, fetch: Any) -> None:
    for count in range(1, 6):
        origin.redirect(f"/{count}", f"/{count - 1}")
    origin.serve("/0")
    assert (await fetch("/5")).data == PNG
    origin.redirect("/loop", "/loop")
    origin.asked.clear()
    assert await failure(fetch("/loop")) == "its server redirects more than 5 times"
    assert len(origin.asked) == 6


async def test_a_redirect_to_nowhere_is_a_failure(origin: Origin, fetch: Any) -> None:
    origin.serve("/x", b"", None, status=302)
    origin.redirect("/y", "ftp://media.test/")
    for path in ("/x", "/y"):
        assert await failure(fetch(path)) == "its server redirects to something that is no valid http(s) URL"


# TLS.


@pytest.fixture
async def secure(stack: AsyncExitStack) -> Origin:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(PEM)
    return await listening(stack, PUBLIC, tls=tls)


@pytest.fixture
async def trusting(names: Names) -> AsyncIterator[HttpMediaFetcher]:
    """A fetcher that trusts the certificate of media.test."""
    fetcher = HttpMediaFetcher(names, refuses, ssl.create_default_context(cafile=PEM))
    await fetcher.start()
    yield fetcher
    await fetcher.close()


async def test_a_certificate_is_held_against_the_name_and_not_the_address(
    secure: Origin, trusting: HttpMediaFetcher, fetcher: HttpMediaFetcher
) -> None:
    secure.serve("/x")
    assert (await trusting.fetch(f"https://media.test:{secure.port}/x", Kind.IMAGE, LIMITS)).data == PNG
    untrusted = "there is no valid TLS connection to its server; is its certificate good?"
    for host in ("other.test", PUBLIC):
        assert await failure(trusting.fetch(f"https://{host}:{secure.port}/x", Kind.IMAGE, LIMITS)) == untrusted
    assert await failure(fetcher.fetch(f"https://media.test:{secure.port}/x", Kind.IMAGE, LIMITS)) == untrusted
    assert len(secure.asked) == 1


async def test_a_redirect_goes_up_to_https_and_never_down(
    origin: Origin, secure: Origin, trusting: HttpMediaFetcher
) -> None:
    origin.redirect("/up", f"https://media.test:{secure.port}/x")
    origin.serve("/down")
    secure.serve("/x")
    secure.redirect("/down", f"http://media.test:{origin.port}/down")
    assert (await trusting.fetch(f"http://media.test:{origin.port}/up", Kind.IMAGE, LIMITS)).data == PNG
    asking = trusting.fetch(f"https://media.test:{secure.port}/down", Kind.IMAGE, LIMITS)
    assert await failure(asking) == "its server redirects from https to http"
    assert origin.paths == ["/up"]


# Proxies.

PROXIED = FetchLimits(5.0, 2**20, trust_env_proxy=True)


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
async def proxy(stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch) -> Origin:
    """A proxy on an address that media may not come from: the operator's word counts for it."""
    proxy = await listening(stack, INSIDE)
    monkeypatch.setenv("http_proxy", f"{INSIDE}:{proxy.port}")
    return proxy


async def test_a_proxy_of_the_environment_is_used_only_when_the_operator_says_so(
    proxy: Origin, origin: Origin, names: Names, fetch: Any
) -> None:
    origin.serve("/x")
    assert (await fetch("/x")).data == PNG
    assert proxy.asked == []
    proxy.serve(f"http://media.test:{origin.port}/x", JPEG)
    names.asked.clear()
    assert (await fetch("/x", limits=PROXIED)).data == JPEG
    assert (proxy.paths, names.asked) == ([f"http://media.test:{origin.port}/x"], [])
    assert proxy.asked[0].headers["Host"] == f"media.test:{origin.port}"


async def test_an_address_in_a_url_is_checked_before_a_proxy_is_asked(proxy: Origin, fetch: Any) -> None:
    assert await failure(fetch("http://169.254.169.254/", limits=PROXIED)) == NOWHERE
    proxy.serve("http://127.0.0.1/", PNG)
    assert (await fetch("http://127.0.0.1/", limits=PROXIED)).data == PNG


async def test_hosts_without_a_proxy_are_checked_as_ever(
    proxy: Origin, origin: Origin, names: Names, fetch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", ".test")
    origin.serve("/x")
    assert (await fetch("/x", limits=PROXIED)).data == PNG
    names.answers["inside.test"] = [[INSIDE]]
    assert await failure(fetch("http://inside.test/", limits=PROXIED)) == NOWHERE
    assert proxy.asked == []


async def test_a_proxy_that_is_none_of_http_is_a_failure(fetch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:1080")
    assert await failure(fetch("/x", limits=PROXIED)) == "its server cannot be reached"


async def test_a_proxy_that_is_not_there_is_a_failure(fetch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://user:secret@127.0.0.1:1")
    assert await failure(fetch("/x", limits=PROXIED)) == BROKEN


# The real resolver and the real rule.


async def test_the_system_is_asked_for_names(monkeypatch: pytest.MonkeyPatch) -> None:
    info = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 80))] * 2
    link_local = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fe80::1%1", 80, 0, 1))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [*info, link_local])
    fetcher = HttpMediaFetcher()
    await fetcher.start()
    try:
        assert await fetcher._look_up("media.test", 80) == [ip_address("127.0.0.1"), ip_address("fe80::1%1")]
        assert await failure(fetcher.fetch("http://media.test/", Kind.IMAGE, LIMITS)) == NOWHERE
    finally:
        await fetcher.close()


async def test_the_loopback_of_this_machine_is_refused() -> None:
    fetcher = HttpMediaFetcher()
    await fetcher.start()
    try:
        for host in ("localhost", "LOCALHOST.", "127.0.0.1", "[::1]"):
            assert await failure(fetcher.fetch(f"http://{host}:1/", Kind.IMAGE, LIMITS)) == NOWHERE
    finally:
        await fetcher.close()


NUMERIC = ["127", "0x7f", "0177", "1", "0", "2130706433", "１", "②", "::", "::1", "ffff", "169.254.169.254", "10"]
MARKS = [".", "。", "．", "%", "@", ":", "/", "\\", "?", "#", "[", "]", " ", "\t", "a", "localhost", "64:ff9b::", "%31"]
HOSTS = st.lists(st.sampled_from([*NUMERIC, *MARKS]), max_size=7).map("".join)
FORMS = st.builds(
    "{}{}{}".format, st.sampled_from(["http://", "https://", "HTTP://", "http:/", "//"]), HOSTS, st.just("/x")
)
ANSWERS = st.lists(st.ip_addresses(), max_size=3)


class Connected(Exception):
    pass


@settings(max_examples=300)
@given(FORMS, st.booleans(), ANSWERS)
def test_no_form_of_a_url_connects_to_an_address_that_is_refused(
    url: str, allow_private: bool, found: list[Address]
) -> None:
    """Whatever the URL says and DNS answers: what is about to be connected to is public, or private by the flag."""

    async def lookup(host: str, port: int) -> Sequence[Address]:
        return found

    class Watched(HttpMediaFetcher):
        async def _get(self, url: str, target: MediaUrl, *_: Any, **__: Any) -> Any:
            host = re.fullmatch(r"https?://\[?([0-9a-f.:]+?)\]?:\d+/.*", url)
            assert host, url
            address = ip_address(host[1])
            embedded = int(address) & 0xFFFFFFFF if address in ip_network("64:ff9b::/96") else None
            judged = IPv4Address(embedded) if embedded is not None else address
            assert judged.is_global or (allow_private and address.is_private and address.version == 4)
            assert not judged.is_multicast
            raise Connected

    async def fetch() -> None:
        with pytest.raises((FetchFailed, Connected)):
            await Watched(lookup).fetch(url, Kind.IMAGE, FetchLimits(5.0, 1, allow_private=allow_private))

    asyncio.run(fetch())
