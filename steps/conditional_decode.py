"""conditional-decode: ask decode first, whether it has the prompt's KV already.

The probe goes to the client's own route with the client's own body and ``Prefer: if-available``. The endpoint picker
in front of the decode workers answers 412 when none has it: the pipeline goes on. vLLM itself never answers 412.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import model_validator

from coordinator.context import Answer
from coordinator.step import Leg, PlanRow, Reply
from envelope.client_request import has_media
from envelope.errors import LegBusy, LegFailed, LegTimeout, LegUnreadable, NoWorker
from envelope.formats import PATHS, Format
from envelope.generate import asked_mode, check_echo, check_first_echo
from envelope.legs import decode_for_generate_client
from steps.params import LegParams

if TYPE_CHECKING:
    from coordinator.context import Headers, LiveStream, RequestContext
    from coordinator.step import PipelineSettings, Upstream

_MISS = 412
_NOTE = "an endpoint picker's 412 goes on with the pipeline; vLLM itself never answers one"
_PROBE = (("Prefer", "if-available"),)


class Params(LegParams):
    """Only the time limits: the probe's route and body are the client's own."""

    @model_validator(mode="before")
    @classmethod
    def _no_format(cls, values: Any) -> Any:
        if isinstance(values, dict) and "use_openai_format" in values:
            raise ValueError(
                "use_openai_format cannot be set on conditional-decode: it probes the client's own route with the "
                "body that the client sent; take the key out"
            )
        return values


class ConditionalDecode:
    """Try decode alone; a miss, or a probe that fails on the worker's side, goes on with the pipeline."""

    type: ClassVar[str] = "conditional-decode"
    role: ClassVar[str] = "decode"

    def __init__(self, params: Params, settings: PipelineSettings) -> None:
        self.params = params
        self._settings = settings
        self._limits = params.limits()

    def admit(self, ctx: RequestContext) -> None:
        pass

    async def run(self, ctx: RequestContext, upstream: Upstream) -> str:
        if ctx.api is not Format.GENERATE and has_media(ctx.body):
            return "skipped"
        try:
            return await self._probe(ctx, upstream)
        except (LegBusy, LegFailed, LegTimeout, NoWorker):
            # The full pipeline may still answer, on another worker; the failure is in the leg's metric.
            await ctx.aclose()
            ctx.answer = None
            return "probe_failed"

    def plan(self, api: Format) -> PlanRow:
        return PlanRow(api, self.type, self.role, api, PATHS[api], (_NOTE,))

    async def _probe(self, ctx: RequestContext, upstream: Upstream) -> str:
        body = decode_for_generate_client(ctx.body, None) if ctx.api is Format.GENERATE else ctx.body
        leg = Leg(self.type, self.role, PATHS[ctx.api], body, self._limits, _PROBE)
        mode = asked_mode(body) if ctx.api is Format.GENERATE else None
        if body.get("stream"):
            live = await upstream.stream(ctx, leg, accept=(_MISS,))
        else:
            live = await upstream.post_json(ctx, leg, accept=(_MISS,))
        if isinstance(live, Reply):
            if body.get("stream") and live.status != _MISS:
                raise LegUnreadable(self.type, "the worker was asked for a stream and answered with one JSON body")
            return self._whole(ctx, live, mode)
        ctx.answer = self._answer(ctx, live, live.headers)
        if mode is not None:
            check_first_echo(self.type, mode, live.first_event)
        return "hit"

    def _whole(self, ctx: RequestContext, reply: Reply, mode: str | None) -> str:
        if reply.status == _MISS:
            return "miss"
        if mode is not None:
            check_echo(self.type, mode, reply.body)
        elif not isinstance(reply.body, dict):
            raise LegUnreadable(self.type, "the worker's answer is not a JSON object")
        ctx.answer = self._answer(ctx, reply.raw, reply.headers)
        ctx.answer.body = reply.body
        return "hit"

    def _answer(self, ctx: RequestContext, source: bytes | LiveStream, headers: Headers) -> Answer:
        return Answer(source, ctx.api, headers=headers, expose_transfer_params=self._settings.expose_transfer_params)
