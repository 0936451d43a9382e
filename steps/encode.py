"""encode: media items are encoded on encode workers before prefill.

This release checks the step's parameters and lets text through, which needs no encoder. A request with media is
refused with a 501 that says so, rather than encoded on prefill workers behind the operator's back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from coordinator.step import PlanRow
from envelope.client_request import first_media
from envelope.errors import NotSupported
from envelope.formats import Format
from steps.params import LegParams

if TYPE_CHECKING:
    from coordinator.context import RequestContext
    from coordinator.step import PipelineSettings, Upstream


class Params(LegParams):
    """llm-d's parameters of the step."""

    max_parallel: int = Field(default=8, ge=1, description="encode legs of one request at a time")
    use_openai_format: bool | None = Field(
        default=None, description="wire format of these legs; unset inherits pipeline.use_openai_format"
    )
    ec_connector: str | None = Field(default=None, description="overrides pipeline.ec_connector for this step")


class Encode:
    type: ClassVar[str] = "encode"
    role: ClassVar[str | None] = None  # no leg is made yet, so no worker is needed

    def __init__(self, params: Params, settings: PipelineSettings) -> None:
        self.params = params

    def admit(self, ctx: RequestContext) -> None:
        part = None if ctx.api is Format.GENERATE else first_media(ctx.body)
        if part:
            raise NotSupported(
                f"{part}: this release has no encode legs; send text, or ask your operator to take the {self.type} "
                "step out of the pipeline so that prefill workers encode",
                param=part.split(" ")[0],
            )

    async def run(self, ctx: RequestContext, upstream: Upstream) -> str:
        return "skipped"

    def plan(self, api: Format) -> PlanRow:
        return PlanRow(api, self.type, None, None, None, ("text passes; media is a 501 in this release",))
