"""The ports that several processes are going to listen on, held by the process that starts them."""

from __future__ import annotations

import socket
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from coordinator.settings.units import ListenAddr


@contextmanager
def reserve(listen: ListenAddr, metrics_port: int | None) -> Iterator[tuple[int, list[socket.socket]]]:
    """Bind the ports without listening: nobody else can have them, and no connection comes here.

    Gives the main port, which the system chose where the file has 0, and the sockets.

    Raises:
        OSError: a port is taken, or not ours to bind; the sentence has the address, as asyncio's has.
    """
    with ExitStack() as stack:
        held = [stack.enter_context(end) for end in _bound(listen.host, listen.port)]
        port: int = held[0].getsockname()[1]
        if metrics_port is not None and metrics_port > 0:
            held += [stack.enter_context(end) for end in _bound(listen.host, metrics_port)]
        yield port, held


def _bound(host: str | None, port: int) -> list[socket.socket]:
    ends: list[socket.socket] = []
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, *_, address in dict.fromkeys(infos):
        try:
            if port:
                # With SO_REUSEPORT alone, another coordinator's port would be shared with it and nobody told.
                _bind(family, address, shared=False).close()
            ends.append(_bind(family, (address[0], port, *address[2:]), shared=True))
        except OSError as error:
            for end in ends:
                end.close()
            told = (error.strerror or str(error)).lower()
            raise OSError(error.errno, f"error while attempting to bind on address {address!r}: {told}") from None
        port = ends[0].getsockname()[1]
    return ends


def _bind(family: int, address: tuple[object, ...], *, shared: bool) -> socket.socket:
    end = socket.socket(family, socket.SOCK_STREAM)
    try:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            end.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        end.bind(address)
    except OSError:
        end.close()
        raise
    return end
