"""Reads a request off the wire: size, encoding, media type, JSON; each refusal before the next costs anything."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from envelope.errors import BadRequest, ReadTimeout, TooLarge, UnsupportedMedia
from envelope.json_codec import JSONDecodeError
from envelope.written import loads_body

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from coordinator.context import Headers
    from envelope.formats import Format

# What aiohttp inflates by itself. Brotli and zstd depend on what else is installed, so they are not offered.
_ENCODINGS = ("", "identity", "gzip", "deflate")


class Intake:
    """The limits of a request's body.

    Args:
        max_body_bytes: largest body, after inflating.
        read_timeout_s: time for the whole body to arrive; None is no limit.
    """

    def __init__(self, max_body_bytes: int, read_timeout_s: float | None) -> None:
        self._max_body_bytes = max_body_bytes
        self._read_timeout_s = read_timeout_s

    async def read_json(self, request: web.Request, api: Format) -> Any:
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

    def check_head(self, request: web.BaseRequest) -> None:
        """Refuse by the request's head alone, before its body is waited for."""
        if (request.content_length or 0) > self._max_body_bytes:
            raise self._too_large()
        if request.content_type != "application/json":
            raise UnsupportedMedia(f"Content-Type is {request.content_type}; send the body as application/json")
        self._check_encoding(request)

    def _check_encoding(self, request: web.BaseRequest) -> None:
        if (encoding := request.headers.get("Content-Encoding", "").strip().lower()) not in _ENCODINGS:
            raise UnsupportedMedia(f"Content-Encoding {encoding} is not understood; send gzip, deflate, or none")

    async def parts(self, request: web.Request) -> AsyncIterator[bytes]:
        """Yield the body as it comes, of whatever kind it is.

        Raises:
            UnsupportedMedia, TooLarge, ReadTimeout, BadRequest.
        """
        if (request.content_length or 0) > self._max_body_bytes:
            raise self._too_large()
        self._check_encoding(request)
        ends_at = None if self._read_timeout_s is None else asyncio.get_running_loop().time() + self._read_timeout_s
        left, parts = self._max_body_bytes, request.content.iter_any()
        while True:
            with self._told():
                async with asyncio.timeout_at(ends_at):
                    part = await anext(parts, None)
            if part is None:
                return
            left -= len(part)
            if left < 0:
                raise self._too_large()
            yield part

    async def _read(self, request: web.Request) -> bytes:
        content = request.content
        if content.is_eof() and content.exception() is None:  # it came with its head, as most do: nothing to wait for
            raw = content.read_nowait()
            if len(raw) > self._max_body_bytes:
                raise self._too_large()
            return raw
        parts, size, inflates = [], 0, "Content-Encoding" in request.headers
        with self._told():
            async with asyncio.timeout(self._read_timeout_s):
                async for part in content.iter_any():
                    size += len(part)
                    if size > self._max_body_bytes:
                        raise self._too_large()
                    parts.append(part)
                    if inflates:  # the next part needs no more bytes from the client, and others have their turn
                        await asyncio.sleep(0)
        return b"".join(parts)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Say what is wrong with a body that does not come, or not as it should."""
        try:
            yield
        except TimeoutError:
            raise ReadTimeout(
                f"the request body did not arrive within {self._read_timeout_s:g} s", headers=_CLOSE
            ) from None
        except (HttpProcessingError, web.RequestPayloadError, aiohttp.ClientPayloadError):
            raise BadRequest(
                "the request body is broken: its encoding or its framing is wrong", headers=_CLOSE
            ) from None

    def _too_large(self) -> TooLarge:
        return TooLarge(f"the request body is larger than {self._max_body_bytes // 2**20} MB", headers=_CLOSE)


# The rest of the body is not read, or cannot be told from the next request: the connection cannot be used again.
_CLOSE = {"Connection": "close"}


def header_pairs(request: web.BaseRequest) -> Headers:
    """Return the request's headers as they came, repeated ones in their order."""
    return tuple(request.headers.items())


def single(request: web.BaseRequest, name: str) -> str | None:
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
