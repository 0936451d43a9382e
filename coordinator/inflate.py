"""Undoes gzip and deflate in bounded steps: a few bytes may be packed from very many."""

from __future__ import annotations

import asyncio
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from multidict import CIMultiDict

# A step gives at most so many bytes; others have their turn in between.
_STEP = 256 * 1024

# A packed file may have members of 64 KiB and less; each of them costs more than its bytes.
_MEMBERS = 4096

# What is undone.
PACKED = frozenset(("gzip", "x-gzip", "deflate"))


class BodyBroken(Exception):
    """The rest of a body cannot be read: its framing or its encoding is wrong, or its sender has left."""


def encoding_of(headers: CIMultiDict[str]) -> str:
    """Return what a body is packed in, in lower case: "" is nothing, and ``identity`` is nothing either."""
    if (values := headers.getall("Content-Encoding", None)) is None:
        return ""
    named = [each.strip() for value in values for each in value.lower().split(",")]
    return ", ".join(each for each in named if each not in ("", "identity"))


class Inflater:
    """One body's way back. Source: RFC 9110, section 8.4.1; RFC 1952, section 2.2.

    Args:
        encoding: of ``PACKED``.
    """

    def __init__(self, encoding: str) -> None:
        self._gzip = encoding != "deflate"
        self._inflate: zlib._Decompress | None = None
        self._members = 0
        self._packed = b""

    async def read(self, more: Callable[[], Awaitable[bytes]]) -> bytes:
        """Return the next inflated bytes, ``b""`` at the end.

        Args:
            more: returns the next bytes as they came, ``b""`` at their end.

        Raises:
            BodyBroken, and whatever ``more`` raises; another ``read`` goes on where this one was.
        """
        while True:
            if self._packed:
                await asyncio.sleep(0)
            else:
                self._packed = await more()
                if not self._packed:
                    self.end()
                    return b""
            inflated, self._packed = self.step(self._packed)
            if inflated:
                return inflated

    def step(self, data: bytes) -> tuple[bytes, bytes]:
        """Return some inflated bytes, and what of the data is left for the next step.

        Raises:
            BodyBroken
        """
        if self._inflate is None:
            self._members += 1
            if self._members > _MEMBERS:
                raise BodyBroken("what was packed has too many members")
            self._inflate = zlib.decompressobj(wbits=self._wbits(data))
        try:
            inflated = self._inflate.decompress(data, _STEP)
            if len(inflated) == _STEP and not self._inflate.unconsumed_tail:
                inflated += self._inflate.decompress(b"", _STEP)  # the last bits may be read, and not yet undone
        except zlib.error as error:
            raise BodyBroken from error
        rest = self._inflate.unconsumed_tail
        if self._inflate.eof and (rest := self._inflate.unused_data):
            if not self._gzip:
                raise BodyBroken("something follows the end of what was packed")
            self._inflate = None  # a file of several members
        return inflated, rest

    def end(self) -> None:
        """
        Raises:
            BodyBroken: it was cut off.
        """
        if self._inflate is not None and not self._inflate.eof:
            raise BodyBroken("what was packed has no end")

    def _wbits(self, data: bytes) -> int:
        if self._gzip:
            return zlib.MAX_WBITS | 16
        # Some send deflate without the zlib header that it is to have.
        return zlib.MAX_WBITS if data[0] & 0x0F == 8 else -zlib.MAX_WBITS
