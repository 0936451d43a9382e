"""render: client body -> token ids, sampling_params, features, parse_context.

Sets ``ctx.rendered``, the generate request behind the client's own. A prompt that is tokenized already (a completions
token array, a generate client) needs no renderer; the limits hold for it all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from coordinator.outbound import Outbound
from coordinator.step import Leg, LegLimits, PlanRow
from coordinator.units import BaseUrl, Duration
from envelope.client_request import has_media, prompt_token_ids
from envelope.errors import BadRequest, LegUnreadable
from envelope.features import FeaturesWrong, check, check_counts, normal
from envelope.formats import RENDER_PATHS, Format
from envelope.kv_transfer import without_transfer_params
from envelope.legs import from_render, from_token_prompt
from envelope.media_items import check_kinds, counts, has_sound_in_video, media_items
from steps.params import StepParams

if TYPE_CHECKING:
    from coordinator.context import RequestContext
    from coordinator.step import PipelineSettings, Upstream
    from envelope.json_codec import Json


class Params(StepParams, Outbound):
    """llm-d's parameters of the render step, and what its server is to be told and to prove."""

    address: BaseUrl | None = Field(None, description="the render service, as http://host:port; or pools.render")
    timeout: Duration = Field(default=30.0, description="one render call; 0 is no limit")
    max_idle_conns_per_host: int = Field(default=100, ge=1, description="keep-alive connections kept open")
    idle_conn_timeout: Duration = Field(default=90.0, description="how long an idle connection is kept")
    max_total_tokens: int = Field(default=0, ge=0, description="longest prompt in tokens; 0 is no limit")
    max_total_placeholder_tokens: int = Field(
        default=0, ge=0, description="most placeholder tokens of media in a prompt; 0 is no limit"
    )


class Render:
    """Ask the render service for the tokens of a text prompt, and check what came back against the limits."""

    type: ClassVar[str] = "render"
    role: ClassVar[str] = "render"

    def __init__(self, params: Params, settings: PipelineSettings) -> None:
        self.params = params
        self._settings = settings
        self._limits = LegLimits(request_s=params.timeout or None)

    def admit(self, ctx: RequestContext) -> None:
        if has_media(ctx.body):
            check_kinds(media_items(ctx.api, ctx.body))

    async def run(self, ctx: RequestContext, upstream: Upstream) -> str:
        if ctx.api is Format.GENERATE:
            ctx.rendered, outcome = ctx.body, "skipped"
        elif prompt_token_ids(ctx.api, ctx.body) is not None:
            ctx.rendered, outcome = from_token_prompt(ctx.api, ctx.body), "skipped"
        else:
            ctx.rendered, outcome = await self._ask(ctx, upstream), "ok"
        self._check_limits(ctx.api, ctx.rendered)
        return outcome

    def plan(self, api: Format) -> PlanRow:
        path = RENDER_PATHS.get(api)
        if path is None:
            return PlanRow(api, self.type, self.role, None, None, ("the client sends token ids",))
        notes = ("no call for a token-array prompt",) if api is Format.COMPLETIONS else ()
        return PlanRow(api, self.type, self.role, api, path, notes)

    async def _ask(self, ctx: RequestContext, upstream: Upstream) -> Json:
        # The answer's stream fields follow the client's, so the body goes as it is.
        body = {key: value for key, value in ctx.body.items() if key not in ("mm_payload", "return_mm_kwargs")}
        if not self._settings.tokens_in and has_media(body):
            body["mm_payload"] = "none"  # tensors are megabytes, and no leg would be sent them
        leg = Leg(self.type, self.role, RENDER_PATHS[ctx.api], body, self._limits)
        reply = await upstream.post_json(ctx, leg)
        return from_render(self._with_checked_media(ctx, self._one_prompt(reply.body)), ctx.api, ctx.body)

    def _one_prompt(self, answer: Any) -> Json:
        """Return the one rendered prompt; the completions route answers with a list of them."""
        if isinstance(answer, list) and len(answer) == 1:
            answer = answer[0]
        if not isinstance(answer, dict) or not _are_token_ids(answer.get("token_ids")):
            raise LegUnreadable(self.type, "the render service's answer has no token_ids; is it a vLLM render route?")
        for name in ("sampling_params", "reasoning_parser_kwargs", "parse_context"):
            if not isinstance(answer.get(name) or {}, dict):
                raise LegUnreadable(self.type, f"the render service's answer has {name} that are no object")
        return without_transfer_params(answer)

    def _with_checked_media(self, ctx: RequestContext, rendered: Json) -> Json:
        """Hold the prompt's media against its tokens and the request's: what was lost here, nobody would miss later."""
        given = rendered.get("features")
        if given is None and not has_media(ctx.body):
            return rendered
        media = media_items(ctx.api, ctx.body)
        if isinstance(given, dict):
            rendered = {**rendered, "features": normal(given)}
        try:
            interleaved = has_sound_in_video(ctx.body)
            found = check(rendered.get("features"), len(rendered["token_ids"]), interleaved=interleaved)
            check_counts(found, counts(ctx.body, media))
        except FeaturesWrong as wrong:
            raise LegUnreadable(self.type, f"the render service's answer does not fit the request: {wrong}") from wrong
        return rendered

    def _check_limits(self, api: Format, rendered: Json) -> None:
        tokens, most = len(rendered["token_ids"]), self.params.max_total_tokens
        if most and tokens > most:
            raise BadRequest(f"the prompt has {tokens} tokens; at most {most} are accepted here", param=_PROMPTS[api])
        most = self.params.max_total_placeholder_tokens
        if most and (tokens := _placeholder_tokens(rendered)) > most:
            raise BadRequest(
                f"the media of this request take {tokens} tokens; at most {most} are accepted here",
                param=_PROMPTS[api],
            )


# Where a client of each API writes its prompt.
_PROMPTS = {
    Format.CHAT: "messages",
    Format.COMPLETIONS: "prompt",
    Format.RESPONSES: "input",
    Format.MESSAGES: "messages",
    Format.GENERATE: "token_ids",
}


def _are_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and set(map(type, value)) == {int}


def _placeholder_tokens(rendered: Json) -> int:
    """Return how many tokens stand for media. A generate client may send any shape: a wrong one is the worker's."""
    features = rendered.get("features")
    by_modality = features.get("mm_placeholders") if isinstance(features, dict) else None
    lists = by_modality.values() if isinstance(by_modality, dict) else ()
    spans = [span for spans in lists if isinstance(spans, list) for span in spans if isinstance(span, dict)]
    return sum(length for span in spans if isinstance(length := span.get("length"), int))
