"""Ports for servers that are told where to listen."""

from __future__ import annotations

import contextlib
import random
import socket

# Below those that the kernel gives to whoever does not care: none of these is taken while a server starts.
# Every other one: NIXL's side channel of a worker's second data-parallel rank is the next port.
_LEFT = random.SystemRandom().sample(range(12000, 32000, 2), 4000)


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on, and that were not returned before."""
    found: list[int] = []
    while len(found) < count:
        port = _LEFT.pop()
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
    return found
