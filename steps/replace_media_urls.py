"""replace-media-urls: media that clients name by URL is fetched once, here, and goes on as ``data:`` URIs.

Puts a new ``ctx.body`` on the context before any leg is made, so that every leg has the same bytes, no worker fetches
what a client told it to, and a link that expires expires here. Media that is inline already is checked and stays.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from coordinator.settings.units import Count, Duration, Items, Megabytes, Whole, megabytes_to_bytes
from coordinator.step import FetchFailed, FetchLimits, PlanRow
from envelope.data_uri import Inline, decoded_bytes, encode
from envelope.errors import BadRequest
from envelope.formats import Format
from envelope.media_parts import items, with_media
from envelope.media_url import read_host
from steps.params import StepParams

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from coordinator.context import RequestContext
    from coordinator.step import MediaFetcher, PipelineSettings, Upstream
    from envelope.media_parts import Item
    from envelope.media_types import Kind

    Wanted = Mapping[tuple[Kind, str], list[Item]]


def _host(value: str) -> str:
    """Return a host as URLs' hosts are compared: its one spelling, in lower case."""
    text = value.strip()
    if "://" in text or "/" in text:
        raise ValueError(f"{value!r} is a URL, write only its host, such as images.example.com")
    if "*" in text:
        raise ValueError(f"{value!r} has a wildcard, and hosts are compared exactly: write each in full")
    try:
        return read_host(f"[{text}]" if text.count(":") > 1 and not text.startswith("[") else text)[0]
    except ValueError:
        raise ValueError(f"{value!r} is not a host, write a name without a port, such as images.example.com") from None


Host = Annotated[str, AfterValidator(_host)]


class Params(StepParams):
    """llm-d's parameters of the step, and ours."""

    download_timeout: Duration = Field(
        default=10.0, description="one download, from the look-up of its host to its last byte; 0 is no limit"
    )
    max_concurrent_downloads: Count = Field(default=10, description="downloads of one request at a time")
    max_multimodal_entries: Annotated[Whole, Field(ge=0)] = Field(
        default=0, description="most media parts of a request, inline ones included; 0 is no limit"
    )
    max_download_size: Megabytes = Field(default=10, description="largest download in megabytes")
    max_total_size: Megabytes = Field(
        default=64,
        description="most media of a request in megabytes, all together: downloads, and what is inline, decoded",
    )
    allow_private_networks: bool = Field(
        default=False,
        description="fetch from 10/8, 172.16/12 and 192.168/16 too; other addresses that are not public stay refused",
    )
    allowed_domains: Annotated[tuple[Host, ...], Items] = Field(
        default=(), description="the only hosts to fetch from, exactly; their addresses are checked all the same"
    )
    trust_env_proxy: bool = Field(
        default=False,
        description="fetch through the proxies of HTTP_PROXY and its like, which look names up and decide "
        "what is reached",
    )


class ReplaceMediaUrls:
    """Fetch the media of a request, each URL once, and go on with a body that holds it."""

    type: ClassVar[str] = "replace-media-urls"
    role: ClassVar[str | None] = None

    def __init__(self, params: Params, settings: PipelineSettings) -> None:
        self.params = params
        self._total_bytes = megabytes_to_bytes(params.max_total_size)
        self._limits = FetchLimits(
            timeout_s=params.download_timeout or None,
            max_bytes=megabytes_to_bytes(params.max_download_size),
            allow_private=params.allow_private_networks,
            allowed_hosts=frozenset(params.allowed_domains),
            trust_env_proxy=params.trust_env_proxy,
        )

    def admit(self, ctx: RequestContext) -> None:
        found, most = items(ctx.api, ctx.body), self.params.max_multimodal_entries
        if most and len(found) > most:
            raise BadRequest(
                f"the request has {len(found)} media parts; at most {most} are accepted here", param=found[most].where
            )

    async def run(self, ctx: RequestContext, upstream: Upstream) -> str:
        found = items(ctx.api, ctx.body)
        if not found:
            return "skipped"
        budget = _Budget(self._total_bytes)
        wanted: dict[tuple[Kind, str], list[Item]] = {}
        for item in found:
            if isinstance(item.source, str):
                wanted.setdefault((item.kind, item.source), []).append(item)
            else:
                budget.spend(item, _inline_bytes(item, item.source))
                await asyncio.sleep(0)  # megabytes were looked at, and streams of others wait
        if wanted:
            ctx.body = with_media(ctx.api, ctx.body, await self._fetch_all(upstream.media, wanted, budget))
        return "ok"

    def plan(self, api: Format) -> PlanRow:
        note = "this API has no media" if api is Format.COMPLETIONS else "media is fetched here, each URL once"
        return PlanRow(api, self.type, None, None, None, (note,))

    async def _fetch_all(self, media: MediaFetcher, wanted: Wanted, budget: _Budget) -> dict[Any, Inline]:
        """Return what is under each URL; the first that fails ends the others.

        Raises:
            BadRequest: of the part whose URL failed.
        """
        fetched: dict[tuple[Kind, str], Inline] = {}
        left = iter(wanted.items())

        async def fetch_some() -> None:
            for (kind, url), parts in left:
                fetched[kind, url] = await self._fetch(media, url, kind, parts, budget)

        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(self.params.max_concurrent_downloads, len(wanted))):
                    tasks.create_task(fetch_some())
        except ExceptionGroup as group:
            raise next(_bad_requests(group), group) from None
        return fetched

    async def _fetch(self, media: MediaFetcher, url: str, kind: Kind, parts: list[Item], budget: _Budget) -> Inline:
        try:
            found = await media.fetch(url, kind, self._limits)
        except FetchFailed as failed:
            raise parts[0].wrong(str(failed)) from None
        for part in parts:  # it stands in the new body once for each
            budget.spend(part, len(found.data))
        return Inline(found.media_type, encode(found.data))


class _Budget:
    """What is left of the bytes that a request's media may have together."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = self._left_bytes = total_bytes

    def spend(self, item: Item, size_bytes: int) -> None:
        """Raise a BadRequest of the part with which it is too much."""
        self._left_bytes -= size_bytes
        if self._left_bytes < 0:
            most = self._total_bytes // 2**20
            raise item.wrong(f"with it, the media of this request are more than {most} MB together")


def _inline_bytes(item: Item, inline: Inline) -> int:
    try:
        return decoded_bytes(item.kind, inline)
    except ValueError as error:
        raise item.wrong(str(error)) from None


def _bad_requests(group: ExceptionGroup[Exception]) -> Iterator[BadRequest]:
    return (error for error in group.exceptions if isinstance(error, BadRequest))
