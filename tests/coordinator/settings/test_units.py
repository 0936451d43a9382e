"""Durations, sizes, addresses and allow entries: what is read, and what a refusal tells the operator to write."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from coordinator.settings.units import (
    ListenAddr,
    format_duration,
    megabytes_to_bytes,
    origin,
    parse_allow_entry,
    parse_base_url,
    parse_duration,
    parse_listen_addr,
    parse_megabytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def refusal(parse: Callable[[object], object], value: object) -> str:
    """Return the sentence that a parser refuses a value with."""
    with pytest.raises(ValueError, match=r".") as caught:
        parse(value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("30s", 30.0),
        ("2m", 120.0),
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        (".5s", 0.5),
        ("100us", 0.0001),
        ("100µs", 0.0001),
        ("0", 0.0),
        ("0s", 0.0),
        (0, 0.0),
        (" 5s ", 5.0),
    ],
)
def test_a_duration_is_read_as_go_writes_it(text: object, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (30, "30 has no unit, write 30s"),
        (1.5, "1.5 has no unit, write 1.5s"),
        ("30", "30 has no unit, write 30s"),
        ("-3s", "-3s is negative, write a duration such as 30s"),
        ("3 s", "'3 s' is not a duration, write it as 500ms, 30s, 2m or 1h30m"),
        ("1m30", "'1m30' is not a duration, write it as 500ms, 30s, 2m or 1h30m"),
        ("3S", "'3S' is not a duration, write it as 500ms, 30s, 2m or 1h30m"),
        ("³s", "'³s' is not a duration, write it as 500ms, 30s, 2m or 1h30m"),
        ("", "'' is not a duration, write it as 500ms, 30s, 2m or 1h30m"),
        ("inf", "'inf' is not a duration, write it as 500ms, 30s, 2m or 1h30m"),
        (True, "True is not a duration, write a text such as 500ms, 30s or 2m"),
        ([], "[] is not a duration, write a text such as 500ms, 30s or 2m"),
        ("9999999h", "9999999h is longer than 30 years, write something shorter"),
    ],
)
def test_a_duration_that_could_mean_two_things_is_refused(text: object, sentence: str) -> None:
    assert refusal(parse_duration, text) == sentence


@pytest.mark.parametrize("text", ["0s", "500ms", "5s", "1m30s", "1h", "2h30m", "1h1m1s"])
def test_a_duration_is_written_as_it_was_read(text: str) -> None:
    assert format_duration(parse_duration(text)) == text


@pytest.mark.parametrize(("value", "megabytes"), [(64, 64), ("64", 64), (64.0, 64), (1, 1)])
def test_megabytes_are_whole_numbers(value: object, megabytes: int) -> None:
    assert parse_megabytes(value) == megabytes
    assert megabytes_to_bytes(megabytes) == megabytes * 1024 * 1024


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("64MB", "'64MB' is not a whole number of megabytes, write a number such as 64"),
        (1.5, "1.5 is not a whole number of megabytes, write a number such as 64"),
        (True, "True is not a whole number of megabytes, write a number such as 64"),
        (0, "0 is too small, write at least 1 (megabyte)"),
        ("-1", "-1 is too small, write at least 1 (megabyte)"),
    ],
)
def test_a_size_with_a_unit_or_a_fraction_is_refused(value: object, sentence: str) -> None:
    assert refusal(parse_megabytes, value) == sentence


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://10.0.0.1:8000", "http://10.0.0.1:8000"),
        ("http://Gateway.svc/", "http://gateway.svc"),
        ("HTTPS://a_b-c", "https://a_b-c"),
        ("https://[::1]:80/", "https://[::1]:80"),
        ("http://decode.default.svc.", "http://decode.default.svc."),
    ],
)
def test_a_base_url_is_scheme_host_and_port(text: str, url: str) -> None:
    assert parse_base_url(text) == url


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("10.0.0.1:80", "'10.0.0.1:80' has no scheme, write http://10.0.0.1:80"),
        ("ftp://a", "'ftp://a' is neither http nor https, write http://host:8000"),
        ("http://", "'http://' names no host, write it as http://host:8000"),
        ("http://a/v1", "'http://a/v1' has more than host and port, write http://a: a leg brings its path"),
        ("http://a?x", "'http://a?x' has more than host and port, write http://a: a leg brings its path"),
        ("http://a/?", "'http://a/?' has more than host and port, write http://a: a leg brings its path"),
        ("http://a:0", "'0' is not a port, write a number from 1 to 65535"),
        ("http://a:99999", "'99999' is not a port, write a number from 1 to 65535"),
        ("http://a:", "'' is not a port, write a number from 1 to 65535"),
        ("http://${HOST}", "'${HOST}' is not an address, write a host name or an IP address"),
        ("http://a b", "'a b' is not an address, write a host name or an IP address"),
        ("http://127.1", "'127.1' is not an address, write a host name or an IP address"),
        ("http://::1:80", "'::1:80' is not a host, write an IPv6 address as http://[2001:db8::1]:8000"),
        ("http://[::1", "'http://[::1' is not an address, write it as http://host:8000"),
        ("http://[x]", "'http://[x]' is not an address, write it as http://host:8000"),
        (8000, "8000 is not an address, write it as http://host:8000"),
    ],
)
def test_an_address_that_is_no_base_url_is_refused(text: object, sentence: str) -> None:
    assert refusal(parse_base_url, text) == sentence


@pytest.mark.parametrize(
    "text", ["http://me:secret@host", "me:secret@host:80", "ftp://me:secret@host", "http://me:secret@host/x?y"]
)
def test_a_password_in_an_address_is_not_repeated(text: str) -> None:
    assert "secret" not in refusal(parse_base_url, text)


@pytest.mark.parametrize(
    ("url", "full"),
    [
        ("http://a", "http://a:80"),
        ("https://a", "https://a:443"),
        ("http://a:80", "http://a:80"),
        ("http://[::1]", "http://[::1]:80"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_two_spellings_of_a_worker_have_one_origin(url: str, full: str) -> None:
    assert origin(url) == full


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (":8080", ListenAddr(None, 8080)),
        ("127.0.0.1:8080", ListenAddr("127.0.0.1", 8080)),
        ("[::1]:8080", ListenAddr("::1", 8080)),
        ("0.0.0.0:0", ListenAddr("0.0.0.0", 0)),
        ("localhost:80", ListenAddr("localhost", 80)),
    ],
)
def test_a_listen_address_is_read_and_written_alike(text: str, address: ListenAddr) -> None:
    assert parse_listen_addr(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (8080, "8080 is not an address to listen on, write ':8080' in quotes"),
        ("8080", "'8080' is not an address to listen on, write ':8080'"),
        ("localhost", "'localhost' names no port, write 'localhost:8080'"),
        ("::1", "'::1' names no port, write '[::1]:8080'"),
        (":99999", "'99999' is not a port, write a number from 0 to 65535"),
        ("a:b:c", "'a:b:c' is not an address, write IPv6 with a port as [2001:db8::1]:8000"),
        ("[::1:80", "'[::1:80' is not an address, write an IPv6 address as [2001:db8::1]:8000"),
        ("http://a:1", "'http://a:1' is a URL, write only host and port, such as '127.0.0.1:8080'"),
        (None, "None is not an address to listen on, write ':8080' or '127.0.0.1:8080'"),
    ],
)
def test_a_listen_address_without_a_port_is_refused(text: object, sentence: str) -> None:
    assert refusal(parse_listen_addr, text) == sentence


@pytest.mark.parametrize(
    ("entry", "host", "port", "admitted"),
    [
        ("10.0.0.0/8", "10.1.2.3", 8000, True),
        ("10.0.0.0/8", "11.1.2.3", 8000, False),
        ("10.0.0.0/8", "ten.example", 8000, False),
        ("10.0.0.0/8", "::ffff:10.1.2.3", 8000, True),
        ("10.0.0.0/8", "::ffff:11.1.2.3", 8000, False),
        ("10.0.0.0/8:8000", "10.1.2.3", 8000, True),
        ("10.0.0.0/8:8000", "10.1.2.3", 22, False),
        ("10.0.0.0/8:8000-8003", "10.1.2.3", 8003, True),
        ("10.0.0.0/8:8000-8003", "10.1.2.3", 8004, False),
        ("10.0.0.7", "10.0.0.7", 1, True),
        ("10.0.0.7", "10.0.0.8", 1, False),
        ("[2001:db8::/32]:8000", "2001:db8::5", 8000, True),
        ("[2001:db8::/32]:8000", "2001:db8::5", 8001, False),
        ("2001:db8::/32", "2001:DB8::5", 1, True),
        ("::1", "::1", 1, True),
        ("worker-0.decode", "worker-0.decode", 1, True),
        ("worker-0.decode", "Worker-0.Decode.", 1, True),
        ("worker-0.decode", "evil.worker-0.decode", 1, False),
        ("worker-0.decode:8000", "worker-0.decode", 8001, False),
    ],
)
def test_an_allow_entry_admits_networks_names_and_ports(entry: str, host: str, port: int, admitted: bool) -> None:
    assert parse_allow_entry(entry).admits(host, port) is admitted


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("10.0.0.1/8", "'10.0.0.1/8' has bits set outside its mask, write 10.0.0.0/8"),
        ("10.0.0.0/40", "'10.0.0.0/40' is not a network, write it as 10.0.0.0/8 or 2001:db8::/32"),
        ("*.decode", "'*.decode' has a wildcard, write '10.0.0.0/8' or each host name in full"),
        ("http://a", "'http://a' is a URL, write only the host or network, such as '10.0.0.0/8:8000'"),
        ("a:90-80", "the port range 90-80 runs backwards, write 80-90"),
        ("[a:1]:80", "'[a:1]:80' is not an allow entry, write a host once and its ports once"),
        ("a:x", "'x' is not a port, write a number from 1 to 65535"),
        ("127.1", "'127.1' is not an address, write a host name or an IP address"),
        ("[::1", "'[::1' is not an allow entry, write IPv6 with a port as '[2001:db8::/32]:8000'"),
        ("", "'' is not an allow entry, write '10.0.0.0/8', an IP or a host name"),
        (10, "10 is not an allow entry, write '10.0.0.0/8', an IP or a host name"),
    ],
)
def test_an_allow_entry_that_would_let_more_in_than_it_says_is_refused(text: object, sentence: str) -> None:
    assert refusal(parse_allow_entry, text) == sentence


def test_what_was_read_already_is_taken_as_it_is() -> None:
    entry, address = parse_allow_entry("10.0.0.0/8:80-90"), parse_listen_addr(":1")
    assert parse_allow_entry(entry) is entry
    assert parse_listen_addr(address) is address
    assert str(entry) == "10.0.0.0/8:80-90"


def test_a_long_name_is_refused_at_once() -> None:
    """A router header's host is parsed too: no input may make the parser slow."""
    assert "is not an address" in refusal(parse_base_url, "http://" + "a" * 100_000 + "!")
