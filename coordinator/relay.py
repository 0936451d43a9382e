"""The pump: bytes from a worker, through a shape, to the client.

Each read of the worker's socket is fed and written in the call that reports it: no queue, no task and no task switch
per chunk. A client that reads slowly makes ``put`` say so, which stops the reading, which fills the worker's socket:
backpressure all the way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from envelope.errors import LegError

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.context import LiveStream
    from envelope.shape import Shape


class Sink(Protocol):
    """Where the bytes go; ``coordinator.http.response.Response`` implements it."""

    def put(self, data: bytes) -> bool:
        """Write bytes; False when the client is behind, and ``drain`` should be awaited before there are more.

        Raises:
            ConnectionError: the client is gone.
        """

    async def drain(self) -> None:
        """Wait until the client has caught up."""


async def pump(source: LiveStream, shape: Shape, sink: Sink, on_content: Callable[[], None]) -> None:
    """Relay a stream to its end.

    Args:
        on_content: called right after each write that held generated content.

    Raises:
        ApiError: the stream broke off, stalled, or was not whole; everything before that has been written.
        ConnectionError: the client is gone.
    """

    def take(data: bytes) -> bool:
        out = shape.feed(data)
        if not out:
            return True
        room = sink.put(out)
        if shape.content_seen:
            shape.content_seen = False
            on_content()
        return room

    try:
        while not await source.push(take):
            await sink.drain()
    except LegError:
        if not _told_its_end(shape):
            raise
    shape.close()


def _told_its_end(shape: Shape) -> bool:
    """Say whether the end mark, or the worker's own error, has come: how its connection ends is no matter then."""
    try:
        shape.close()
    except LegError:
        return False
    return True
