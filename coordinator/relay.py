"""The pump: bytes from a worker, through a shape, to the client.

One read, one feed, one write; no queue and no task per chunk. A client that reads slowly makes ``write`` wait, which
stops the reading, which fills the worker's socket: backpressure all the way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.context import LiveStream
    from envelope.shape import Shape


class Sink(Protocol):
    """Where the bytes go. aiohttp's StreamResponse is one."""

    async def write(self, data: bytes) -> None: ...


async def pump(source: LiveStream, shape: Shape, sink: Sink, on_content: Callable[[], None]) -> None:
    """Relay a stream to its end.

    Args:
        on_content: called once, right after the first frame with generated content was written.

    Raises:
        ApiError: the stream broke off, stalled, or was not whole; everything before that has been written.
        ConnectionError: the client is gone.
    """
    told = False
    while data := await source.read():
        out = shape.feed(data)
        if out:
            await sink.write(out)
            if not told and shape.content_seen:
                told = True
                on_content()
    if rest := shape.close():
        await sink.write(rest)
