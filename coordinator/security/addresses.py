"""Which addresses media may be fetched from: a pure rule over one address, asked of each that a name resolves to.

IPv4 has a list of what is refused. IPv6 has a list of what is let through, because most of it is not handed out.

Source: IANA special-purpose address registries (RFC 6890 and what came after); RFC 6052 for NAT64; cloud providers'
documentation for the addresses of their metadata services.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

Address = IPv4Address | IPv6Address

_PRIVATE = tuple(map(IPv4Network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")))

_REFUSED = tuple(
    map(
        IPv4Network,
        (
            "0.0.0.0/8",  # this host
            "100.64.0.0/10",  # carriers' NAT; also Alibaba's metadata, 100.100.100.200
            "127.0.0.0/8",  # loopback
            "168.63.129.16/32",  # Azure's platform services, on an address that looks public
            "169.254.0.0/16",  # link-local; also the metadata of most clouds, 169.254.169.254
            "192.0.0.0/24",  # protocol assignments; also Oracle's metadata, 192.0.0.192
            "192.0.2.0/24",  # documentation
            "192.31.196.0/24",  # AS112
            "192.52.193.0/24",  # AMT
            "192.88.99.0/24",  # 6to4 relays
            "192.175.48.0/24",  # AS112
            "198.18.0.0/15",  # benchmarks
            "198.51.100.0/24",  # documentation
            "203.0.113.0/24",  # documentation
            "224.0.0.0/4",  # multicast
            "240.0.0.0/4",  # reserved; also broadcast
        ),
    )
)

_NAT64 = IPv6Network("64:ff9b::/96")
_GLOBAL = IPv6Network("2000::/3")
# Inside what is global. All else is outside: unique-local with AWS's metadata at fd00:ec2::254, link-local, loopback,
# multicast, IPv4-mapped and -compatible addresses, site-local NAT64.
_NOT_GLOBAL = tuple(
    map(
        IPv6Network,
        (
            "2001::/23",  # protocol assignments; also Teredo, benchmarks, ORCHID
            "2001:db8::/32",  # documentation
            "2002::/16",  # 6to4, which embeds an IPv4 address and has no use left
            "2620:4f:8000::/48",  # AS112
            "3ffe::/16",  # 6bone, handed back
            "3fff::/20",  # documentation
        ),
    )
)


def refused(address: Address, *, allow_private: bool = False) -> bool:
    """Say whether media may not be fetched from an address.

    Args:
        allow_private: let the private networks of RFC 1918 through. Nothing else that is refused is ever let through.
    """
    if isinstance(address, IPv4Address):
        if any(address in network for network in _PRIVATE):
            return not allow_private
        return any(address in network for network in _REFUSED)
    if address.scope_id is not None:
        return True
    if address in _NAT64:
        # A host without IPv4 sees the whole of IPv4 here. What lies behind private ones is the translator's affair.
        return refused(IPv4Address(int(address) & 0xFFFFFFFF))
    return address not in _GLOBAL or any(address in network for network in _NOT_GLOBAL)
