"""URLs that are fetched: one spelling of each host, and every other way to write an address normalised or refused."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envelope.media_url import LONGEST, follow, parse, read_host


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("http://a.example/x", "http://a.example/x"),
        ("HTTPS://A.Example", "https://a.example/"),
        ("http://a.example.", "http://a.example/"),
        ("http://a.example:80/x", "http://a.example/x"),
        ("https://a.example:443", "https://a.example/"),
        ("https://a.example:80/", "https://a.example:80/"),
        ("http://a.example?x/../y", "http://a.example/?x/../y"),
        ("http://a.example/x?y#z", "http://a.example/x?y"),
        ("http://a.example#http://b.example/", "http://a.example/"),
        ("http://a_b.example/|[]^", "http://a_b.example/|[]^"),
        ("http://a.example/%2e%2E/%C3%BC?a=b%26c+d", "http://a.example/%2e%2E/%C3%BC?a=b%26c+d"),
        ("http://a.example/ü?ü=1", "http://a.example/%C3%BC?%C3%BC=1"),
        ("http://a.example/<b>\"'", "http://a.example/%3Cb%3E%22'"),
        ("http://bücher.example/", "http://xn--bcher-kva.example/"),
        ("http://BÜCHER.example/", "http://xn--bcher-kva.example/"),
        ("http://xn--bcher-kva.example/", "http://xn--bcher-kva.example/"),
        ("http://ｅｘample.com/", "http://example.com/"),
        ("http://example。com/", "http://example.com/"),
        ("http://localhost:8000/", "http://localhost:8000/"),
        ("http://192.0.2.1:8080/", "http://192.0.2.1:8080/"),
        ("http://192.0.2.1./", "http://192.0.2.1/"),
        ("http://１２７.０.０.１/", "http://127.0.0.1/"),
        ("http://127。0．0｡1/", "http://127.0.0.1/"),
        ("http://①②⑦.0.0.1/", "http://127.0.0.1/"),
        ("http://[2001:DB8::0:1]/", "http://[2001:db8::1]/"),
        ("http://[64:ff9b::127.0.0.1]:8/", "http://[64:ff9b::7f00:1]:8/"),
    ],
)
def test_a_url_is_read_in_one_way(text: str, same: str) -> None:
    url = parse(text)
    assert str(url) == same
    assert parse(same) == url
    if url.address is not None:
        assert url.host == str(url.address) and str(url) == url.at(url.address).replace(":80/", "/")


NUMBER = "its URL's host is a number; write an IPv4 address as 192.0.2.1"
NO_NAME = "its URL's host is not a valid host name"
NO_URL = "its URL is neither an http(s) URL nor a data: URI"
ODD = "its URL holds white space, a control character or a backslash; percent-encode it"
PORT = "its URL's port is not a number from 1 to 65535"
CREDENTIALS = "its URL holds credentials, which are not sent; use a signed URL, or a data: URI"
PERCENT = "its URL's host is percent-encoded or has a zone id"
NO_V6 = "its URL's host is not a valid IPv6 address"

REFUSED = {
    "http://2130706433/": NUMBER,
    "http://0177.0.0.1/": NUMBER,
    "http://0x7f.1/": NUMBER,
    "http://0x7f000001/": NUMBER,
    "http://127.1/": NUMBER,
    "http://127.0.0.01/": NUMBER,
    "http://127.0.0.256/": NUMBER,
    "http://1.2.3.4.5/": NUMBER,
    "http://example.0x/": NUMBER,
    "http://0/": NUMBER,
    "http://１２７.1/": NUMBER,
    "http://user@a.example/": CREDENTIALS,
    "http://user:secret@a.example/": CREDENTIALS,
    "http://a.example:80@127.0.0.1/": CREDENTIALS,
    "http://@a.example/": CREDENTIALS,
    "http://a.example%2F@b.example/": CREDENTIALS,
    "http://%31%32%37.0.0.1/": PERCENT,
    "http://ex%61mple.com/": PERCENT,
    "http://a.example%00.b.example/": PERCENT,
    "http://[fe80::1%25eth0]/": PERCENT,
    "http://[fe80::1%eth0]/": PERCENT,
    "http://[::1": PORT,
    "http://::1/": PORT,
    "http://[127.0.0.1]/": NO_V6,
    "http://[::1]a:80/": NO_V6,
    "http://[v1.x]/": NO_V6,
    "http://[]/": NO_V6,
    "http:///": "its URL names no host",
    "http://": "its URL names no host",
    "http://:80/": "its URL names no host",
    "http://?x": "its URL names no host",
    "http://./": NO_NAME,
    "http://a..b/": NO_NAME,
    "http://a.example../": NO_NAME,
    "http://.a.example/": NO_NAME,
    "http://-a.example/": NO_NAME,
    "http://a,b/": NO_NAME,
    "http://a<b/": NO_NAME,
    "http://xn--/": NO_NAME,
    "http://ａ‥b/": NO_NAME,
    "http://" + "a" * 64 + ".example/": NO_NAME,
    "http://" + "a." * 130 + "example/": NO_NAME,
    "http://" + "ü" * 300 + "/": NO_NAME,
    "http://faß.example/": "its URL's host is read in two ways; write it in punycode (xn--)",
    "http://a.example:/": PORT,
    "http://a.example:0/": PORT,
    "http://a.example:65536/": PORT,
    "http://a.example:+80/": PORT,
    "http://a.example:８０/": PORT,
    "http://a.example:80:80/": PORT,
    " http://a.example/": ODD,
    "http://a.example/\n": ODD,
    "http://a.exa\tmple/": ODD,
    "http://a.example/a b": ODD,
    "http://a.example/\r\nHost:b": ODD,
    "http://a.example\\@b.example/": ODD,
    "http:\\\\a.example/": ODD,
    "http://a.example/\x00": ODD,
    "http://a.example/\x85": ODD,
    "http://a.example/\u2028": ODD,
    "http://a\u200b.example/": ODD,
    "http://a.example/\ud800": ODD,
    "http:/a.example/": NO_URL,
    "http:a.example": NO_URL,
    "//a.example/": NO_URL,
    "/x": NO_URL,
    "a.example": NO_URL,
    "": NO_URL,
    "ftp://a.example/": NO_URL,
    "file:///etc/passwd": NO_URL,
    "gopher://a.example/": NO_URL,
    "javascript:alert(1)": NO_URL,
    "httpsx://a.example/": NO_URL,
    "http://a.example/" + "x" * LONGEST: f"its URL is longer than {LONGEST} characters",
}


@pytest.mark.parametrize(("text", "sentence"), REFUSED.items(), ids=[text[:40] for text in REFUSED])
def test_what_can_be_read_in_two_ways_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        parse(text)


def test_a_refusal_does_not_repeat_the_url() -> None:
    """It may be signed, and it ends up in answers and logs."""
    for text in ("http://user:hunter2@a.example/", "http://hunter2..x/", "ftp://hunter2"):
        with pytest.raises(ValueError) as caught:
            parse(text)
        assert "hunter2" not in str(caught.value)


BASE = parse("https://a.example/b/c?d")


@pytest.mark.parametrize(
    ("location", "to"),
    [
        ("/x", "https://a.example/x"),
        ("x", "https://a.example/b/x"),
        ("../../../x", "https://a.example/x"),
        ("?q", "https://a.example/b/c?q"),
        ("", "https://a.example/b/c?d"),
        ("#f", "https://a.example/b/c?d"),
        ("//b.example/x", "https://b.example/x"),
        ("HTTPS://B.example:443", "https://b.example/"),
        ("https://127.0.0.1/", "https://127.0.0.1/"),
    ],
)
def test_a_redirect_is_followed_as_a_browser_would(location: str, to: str) -> None:
    assert str(follow(BASE, location)) == to


@pytest.mark.parametrize(
    "location",
    ["\t/x", "/a b", "/x\n", "http:///", "//user@b.example/", "ftp://b.example/", "file:///x", "//127.1/", "/x\ud800"],
)
def test_a_redirect_to_what_would_be_refused_is_refused(location: str) -> None:
    with pytest.raises(ValueError, match=r"redirects to something that is no valid http\(s\) URL"):
        follow(BASE, location)


def test_a_redirect_from_https_to_http_is_refused() -> None:
    with pytest.raises(ValueError, match="redirects from https to http"):
        follow(BASE, "http://a.example/")
    assert str(follow(parse("http://a.example/"), "https://a.example/x")) == "https://a.example/x"


@pytest.mark.parametrize(
    ("scheme", "port", "sent"),
    [("http", "", "a.example"), ("http", ":443", "a.example:443"), ("https", ":443", "a.example")],
)
def test_the_host_header_has_a_port_that_is_not_the_schemes_own(scheme: str, port: str, sent: str) -> None:
    assert parse(f"{scheme}://a.example{port}/").host_port == sent


def test_the_host_can_be_put_in_an_addresss_place() -> None:
    url = parse("https://a.example/x?y")
    assert url.at(IPv4Address("192.0.2.1")) == "https://192.0.2.1:443/x?y"
    assert url.at(IPv6Address("2001:db8::1")) == "https://[2001:db8::1]:443/x?y"


def _is_ip(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


NUMERIC = ["127", "0x7f", "0177", "1", "0", "8", "2130706433", "１", "②", "::", "::1", "ffff"]
NAMED = ["a", "example", "xn--", "ß", "ü", "-", "_", "%31", "\u200d"]
MARKS = [".", "..", "。", "．", "%", "@", ":", "/", "\\", "?", "#", "[", "]", " ", "\t", "\n"]
PIECES = st.sampled_from([*NUMERIC, *NAMED, *MARKS])


@given(st.lists(PIECES, max_size=8).map("".join) | st.text(max_size=12), st.sampled_from(["", "/", ":80/x?y", "#z"]))
def test_whatever_passes_is_plain_and_reads_the_same_again(host: str, rest: str) -> None:
    """No URL that passes holds a byte that another reader could take otherwise, or a number that is not an address."""
    try:
        url = parse(f"http://{host}{rest}")
    except ValueError:
        return
    text = str(url)
    assert re.fullmatch(r"http://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]+)?/[!-~]*", text)
    assert "@" not in text.split("/")[2] and "\\" not in text
    assert parse(text) == url
    assert _is_ip(url.host) or not re.fullmatch(r"[0-9]+|0x[0-9a-f]*", url.host.rpartition(".")[2])
    assert _is_ip(url.host) == (url.address is not None)


@given(st.ip_addresses(v=4))
def test_an_address_in_its_usual_form_stays_itself(address: IPv4Address) -> None:
    assert read_host(str(address)) == (str(address), address)
