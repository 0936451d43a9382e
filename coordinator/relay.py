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

    from aiohttp import web

    from coordinator.context import LiveStream
    from envelope.shape import Shape

# As many bytes may wait for a client before its worker is stopped; it is the high-water mark of asyncio's transports.
_HIGH_WATER = 64 * 1024


class Sink(Protocol):
    """Where the bytes go."""

    def put(self, data: bytes) -> bool:
        """Write bytes; False when the client is behind, and ``drain`` should be awaited before there are more.

        Raises:
            ConnectionError: the client is gone.
        """

    async def drain(self) -> None:
        """Wait until the client has caught up."""


class ClientSink:
    """Writes to the client's transport, past aiohttp's response, whose writing costs a coroutine per chunk.

    The response's head has to be prepared; its last chunk stays ``write_eof``'s to send.
    """

    __slots__ = ("_chunked", "_transport", "_writer")

    def __init__(self, request: web.Request, response: web.StreamResponse) -> None:
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the client is gone")
        self._transport = transport
        self._writer = request.writer
        self._chunked = "Transfer-Encoding" in response.headers  # an HTTP/1.0 client gets bytes until the end
        self._writer.send_headers()

    def put(self, data: bytes) -> bool:
        transport = self._transport
        if transport.is_closing():
            raise ConnectionResetError("the client is gone")
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        transport.write(data)
        self._writer.output_size += len(data)  # what the heartbeat goes by
        return transport.get_write_buffer_size() < _HIGH_WATER

    async def drain(self) -> None:
        await self._writer.drain()


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
    if rest := shape.close():
        sink.put(rest)


def _told_its_end(shape: Shape) -> bool:
    """Say whether the end mark, or the worker's own error, has come: how its connection ends is no matter then."""
    try:
        shape.close()
    except LegError:
        return False
    return True
