"""A worker's answer that came packed, which we never ask for: read as any other, and inflated in bounded steps."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from coordinator.inflate import PACKED, BodyBroken, Inflater, encoding_of
from coordinator.workers.wire import Broken

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.workers.wire import Connection


def body_of(connection: Connection) -> Connection | Inflated:
    """Return what the body of an answer is read from, whose head has come."""
    encoding = encoding_of(connection.headers)
    return Inflated(connection, encoding) if encoding in PACKED else connection


class Inflated:
    """Reads a body as ``wire.Connection`` does."""

    def __init__(self, connection: Connection, encoding: str) -> None:
        self._connection = connection
        self._inflater = Inflater(encoding)

    async def read(self, ends_at: float | None = None) -> bytes:
        """Return the next bytes of the body, ``b""`` at its end.

        Raises:
            Broken, TimeoutError
        """
        try:
            return await self._inflater.read(partial(self._connection.read, ends_at))
        except BodyBroken as error:
            raise Broken("the answer's Content-Encoding is not what it is in") from error

    async def push(self, take: Callable[[bytes], bool]) -> bool:
        """Give the body to ``take`` as it comes; True at its end, False as soon as ``take`` returns False.

        Raises:
            Broken, and whatever ``take`` raises.
        """
        while part := await self.read():
            if not take(part):
                return False
        return True
