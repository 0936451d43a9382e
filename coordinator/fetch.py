"""Fetches media from where clients say that it is, and from nowhere inside: the one way out that a client steers.

A host is looked up once. Every address that it has must be one that media may come from, and one of these very
addresses is connected to: it stands in the host's place in the URL that the HTTP client is given, so that nothing
looks the name up again. The Host header and TLS still have the name. Redirects are followed here, each as a new URL.

A connection is used once and closed: a server that a client chose keeps none open.
"""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ipaddress import ip_address
from typing import TYPE_CHECKING, Protocol
from urllib.request import getproxies_environment, proxy_bypass

import aiohttp
from yarl import URL

from coordinator.logs import log
from coordinator.security import addresses
from coordinator.step import Fetched, FetchFailed
from envelope.media_types import check_declared, settled_type
from envelope.media_url import follow, parse

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from coordinator.security.addresses import Address
    from coordinator.step import FetchLimits
    from envelope.media_types import Kind
    from envelope.media_url import MediaUrl

USER_AGENT = "pd-coordinator"

_MOST_REDIRECTS = 5
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
# Of a host that has several: as many are tried, each for so long, unless it is the last.
_MOST_ADDRESSES = 4
_CONNECT_S = 2.0
# Look-ups that hang hold a thread each until the resolver gives up. These are not the threads of the event loop,
# where the names of workers are looked up.
_LOOKUPS = 64

_NOWHERE = "its host has no address that media may be fetched from"


class Refuses(Protocol):
    """Says whether media may not be fetched from an address; ``addresses.refused`` is the rule."""

    def __call__(self, address: Address, *, allow_private: bool) -> bool: ...


class HttpMediaFetcher:
    """Implements ``coordinator.step.MediaFetcher`` on aiohttp.

    Args:
        lookup: the addresses of a host name.
        refuses: the rule for each of them.
        tls: what TLS trusts; True is the system's own authorities.
    """

    def __init__(
        self,
        lookup: Callable[[str, int], Awaitable[Sequence[Address]]] | None = None,
        refuses: Refuses = addresses.refused,
        tls: ssl.SSLContext | bool = True,
    ) -> None:
        self._lookup = lookup or self._look_up
        self._refuses = refuses
        self._tls = tls
        self._threads = ThreadPoolExecutor(_LOOKUPS, "lookup")

    async def start(self) -> None:
        """Make the session; needs the running loop."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
            headers={"User-Agent": USER_AGENT, "Accept": "*/*", "Accept-Encoding": "identity"},
            auto_decompress=False,
        )

    async def close(self) -> None:
        await self._session.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def fetch(self, url: str, kind: Kind, limits: FetchLimits) -> Fetched:
        try:
            async with asyncio.timeout(limits.timeout_s):
                return await self._fetch(url, kind, limits)
        except TimeoutError:
            raise FetchFailed(f"its server did not send it within {limits.timeout_s:g} s") from None
        except aiohttp.ClientError:
            raise FetchFailed("the connection to its server broke, or what it sent is not HTTP") from None

    async def _fetch(self, url: str, kind: Kind, limits: FetchLimits) -> Fetched:
        with _told():
            target = parse(url)
        for _ in range(_MOST_REDIRECTS + 1):
            response = await self._open(target, limits)
            try:
                if response.status not in _REDIRECTS:
                    return await _read(response, kind, limits.max_bytes)
                with _told():
                    target = follow(target, response.headers.get("Location", "\0"))
            finally:
                response.close()
        raise FetchFailed(f"its server redirects more than {_MOST_REDIRECTS} times")

    async def _open(self, target: MediaUrl, limits: FetchLimits) -> aiohttp.ClientResponse:
        """Return the head of the answer of one URL.

        Raises:
            FetchFailed: the host may not be asked, or cannot be reached.
        """
        if limits.allowed_hosts and target.host not in limits.allowed_hosts:
            raise FetchFailed("its host is not one that media may be fetched from here")
        if limits.trust_env_proxy and (proxy := _proxy(target)):
            if target.address is not None:
                self._check(target, [target.address], limits)
            return await self._get(str(target), target, proxy=proxy)
        found = [target.address] if target.address is not None else await self._resolve(target)
        self._check(target, found, limits)
        tried = found[:_MOST_ADDRESSES]
        for address in tried:
            try:
                return await self._get(target.at(address), target, None if address is tried[-1] else _CONNECT_S)
            except aiohttp.ClientSSLError:
                raise FetchFailed("there is no valid TLS connection to its server; is its certificate good?") from None
            except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError):
                continue
        raise FetchFailed("its server cannot be reached")

    async def _get(
        self, url: str, target: MediaUrl, connect_s: float | None = None, proxy: str | None = None
    ) -> aiohttp.ClientResponse:
        return await self._session.get(
            URL(url, encoded=True),
            headers={"Host": target.host_port},
            allow_redirects=False,
            server_hostname=target.host if proxy is None and target.scheme == "https" else None,
            ssl=self._tls,
            proxy=proxy,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_s),
        )

    async def _resolve(self, target: MediaUrl) -> Sequence[Address]:
        try:
            return await self._lookup(target.host, target.port)
        except (OSError, UnicodeError):  # gaierror is an OSError
            return ()

    def _check(self, target: MediaUrl, found: Sequence[Address], limits: FetchLimits) -> None:
        """Refuse a host of which any address is refused, or that has none.

        The client is told the same in both cases: which names there are inside is nothing to find out here.
        """
        inside = [address for address in found if self._refuses(address, allow_private=limits.allow_private)]
        if found and not inside:
            return
        log.info("media host refused", extra={"fields": {"host": target.host, "addresses": [*map(str, inside)]}})
        raise FetchFailed(_NOWHERE)

    async def _look_up(self, host: str, port: int) -> Sequence[Address]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, _addresses_of, host, port)


def _addresses_of(host: str, port: int) -> Sequence[Address]:
    """Ask the system for the addresses of a name, in the order in which they are to be tried."""
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return [*dict.fromkeys(ip_address(info[4][0]) for info in infos)]


async def _read(response: aiohttp.ClientResponse, kind: Kind, max_bytes: int) -> Fetched:
    """Return the whole body of an answer, judged by its head first."""
    if response.status != 200:
        raise FetchFailed(f"its server answered {response.status}")
    if response.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
        raise FetchFailed("its server sent it compressed, which was not asked for")
    with _told():
        check_declared(kind, response.content_type.lower())
    _check_size(response.content_length or 0, max_bytes)
    parts, size = [], 0
    async for part in response.content.iter_any():
        size += len(part)
        _check_size(size, max_bytes)
        parts.append(part)
    data = b"".join(parts)
    with _told():
        return Fetched(settled_type(kind, data), data)


def _check_size(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise FetchFailed(f"it is larger than {max_bytes / 2**20:g} MB")


def _proxy(target: MediaUrl) -> str | None:
    """Return the proxy that the environment names for a URL, with its credentials."""
    named = getproxies_environment()
    proxy = named.get(target.scheme) or named.get("all")
    if not proxy or proxy_bypass(target.host_port):
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    if not proxy.lower().startswith(("http://", "https://")):
        log.error("media cannot be fetched through the environment's proxy: only http and https proxies can be used")
        raise FetchFailed("its server cannot be reached")
    return proxy


@contextmanager
def _told() -> Iterator[None]:
    """Pass on what a rule about URLs and media says."""
    try:
        yield
    except ValueError as error:
        raise FetchFailed(str(error)) from None
