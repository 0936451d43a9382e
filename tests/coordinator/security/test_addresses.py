"""Each special range is refused at both of its ends; only RFC 1918 has a flag."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.security.addresses import refused

ALWAYS = (
    "0.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "168.63.129.16/32", "169.254.0.0/16", "192.0.0.0/24", "192.0.2.0/24",
    "192.88.99.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4",
    "255.255.255.255/32", "::/128", "::1/128", "::/96", "::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b:1::/48",
    "100::/64", "2001::/32", "2001:2::/48", "2001:10::/28", "2001:20::/28", "2001:db8::/32", "2002::/16", "3fff::/20",
    "5f00::/16", "fc00::/7", "fd00:ec2::254/128", "fe80::/10", "fec0::/10", "ff00::/8",
)  # fmt: skip
PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")
PUBLIC = (
    "1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255",
    "128.0.0.0", "168.63.129.15", "168.63.129.17", "169.253.255.255", "169.255.0.0", "172.15.255.255", "172.32.0.0",
    "192.167.255.255", "192.169.0.0", "198.17.255.255", "198.20.0.0", "223.255.255.255", "2001:200::",
    "2001:4860:4860::8888", "2606:4700::1111", "2a00:1450::1", "3ffd::", "64:ff9b::808:808",
)  # fmt: skip


@pytest.mark.parametrize("network", ALWAYS)
@pytest.mark.parametrize("allow_private", [False, True])
def test_a_special_range_is_refused_whatever_the_flag_says(network: str, allow_private: bool) -> None:
    for end in (ip_network(network)[0], ip_network(network)[-1]):
        assert refused(end, allow_private=allow_private), end


@pytest.mark.parametrize("network", PRIVATE)
def test_a_private_range_is_refused_unless_the_flag_is_set(network: str) -> None:
    for end in (ip_network(network)[0], ip_network(network)[-1]):
        assert refused(end)
        assert not refused(end, allow_private=True)


@pytest.mark.parametrize("text", PUBLIC)
def test_a_public_address_is_let_through(text: str) -> None:
    assert not refused(ip_address(text))


@pytest.mark.parametrize("inside", ["127.0.0.1", "169.254.169.254", "10.0.0.1", "100.100.100.200", "0.0.0.0"])
@pytest.mark.parametrize("allow_private", [False, True])
def test_an_ipv4_address_inside_an_ipv6_one_is_refused_as_itself(inside: str, allow_private: bool) -> None:
    """For these forms the flag does not count either."""
    v4 = int(IPv4Address(inside))
    mapped, compatible, nat64 = 0xFFFF << 32 | v4, v4, 0x64FF9B << 96 | v4
    six_to_four, teredo = 0x2002 << 112 | v4 << 80, 0x20010000 << 96 | v4 ^ 0xFFFFFFFF
    for form in (mapped, compatible, nat64, six_to_four, teredo):
        assert refused(IPv6Address(form), allow_private=allow_private), IPv6Address(form)


def test_a_zone_is_refused() -> None:
    assert refused(IPv6Address("2606:4700::1%eth0"))


@given(st.ip_addresses())
def test_nothing_that_python_calls_special_is_let_through(address: IPv4Address | IPv6Address) -> None:
    if not address.is_global or address.is_multicast or address.is_reserved or address.is_loopback:
        embedded = address in ip_network("64:ff9b::/96") if address.version == 6 else False
        assert refused(address) or embedded
