"""Reads a request off the wire: size, encoding, media type, JSON; each refusal before the next costs anything."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from coordinator.inflate import PACKED, BodyBroken, encoding_of
from envelope.errors import BadRequest, ReadTimeout, TooLarge, UnsupportedMedia
from envelope.json_codec import JSONDecodeError
from envelope.written import loads_body

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from coordinator.http.request import Request
    from envelope.formats import Format


class Intake:
    """The limits of a request's body.

    Args:
        max_body_bytes: largest body, after inflating.
        read_timeout_s: time for the whole body to arrive; None is no limit.
    """

    def __init__(self, max_body_bytes: int, read_timeout_s: float | None) -> None:
        self._max_body_bytes = max_body_bytes
        self._read_timeout_s = read_timeout_s

    async def read_json(self, request: Request, api: Format) -> Any:
        """Return the parsed body of a request to an API.

        Raises:
            UnsupportedMedia, TooLarge, ReadTimeout, BadRequest.
        """
        self.check_head(request)
        raw = await self._read(request)
        try:
            return loads_body(api, raw)
        except (JSONDecodeError, RecursionError) as error:
            raise BadRequest(f"the request body is not JSON: {_where(error)}") from None

    def check_head(self, request: Request) -> None:
        """Refuse by the request's head alone, before its body is waited for."""
        if (request.content_length or 0) > self._max_body_bytes:
            raise self._too_large()
        if request.content_type != "application/json":
            found = request.content_type or "missing"
            raise UnsupportedMedia(f"Content-Type is {found}; send the body as application/json")
        _encoding(request)

    async def parts(self, request: Request) -> AsyncIterator[bytes]:
        """Yield the body as it comes, of whatever kind it is.

        Raises:
            UnsupportedMedia, TooLarge, ReadTimeout, BadRequest.
        """
        if (request.content_length or 0) > self._max_body_bytes:
            raise self._too_large()
        parts, left = request.body.parts(_encoding(request)), self._max_body_bytes
        ends_at = None if self._read_timeout_s is None else asyncio.get_running_loop().time() + self._read_timeout_s
        while True:
            try:
                async with asyncio.timeout_at(ends_at):
                    part = await anext(parts, None)
            except TimeoutError:
                told = f"the request body did not arrive within {self._read_timeout_s:g} s"
                raise ReadTimeout(told, headers=_CLOSE) from None
            except BodyBroken:
                told = "the request body is broken: its encoding or its framing is wrong"
                raise BadRequest(told, headers=_CLOSE) from None
            if part is None:
                return
            left -= len(part)
            if left < 0:
                raise self._too_large()
            yield part

    async def _read(self, request: Request) -> bytes:
        if request.body.complete and "Content-Encoding" not in request.headers:  # it came with its head, as most do
            raw = request.body.take()
            if len(raw) > self._max_body_bytes:
                raise self._too_large()
            return raw
        return b"".join([part async for part in self.parts(request)])

    def _too_large(self) -> TooLarge:
        return TooLarge(f"the request body is larger than {self._max_body_bytes // 2**20} MB", headers=_CLOSE)


# The rest of the body is not read, or cannot be told from the next request: the connection cannot be used again.
_CLOSE = {"Connection": "close"}


def _encoding(request: Request) -> str:
    """
    Raises:
        UnsupportedMedia
    """
    encoding = encoding_of(request.headers)
    if encoding and encoding not in PACKED:
        raise UnsupportedMedia(f"Content-Encoding {encoding} is not understood; send gzip, deflate, or none")
    return encoding


def single(request: Request, name: str) -> str | None:
    """Return the one value of a routing header.

    Raises:
        BadRequest: it was sent more than once, and it would be a guess which one is meant.
    """
    values = request.headers.getall(name, [])
    if len(values) > 1:
        raise BadRequest(f"the header {name} was sent {len(values)} times; send it once", param=name)
    return values[0] if values else None


def _where(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= 200 else text[:197] + "..."
