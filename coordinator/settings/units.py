"""The units that a configuration is written in: durations, sizes, addresses, allow-list entries.

Each is a pure ``parse_*`` function that raises ValueError with a sentence that says what to write instead,
and a pydantic type on top of it. Text forms are llm-d's, which are Go's.

Source: Go ``time.ParseDuration`` and ``net.Listen``; llm-d ``config.BytesPerMB``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Annotated
from urllib.parse import SplitResult, urlsplit

from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator, WithJsonSchema

BYTES_PER_MB = 1024 * 1024

_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION_PART = r"(?:\d+(?:\.\d*)?|\.\d+)(?:ns|us|µs|μs|ms|s|m|h)"
_DURATION = re.compile(rf"(?:{_DURATION_PART})+", re.ASCII)
_PART = re.compile(r"([\d.]+)(\D+)")
_LONGEST_S = 1e9  # some 30 years: beyond it, event loops and sockets overflow
_NUMBER = re.compile(r"\d+(?:\.\d+)?", re.ASCII)

# An underscore is not in RFC 1123, but container networks make names that have one.
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII | re.IGNORECASE)
_NUMERIC_LABEL = re.compile(r"0x[0-9a-f]*|[0-9]+", re.ASCII | re.IGNORECASE)
_DIGITS = re.compile(r"[0-9]{1,5}", re.ASCII)


def parse_duration(value: object) -> float:
    """Return seconds, from a text such as ``500ms``, ``30s``, ``2m`` or ``1h30m``; 0 needs no unit."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = f"{value:g}"
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a duration, write a text such as 500ms, 30s or 2m")
    text = value.strip()
    if text in ("0", "0.0"):
        return 0.0
    if _NUMBER.fullmatch(text):
        raise ValueError(f"{text} has no unit, write {text}s")
    if text.startswith("-"):
        raise ValueError(f"{text} is negative, write a duration such as 30s")
    if not _DURATION.fullmatch(text):
        raise ValueError(f"{value!r} is not a duration, write it as 500ms, 30s, 2m or 1h30m")
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(text))
    if seconds > _LONGEST_S:
        raise ValueError(f"{text} is longer than 30 years, write something shorter")
    return round(seconds, 9)


def format_duration(seconds: float) -> str:
    """Write seconds the way they are configured: 5400.0 is ``1h30m``."""
    if seconds == 0:
        return "0s"
    if seconds < 1:
        return f"{seconds * 1000:g}ms"
    hours, rest = divmod(seconds, 3600)
    minutes, rest = divmod(rest, 60)
    parts = (f"{hours:g}h" if hours else "", f"{minutes:g}m" if minutes else "", f"{rest:g}s" if rest else "")
    return "".join(parts)


def parse_megabytes(value: object) -> int:
    """Return whole megabytes of 1,048,576 bytes each, from 1 up."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]+", value.strip(), re.ASCII):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{value!r} is not a whole number of megabytes, write a number such as 64")
    if value < 1:
        raise ValueError(f"{value} is too small, write at least 1 (megabyte)")
    return value


def megabytes_to_bytes(megabytes: int) -> int:
    return megabytes * BYTES_PER_MB


def split_host_port(text: str) -> tuple[str, str | None]:
    """Split ``host``, ``host:port``, ``[v6]:port`` or a bare v6 address; the port is still a text.

    The host comes back in lower case and without brackets.

    Raises:
        ValueError: the host is neither an IP address nor a host name.
    """
    if text.startswith("["):
        inside, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")) or not isinstance(_ip(inside), IPv6Address):
            raise ValueError(f"{text!r} is not an address, write an IPv6 address as [2001:db8::1]:8000")
        return inside.lower(), rest[1:] if rest else None
    if text.count(":") > 1:
        if isinstance(_ip(text), IPv6Address):
            return text.lower(), None
        raise ValueError(f"{text!r} is not an address, write IPv6 with a port as [2001:db8::1]:8000")
    host, colon, port = text.partition(":")
    if not host or (_ip(host) is None and not is_host_name(host)):
        raise ValueError(f"{text!r} is not an address, write a host name or an IP address")
    return host.lower(), port if colon else None


def is_host_name(text: str) -> bool:
    """Say whether a text can be a DNS name; the likes of ``127.1``, which libc takes for an IP, cannot."""
    labels = text.removesuffix(".").split(".")
    return (
        len(text) <= 253
        and all(_LABEL.fullmatch(label) for label in labels)
        and not _NUMERIC_LABEL.fullmatch(labels[-1])
    )


def parse_port(text: str, *, lowest: int = 1) -> int:
    if not _DIGITS.fullmatch(text) or not lowest <= int(text) <= 65535:
        raise ValueError(f"{text!r} is not a port, write a number from {lowest} to 65535")
    return int(text)


def parse_base_url(value: object) -> str:
    """Return ``http(s)://host[:port]`` without a slash at the end.

    A path is refused because every leg brings its own, from the root; a user or a query because it would end
    up in logs.
    """
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is not an address, write it as http://host:8000")
    text = value.strip()
    if "://" not in text:
        raise ValueError(f"{_without_user(text)!r} has no scheme, write http://{_without_user(text)}")
    try:
        url = urlsplit(text)
    except ValueError:
        raise ValueError(f"{_without_user(text)!r} is not an address, write it as http://host:8000") from None
    if url.scheme not in ("http", "https"):
        raise ValueError(f"{_without_user(text)!r} is neither http nor https, write http://host:8000")
    if "@" in url.netloc:
        raise ValueError(f"{_without_user(text)!r} holds a user or a password, write the address without it")
    host_port = _url_host_port(url)
    if url.path not in ("", "/") or url.query or url.fragment or text.endswith(("?", "#")):
        raise ValueError(
            f"{text!r} has more than host and port, write {url.scheme}://{host_port}: a leg brings its path"
        )
    return f"{url.scheme}://{host_port}"


def _url_host_port(url: SplitResult) -> str:
    if not url.netloc:
        raise ValueError(f"{url.geturl()!r} names no host, write it as http://host:8000")
    if url.netloc.count(":") > 1 and not url.netloc.startswith("["):
        raise ValueError(f"{url.netloc!r} is not a host, write an IPv6 address as http://[2001:db8::1]:8000")
    host, port = split_host_port(url.netloc)
    shown = f"[{host}]" if ":" in host else host
    return shown if port is None else f"{shown}:{parse_port(port)}"


def origin(url: str) -> str:
    """Return a base URL with its port, so that two spellings of one worker compare equal."""
    scheme, _, rest = url.partition("://")
    has_port = rest.rpartition("]")[2].count(":") > 0
    return url if has_port else f"{url}:{443 if scheme == 'https' else 80}"


def _without_user(text: str) -> str:
    """Leave out what stands before an @, which may be a password: error sentences end up in logs."""
    scheme, mark, rest = text.rpartition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2]}"


def _ip(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class ListenAddr:
    """Where a server listens; ``host`` None is every interface, port 0 a free one."""

    host: str | None
    port: int

    def __str__(self) -> str:
        host = self.host or ""
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


def parse_listen_addr(value: object) -> ListenAddr:
    """Read ``:8080``, ``127.0.0.1:8080``, ``[::1]:8080`` or ``name:8080``."""
    if isinstance(value, ListenAddr):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        raise ValueError(f"{value} is not an address to listen on, write ':{value}' in quotes")
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not an address to listen on, write ':8080' or '127.0.0.1:8080'")
    text = value.strip()
    if text.startswith(":") and not text.startswith("::"):
        return ListenAddr(None, parse_port(text[1:], lowest=0))
    if _DIGITS.fullmatch(text):
        raise ValueError(f"{text!r} is not an address to listen on, write ':{text}'")
    if "://" in text:
        raise ValueError(f"{text!r} is a URL, write only host and port, such as '127.0.0.1:8080'")
    host, port = split_host_port(text)
    if port is None:
        shown = f"[{host}]" if ":" in host else host
        raise ValueError(f"{text!r} names no port, write '{shown}:8080'")
    return ListenAddr(host, parse_port(port, lowest=0))


@dataclass(frozen=True, slots=True)
class AllowEntry:
    """One line of an allow-list: a network or a host name, and optionally the ports."""

    text: str
    network: IPv4Network | IPv6Network | None
    host: str | None
    ports: tuple[int, int] | None

    def admits(self, host: str, port: int) -> bool:
        """Say whether the entry lets a worker be called.

        A name is compared as it is written and never looked up: what DNS says is not the operator's word.
        """
        if self.ports is not None and not self.ports[0] <= port <= self.ports[1]:
            return False
        if self.network is None:
            return self.host == host.lower().rstrip(".")
        address = _ip(host)
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped  # a socket connects to the IPv4 host behind it
        return address is not None and address in self.network

    def __str__(self) -> str:
        return self.text


def parse_allow_entry(value: object) -> AllowEntry:
    """Read ``10.0.0.0/8``, ``10.0.0.7``, ``worker-0.decode``, each also with ``:8000`` or ``:8000-8010``."""
    if isinstance(value, AllowEntry):
        return value
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is not an allow entry, write '10.0.0.0/8', an IP or a host name")
    text = value.strip()
    if "://" in text:
        raise ValueError(f"{text!r} is a URL, write only the host or network, such as '10.0.0.0/8:8000'")
    if "*" in text:
        raise ValueError(f"{text!r} has a wildcard, write '10.0.0.0/8' or each host name in full")
    where, ports = _split_ports(text)
    if "/" in where:
        return AllowEntry(text, _network(where), None, ports)
    host, rest = split_host_port(where)
    if rest is not None:
        raise ValueError(f"{text!r} is not an allow entry, write a host once and its ports once")
    address = _ip(host)
    if address is not None:
        return AllowEntry(text, ip_network(address), None, ports)
    return AllowEntry(text, None, host.rstrip("."), ports)


def _split_ports(text: str) -> tuple[str, tuple[int, int] | None]:
    """Cut the ports off: what follows the closing bracket, or the only colon."""
    if text.startswith("["):
        where, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"{text!r} is not an allow entry, write IPv6 with a port as '[2001:db8::/32]:8000'")
        return where, _ports(rest[1:]) if rest else None
    if text.count(":") == 1:
        where, _, ports = text.partition(":")
        return where, _ports(ports)
    return text, None


def _ports(text: str) -> tuple[int, int]:
    low, dash, high = text.partition("-")
    first = parse_port(low)
    last = parse_port(high) if dash else first
    if last < first:
        raise ValueError(f"the port range {text} runs backwards, write {last}-{first}")
    return first, last


def _network(text: str) -> IPv4Network | IPv6Network:
    try:
        return ip_network(text)
    except ValueError:
        pass
    try:
        meant = ip_network(text, strict=False)
    except ValueError:
        raise ValueError(f"{text!r} is not a network, write it as 10.0.0.0/8 or 2001:db8::/32") from None
    raise ValueError(f"{text!r} has bits set outside its mask, write {meant}")


def _whole(value: object) -> object:
    """Keep a boolean from being read as 0 or 1, which pydantic does."""
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is not a whole number, write a number such as 1")
    return value


def _items(value: object) -> object:
    """Read one text as a list with commas, as Go's reader does: environment variables hold lists so."""
    if not isinstance(value, str):
        return value
    text = "" if value.strip() == "[]" else value  # the only way to say "none": an empty variable is unset
    return [item.strip() for item in text.split(",") if item.strip()]


_DURATION_TEXT = {
    "type": "string",
    "pattern": rf"^({_DURATION_PART})+$",
    "examples": ["500ms", "30s", "1h30m"],
}


def _above_zero(seconds: float) -> float:
    if seconds == 0:
        raise ValueError("0 is not possible here, write a duration such as 5s")
    return seconds


Duration = Annotated[
    float,
    PlainValidator(parse_duration),
    PlainSerializer(format_duration, return_type=str, when_used="json"),
    WithJsonSchema({"anyOf": [_DURATION_TEXT, {"enum": [0, "0"]}]}),
]
"""Seconds. 0 is "no limit" for a timeout; use ``PositiveDuration`` where 0 has no meaning."""

PositiveDuration = Annotated[
    float,
    PlainValidator(lambda value: _above_zero(parse_duration(value))),
    PlainSerializer(format_duration, return_type=str, when_used="json"),
    WithJsonSchema(_DURATION_TEXT),
]

Megabytes = Annotated[
    int, PlainValidator(parse_megabytes), WithJsonSchema({"type": "integer", "minimum": 1, "examples": [64]})
]

BaseUrl = Annotated[
    str,
    PlainValidator(parse_base_url),
    WithJsonSchema({"type": "string", "pattern": r"^https?://[^/?#@]+/?$", "examples": ["http://10.0.0.1:8000"]}),
]

Listen = Annotated[
    ListenAddr,
    PlainValidator(parse_listen_addr),
    PlainSerializer(str, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": r":[0-9]+$", "examples": [":8080", "127.0.0.1:8080"]}),
]

Allow = Annotated[
    AllowEntry,
    PlainValidator(parse_allow_entry),
    PlainSerializer(str, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "minLength": 1, "examples": ["10.0.0.0/8", "10.0.0.7:8000-8007"]}),
]

Count = Annotated[int, Field(ge=1), BeforeValidator(_whole)]
"""A whole number from 1 up."""

Whole = Annotated[int, BeforeValidator(_whole)]

Port = Annotated[int, Field(ge=1, le=65535), BeforeValidator(_whole)]

Items = BeforeValidator(_items)
"""Put before a list or tuple: also takes one text with commas."""
