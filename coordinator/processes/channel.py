"""What a supervisor and its serving processes say to one another, over a pair of sockets that nobody else has.

A message is a word and what belongs to it, pickled behind its length. Both ends are the same program, and the pair is
made before the fork: no name in a file system, nothing to clean up, and an end that closes says that its owner is gone.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator

Message = tuple[str, Any]

# What a process is asked to tell of itself: what it counts, and what the status page shows.
COUNTS, STATUS = "counts", "status"

_LENGTH = struct.Struct("!I")
_PIECE = 2**16


def pack(word: str, what: object = None) -> bytes:
    raw = pickle.dumps((word, what))
    return _LENGTH.pack(len(raw)) + raw


class Line:
    """The supervisor's end. It waits, but never for long: a process that hangs must not hold up the others.

    Raises:
        OSError: of ``send`` and ``receive``: the other end is gone, or takes nothing.
    """

    def __init__(self, end: socket.socket, send_within_s: float) -> None:
        self._end = end
        self._send_within_s = send_within_s
        self._got = bytearray()

    def fileno(self) -> int:
        return self._end.fileno()

    def close(self) -> None:
        self._end.close()

    def send(self, word: str, what: object = None) -> None:
        self._end.settimeout(self._send_within_s)
        self._end.sendall(pack(word, what))

    def receive(self, until: float = 0.0) -> Message | None:
        """Return the next message; None if it is not whole by then (monotonic seconds)."""
        while (message := self._whole()) is None:
            self._end.settimeout(max(until - time.monotonic(), 0.0))
            try:
                piece = self._end.recv(_PIECE)
            except (BlockingIOError, TimeoutError):
                return None
            if not piece:
                raise ConnectionResetError("the process has ended")
            self._got += piece
        return message

    def _whole(self) -> Message | None:
        if len(self._got) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._got)[0]
        if len(self._got) < end:
            return None
        message: Message = pickle.loads(memoryview(self._got)[_LENGTH.size : end])
        del self._got[:end]
        return message


class Channel:
    """The process's end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, end: socket.socket) -> Channel:
        return cls(*await asyncio.open_connection(sock=end))

    async def send(self, word: str, what: object = None) -> None:
        """Send a message; one that nobody is left to read is lost."""
        try:
            self._writer.write(pack(word, what))
            await self._writer.drain()
        except ConnectionError:
            pass  # ``messages`` ends, which is where it is dealt with

    def close(self) -> None:
        self._writer.close()

    async def messages(self) -> AsyncIterator[Message]:
        """Yield what the supervisor says, until it is gone."""
        try:
            while True:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                yield pickle.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return
