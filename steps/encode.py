"""encode: each piece of a request's media becomes an embedding on an encode worker, for prefill to fetch.

Sets ``ctx.ec_params``: by hash, where the embeddings are. One leg for each distinct piece, several at a time; text
needs none. What the client rendered itself (the generate API) is left to prefill, which was sent its tensors.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from pydantic import Field

from coordinator.settings.units import Duration
from coordinator.step import Leg, PlanRow
from envelope import features
from envelope.ec_transfer import EC_CONNECTORS, EntriesConflict, EntryMissing, merge, read_entries
from envelope.errors import LegError, LegFailed, LegRejected
from envelope.formats import PATHS, Format
from envelope.legs import encode_generate, encode_openai
from envelope.media_items import check_kinds, hashes_of, media_items
from steps.params import LegParams

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from coordinator.context import RequestContext
    from coordinator.step import PipelineSettings, Upstream
    from envelope.json_codec import Json

_NO_LEG = {
    Format.COMPLETIONS: "completions clients send text",
    Format.GENERATE: "prefill encodes what clients have rendered themselves",
}


class Params(LegParams):
    """llm-d's parameters of the step, and the time limits of each of its legs."""

    first_byte_timeout: Duration | None = Field(
        default=60.0, description="until one item's answer begins; 0 is no limit"
    )
    max_parallel: int = Field(default=8, ge=1, description="encode legs of one request at a time")
    use_openai_format: bool | None = Field(
        default=None, description="wire format of these legs; unset inherits pipeline.use_openai_format"
    )
    ec_connector: str | None = Field(default=None, description="overrides pipeline.ec_connector for this step")


class _Item(NamedTuple):
    """One piece of media that is to be encoded: the leg's body, and its hash where the renderer has named it."""

    body: Json
    hash: str | None


class Encode:
    """Fan out over the media, and keep what prefill needs to find the results."""

    type: ClassVar[str] = "encode"
    role: ClassVar[str] = "encode"

    def __init__(self, params: Params, settings: PipelineSettings) -> None:
        self.params = params
        self._settings = settings
        openai = settings.use_openai_format if params.use_openai_format is None else params.use_openai_format
        # The chat route has a place for one piece of media, whatever API the client speaks.
        self._format = Format.CHAT if openai else Format.GENERATE
        self._ec = EC_CONNECTORS[params.ec_connector] if params.ec_connector else settings.ec
        self._limits = params.limits()

    def admit(self, ctx: RequestContext) -> None:
        check_kinds(media_items(ctx.api, ctx.body))

    async def run(self, ctx: RequestContext, upstream: Upstream) -> str:
        items = list(self._items(ctx))
        if not items:
            return "skipped"
        if not upstream.serves(ctx, self.role):
            self._settings.events.encode_skipped("no_worker_named")
            return "skipped"
        found = await self._encode(ctx, upstream, items)
        try:
            ctx.ec_params = merge(entries for entries in found if entries) or None
        except EntriesConflict as conflict:
            raise LegFailed(self.type, f"encode workers contradict one another: {conflict}") from conflict
        return "failed_over" if None in found else "ok"

    def plan(self, api: Format) -> PlanRow:
        if note := _NO_LEG.get(api):
            return PlanRow(api, self.type, None, None, None, (note,))
        notes = ("one leg for each piece of media", f"results by {self._ec.name}")
        return PlanRow(api, self.type, self.role, self._format, PATHS[self._format], notes)

    def _items(self, ctx: RequestContext) -> Iterator[_Item]:
        """Yield each distinct piece of media."""
        if ctx.api in _NO_LEG:
            return
        rendered = ctx.rendered or {}
        named = features.check(rendered.get("features"), len(rendered.get("token_ids", ())), interleaved=True)
        if self._format is Format.GENERATE:
            for item in {item.hash: item for item in named}.values():
                if not item.tensors:
                    raise LegFailed(self.type, f"the render service sent no tensors for {item.modality} {item.hash}")
                yield _Item(encode_generate(rendered, item), item.hash)
            return
        parts = media_items(ctx.api, ctx.body)
        known = hashes_of(ctx.body, parts, named)
        for part, known_as in {known_as or part.same: (part, known_as) for part, known_as in known}.values():
            yield _Item(encode_openai(ctx.body, part.part), known_as)

    async def _encode(self, ctx: RequestContext, upstream: Upstream, items: Sequence[_Item]) -> list[Json | None]:
        """Make all legs; the first that fails for good ends the others."""
        gate = asyncio.Semaphore(self.params.max_parallel)
        known = [item.hash for item in items if item.hash is not None]

        async def one(number: int, item: _Item) -> Json | None:
            leg = Leg(
                self.type,
                self.role,
                PATHS[self._format],
                item.body,
                self._limits,
                # Legs of one request may meet on one worker, which would take equal ids for one request.
                id_suffix=f"-e{number}",
                idempotent=True,
            )
            async with gate:
                return await self._one(ctx, upstream, leg, item, known)

        try:
            async with asyncio.TaskGroup() as tasks:
                legs = [tasks.create_task(one(number, item)) for number, item in enumerate(items, 1)]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [leg.result() for leg in legs]

    async def _one(
        self, ctx: RequestContext, upstream: Upstream, leg: Leg, item: _Item, known: Sequence[str]
    ) -> Json | None:
        """Make one leg; None where it failed and prefill is to encode the item itself."""
        try:
            reply = await upstream.post_json(ctx, leg)
            return read_entries(self._ec, reply.body, item.hash, known)
        except LegRejected:
            raise  # the media is at fault, and prefill would say the same
        except LegError as failed:
            error, reason = failed, type(failed).__name__
        except EntryMissing as missing:
            reason = missing.reason
            error = LegFailed(
                self.type,
                f"the worker left nothing for prefill to fetch: {missing}. Does it run with the EC connector that "
                f"{self._ec.name} stands for, as a producer?",
            )
        policy = self._settings.on_encode_failure
        self._settings.events.encoding_missing(reason, policy)
        if policy == "fail":
            raise error
        return None
