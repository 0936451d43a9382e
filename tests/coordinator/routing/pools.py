"""Pools to choose from, and requests to choose for, without a network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coordinator.context import RequestContext
from coordinator.routing.choice import pool_router
from coordinator.routing.members import Members
from coordinator.settings.pools import Pool
from envelope.formats import Format

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.routing.pool import PoolRouter

URLS = ["http://a", "http://b", "http://c"]


def made(
    policy: str, urls: Sequence[str] = URLS, role: str = "decode", *, counts_uncached: bool = False, **keys: Any
) -> PoolRouter:
    """Return the router of a pool as the file would describe it."""
    pool = Pool.model_validate({"endpoints": URLS, "policy": policy, **keys})
    return pool_router(role, pool, Members(urls), None, counts_uncached=counts_uncached)


def asked(token_ids: Sequence[int] = (), body: Any = None, api: Format = Format.CHAT, **slots: Any) -> RequestContext:
    """Return a request with a rendered prompt, or, with ``body``, one that is still text."""
    if body is None:
        slots.setdefault("rendered", {"token_ids": list(token_ids), "model": "m"})
    return RequestContext("req", "req-1", api, body or {"model": "m"}, (), {}, False, **slots)


def letters(router: PoolRouter, times: int, ctx: RequestContext | None = None) -> str:
    """Return the last letters of the workers that so many legs are sent to one after the other."""
    ctx, found = ctx or asked(), ""
    for _ in range(times):
        if (worker := router.pick(ctx)) is not None:
            router.sending(ctx, worker)
            found += worker.url[-1]
    return found
