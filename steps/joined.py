"""Decode's answer, while the answer of the prefill beside it is still out."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.context import Headers, LiveStream
    from envelope.errors import ApiError

# Prefill has ended when decode has its first token; what is still to come is the rest of an answer nobody reads.
_GRACE_S = 1.0


class Joined:
    """A stream that ends with an error when prefill fails meanwhile. Implements ``coordinator.context.LiveStream``."""

    def __init__(self, stream: LiveStream, prefilling: asyncio.Task[Any]) -> None:
        self._stream = stream
        self._prefilling = prefilling
        self._whole = False

    @property
    def headers(self) -> Headers:
        return self._stream.headers

    @property
    def first_event(self) -> bytes:
        return self._stream.first_event

    async def push(self, take: Callable[[bytes], bool]) -> bool:
        if self._prefilling.done():
            self._prefilling.result()
            whole = await self._stream.push(take)
        else:
            whole = await self._push_beside(take)
        self._whole |= whole
        return whole

    def ended(self, error: ApiError | None) -> None:
        prefilling = self._prefilling
        over = prefilling.done() and not prefilling.cancelled()
        if error is None or not over or prefilling.exception() is not error:  # which has been told of its own worker
            self._stream.ended(error)

    async def aclose(self) -> None:
        await self._stream.aclose()
        if self._whole:
            await settle(self._prefilling)
        else:
            await end(self._prefilling)

    async def _push_beside(self, take: Callable[[bytes], bool]) -> bool:
        pushing = asyncio.get_running_loop().create_task(self._stream.push(take))  # owned: ended below
        try:
            await asyncio.wait((pushing, self._prefilling), return_when=asyncio.FIRST_COMPLETED)
            if not pushing.done():
                self._prefilling.result()
            return await pushing
        finally:
            await end(pushing)


async def settle(prefilling: asyncio.Task[Any]) -> None:
    """Let a prefill whose decode has answered come to its end, which is no longer anybody's concern."""
    await asyncio.wait((prefilling,), timeout=_GRACE_S)
    await end(prefilling)


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel what still runs, and take note of how everything ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
