"""http and https URLs of media, taken apart strictly: one spelling of a host, and no other way to name an address.

Readers of URLs differ on odd ones, and a check that reads a URL otherwise than the client that connects is no check.
So what is odd is refused here, and what is left is sent as it was read: scheme, host, port, path and query.

Source: WHATWG URL, sections 3.5 (forbidden host code points) and 3.6 (numbers as IPv4); RFC 6874 for zone ids.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from urllib.parse import quote, urljoin

LONGEST = 8192
_LONGEST_HOST = 254  # RFC 1035, section 2.3.4, with a final dot
_PORTS = {"http": 80, "https": 443}

_URL = re.compile(r"(https?)://([^/?#]*)([^?#]*)(\?[^#]*)?(?:#.*)?", re.IGNORECASE | re.DOTALL)
# White space and control characters, in and beyond ASCII, which some readers skip; backslashes, which some turn round.
_ODD = re.compile(r"[\x00-\x20\x7f-\xa0\\\u1680\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff\ud800-\udfff]")
_PORT = re.compile(r"[0-9]{1,5}", re.ASCII)
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.ASCII)
# IDNA 2003, which Python has, and IDNA 2008, which browsers have, read these as different hosts.
_DEVIATIONS = frozenset("ßẞς\u200c\u200d")
# What a path and a query may hold beside letters and digits; "%" so that what is encoded stays as it is.
_SAFE = "/%:@!$&'()*+,;=~-._|[]^"

Address = IPv4Address | IPv6Address


@dataclass(frozen=True, slots=True)
class MediaUrl:
    """An absolute URL.

    Attributes:
        scheme: ``http`` or ``https``.
        host: a name in lower-case ASCII without a final dot, or the text of ``address``.
        target: path and query, as they are sent.
        address: where the host is an IP address.
    """

    scheme: str
    host: str
    port: int
    target: str
    address: Address | None = None

    @property
    def host_port(self) -> str:
        """What the Host header says."""
        host = f"[{self.host}]" if isinstance(self.address, IPv6Address) else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    def at(self, address: Address) -> str:
        """Return the URL with an address in its host's place."""
        host = f"[{address}]" if isinstance(address, IPv6Address) else str(address)
        return f"{self.scheme}://{host}:{self.port}{self.target}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host_port}{self.target}"


def parse(text: str) -> MediaUrl:
    """Take a URL apart.

    Raises:
        ValueError: why it is not one that is fetched, in words for the client; the URL is not repeated.
    """
    if len(text) > LONGEST:
        raise ValueError(f"its URL is longer than {LONGEST} characters")
    if _ODD.search(text):
        raise ValueError("its URL holds white space, a control character or a backslash; percent-encode it")
    match = _URL.fullmatch(text)
    if match is None:
        raise ValueError("its URL is neither an http(s) URL nor a data: URI")
    scheme, authority, path, query = match.groups()
    scheme = scheme.lower()
    host, port = _host_port(authority)
    name, address = read_host(host)
    target = quote(path or "/", safe=_SAFE) + quote(query or "", safe=_SAFE + "?")
    return MediaUrl(scheme, name, _PORTS[scheme] if port is None else port, target, address)


def follow(url: MediaUrl, location: str) -> MediaUrl:
    """Return where a redirect leads.

    Raises:
        ValueError: as ``parse``, and for a step down from https to http.
    """
    try:
        if len(location) > LONGEST or _ODD.search(location):
            raise ValueError
        to = parse(urljoin(str(url), location))
    except ValueError:
        raise ValueError("its server redirects to something that is no valid http(s) URL") from None
    if url.scheme == "https" and to.scheme == "http":
        raise ValueError("its server redirects from https to http")
    return to


def read_host(text: str) -> tuple[str, Address | None]:
    """Return a host in its one spelling, and its address where it is one; IPv6 stands in brackets.

    Raises:
        ValueError: it is neither a name nor an address in its usual form.
    """
    if text.startswith("["):
        address = _ipv6(text)
        return str(address), address
    if not text:
        raise ValueError("its URL names no host")
    if len(text) > _LONGEST_HOST:
        raise ValueError("its URL's host is not a valid host name")
    name = _ascii(text).removesuffix(".")
    labels = name.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        # Resolvers read 2130706433, 0177.1, 0x7f.1 and 127.1 as addresses. Only the usual form is one here.
        try:
            v4 = IPv4Address(name)
        except ValueError:
            raise ValueError("its URL's host is a number; write an IPv4 address as 192.0.2.1") from None
        return str(v4), v4
    if not all(map(_LABEL.fullmatch, labels)):
        raise ValueError("its URL's host is not a valid host name")
    return name, None


def _host_port(authority: str) -> tuple[str, int | None]:
    if "@" in authority:
        raise ValueError("its URL holds credentials, which are not sent; use a signed URL, or a data: URI")
    if "%" in authority:
        raise ValueError("its URL's host is percent-encoded or has a zone id")
    bracket = authority.find("]")
    host, colon, port = authority[bracket + 1 :].partition(":")
    host = authority[: bracket + 1] + host
    if not colon:
        return host, None
    if not _PORT.fullmatch(port) or not 1 <= int(port) <= 65535:
        raise ValueError("its URL's port is not a number from 1 to 65535")
    return host, int(port)


def _ipv6(text: str) -> IPv6Address:
    try:
        if not text.endswith("]"):
            raise ValueError
        return IPv6Address(text[1:-1])
    except ValueError:
        raise ValueError("its URL's host is not a valid IPv6 address") from None


def _ascii(host: str) -> str:
    """Return a host in lower-case ASCII; full-width digits and dots become plain ones."""
    if host.isascii():
        return host.lower()
    if _DEVIATIONS & set(host):
        raise ValueError("its URL's host is read in two ways; write it in punycode (xn--)")
    try:
        return host.encode("idna").decode("ascii").lower()
    except UnicodeError:
        raise ValueError("its URL's host is not a valid host name") from None
