"""The port of a server that is gone."""

from __future__ import annotations

import socket


def plug(port: int) -> socket.socket:
    """Hold a port that nobody listens on any more: else it may be another server's by the time that a client comes."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", port))
    return held
