"""The way to the workers as one leg of a pair has it: what ties the legs is put on its body on the way out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from envelope.errors import LegError
from envelope.formats import PATHS, Format
from envelope.pairing import put

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from coordinator.context import LiveStream, RequestContext
    from coordinator.step import Bootstrap, Leg, MediaFetcher, Parsers, Peer, Reply, Upstream
    from envelope.connectors import KvConnector


class Again(Exception):
    """Carries a failure past what the prefill step does about it, since another pair of workers may do better."""

    def __init__(self, error: LegError) -> None:
        super().__init__(error.message)
        self.error = error


class Tied:
    """Sends legs that are never sent again by themselves. Implements ``coordinator.step.Upstream``.

    Args:
        fields: this leg's half of the pair.
        changes: what else the leg has that its step does not know of.
        again: a failure after which another pair may be tried is raised as Again.
    """

    def __init__(
        self,
        upstream: Upstream,
        kv: KvConnector,
        fields: Mapping[str, Any],
        changes: dict[str, Any],
        *,
        again: bool = False,
    ) -> None:
        self._upstream = upstream
        self._kv = kv
        self._fields = fields
        self._changes = changes
        self._again = again

    @property
    def media(self) -> MediaFetcher:
        return self._upstream.media

    @property
    def bootstrap(self) -> Bootstrap:
        return self._upstream.bootstrap

    @property
    def parsers(self) -> Parsers | None:
        return self._upstream.parsers

    def serves(self, ctx: RequestContext, role: str) -> bool:
        return self._upstream.serves(ctx, role)

    def uncached_tokens(self, ctx: RequestContext, role: str, most: int) -> int | None:
        return None  # settled for both legs, before either began

    def choose(self, ctx: RequestContext, role: str, needs: str = "") -> Peer:
        return self._upstream.choose(ctx, role, needs)

    async def post_json(self, ctx: RequestContext, leg: Leg, *, accept: tuple[int, ...] = ()) -> Reply:
        try:
            return await self._upstream.post_json(ctx, self._tied(leg), accept=accept)
        except LegError as error:
            if self._again and error.retryable and error.elsewhere:
                raise Again(error) from error
            raise

    async def stream(self, ctx: RequestContext, leg: Leg, *, accept: tuple[int, ...] = ()) -> LiveStream | Reply:
        return await self._upstream.stream(ctx, self._tied(leg), accept=accept)

    def _tied(self, leg: Leg) -> Leg:
        generate = leg.path == PATHS[Format.GENERATE]
        body = put(self._kv, leg.body, self._fields, generate=generate) if self._fields else leg.body
        return replace(leg, body=body, tied=True, **self._changes)
