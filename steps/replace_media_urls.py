"""replace-media-urls: media URLs of a chat request are fetched once, at the edge.

This release checks the step's parameters and lets text through. A request with media is refused with a 501 that says
so, rather than sent on with URLs that the operator meant to be fetched here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from coordinator.step import PlanRow
from coordinator.units import Duration
from envelope.client_request import first_media
from envelope.errors import NotSupported
from steps.params import StepParams

if TYPE_CHECKING:
    from coordinator.context import RequestContext
    from coordinator.step import PipelineSettings, Upstream
    from envelope.formats import Format


class Params(StepParams):
    """llm-d's parameters of the step."""

    download_timeout: Duration = Field(default=10.0, description="one download")
    max_concurrent_downloads: int = Field(default=10, ge=1, description="downloads of one request at a time")
    max_multimodal_entries: int = Field(default=0, ge=0, description="most media parts of a request; 0 is no limit")
    max_download_size: int = Field(default=10, ge=1, description="largest download in megabytes")
    allow_private_networks: bool = Field(default=False, description="accept hosts in private address ranges")
    allowed_domains: tuple[str, ...] = Field(default=(), description="only these hosts; empty is any public one")


class ReplaceMediaUrls:
    type: ClassVar[str] = "replace-media-urls"
    role: ClassVar[str | None] = None

    def __init__(self, params: Params, settings: PipelineSettings) -> None:
        self.params = params

    def admit(self, ctx: RequestContext) -> None:
        if part := first_media(ctx.body):
            raise NotSupported(
                f"{part}: this release does not fetch media at the edge; send text, or ask your operator to take the "
                f"{self.type} step out of the pipeline so that the workers fetch it",
                param=part.split(" ")[0],
            )

    async def run(self, ctx: RequestContext, upstream: Upstream) -> str:
        return "skipped"

    def plan(self, api: Format) -> PlanRow:
        return PlanRow(api, self.type, None, None, None, ("text passes; media is a 501 in this release",))
