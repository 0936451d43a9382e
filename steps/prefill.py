"""prefill: the prompt is computed on a prefill worker; what it leaves for decode becomes ``ctx.handover``.

Where encode legs have left embeddings, the leg says where they are (``ctx.ec_params``), and in generate format sends
metadata in the place of their tensors, so that no picture is sent to be encoded twice.

The leg is left out, and decode computes the prompt itself, where a hand-over would be wrong or pointless: the client's
side named no prefill worker (sidecar mode), or the request needs what only the worker that computes the prompt has.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from coordinator.settings.units import Whole
from coordinator.step import Leg, PlanRow
from envelope.client_request import choices, wants_prompt_logprobs
from envelope.connectors import KV_CONNECTORS, Several
from envelope.ec_transfer import EC_CONNECTORS, key_of, put
from envelope.errors import LegError, LegFailed, LegRejected
from envelope.features import without_tensors
from envelope.formats import PATHS, Format, leg_format
from envelope.kv_transfer import HandoverMissing, read_handover
from envelope.legs import identified, prefill_generate, prefill_openai, unstreamed
from envelope.sampling import asked_output
from steps.params import LegParams
from steps.prompt import prompt_ids

if TYPE_CHECKING:
    from collections.abc import Mapping

    from coordinator.context import RequestContext
    from coordinator.step import PipelineSettings, Reply, Upstream
    from envelope.json_codec import Json


class Params(LegParams):
    use_openai_format: bool | None = Field(
        default=None, description="wire format of this leg; unset inherits pipeline.use_openai_format"
    )
    kv_connector: str | None = Field(default=None, description="overrides pipeline.kv_connector for this step")
    ec_connector: str | None = Field(default=None, description="overrides pipeline.ec_connector for this step")
    send_prompt_token_ids: bool = Field(
        default=False, description="in OpenAI format, give the worker render's tokens so that it need not tokenize"
    )
    min_uncached_tokens: Annotated[Whole, Field(ge=0)] = Field(
        default=0,
        description="leave the leg out where decode's worker has fewer of the prompt's tokens to compute than this, by "
        "the table of pools.decode's prefix_affinity; 0 is never",
    )
    min_output_tokens: Annotated[Whole, Field(ge=0)] = Field(
        default=0,
        description="leave the leg out where fewer output tokens are asked for than this: with 2, for one token, which "
        "decode has once it has computed the prompt; 0 is never",
    )
    mm_features: Literal["auto", "metadata", "full"] = Field(
        default="auto",
        description="in generate format, what is sent of media that was encoded: metadata; full, its tensors too; auto "
        "is metadata where a worker that cannot fetch an embedding fails the request (ec-nixl), not its engine",
    )


class Prefill:
    """One output token, unstreamed, with the connector's request to keep the prompt's KV blocks."""

    type: ClassVar[str] = "prefill"
    role: ClassVar[str] = "prefill"

    def __init__(self, params: Params, settings: PipelineSettings) -> None:
        self.params = params
        self._settings = settings
        self._openai = settings.use_openai_format if params.use_openai_format is None else params.use_openai_format
        self._kv = KV_CONNECTORS[params.kv_connector] if params.kv_connector else settings.kv
        self._ec = EC_CONNECTORS[params.ec_connector] if params.ec_connector else settings.ec
        self._limits = params.limits()

    def admit(self, ctx: RequestContext) -> None:
        pass

    async def run(self, ctx: RequestContext, upstream: Upstream) -> str:
        if reason := self.reason_to_skip(ctx, upstream):
            self._settings.events.prefill_skipped(reason)
            return "skipped"
        fmt = leg_format(ctx.api, self._openai)
        try:
            reply = await self._ask(ctx, upstream, fmt)
        except LegError as error:
            self.fail_over(error)
            return "failed_over"
        return self._keep(ctx, reply)

    def fail_over(self, error: LegError) -> None:
        """Leave the prompt to decode, where the file says so; else raise the error."""
        if self._settings.on_prefill_failure != "decode_alone" or isinstance(error, LegRejected):
            raise error
        self._settings.events.prefill_failed_over(type(error).__name__)

    def plan(self, api: Format) -> PlanRow:
        fmt = leg_format(api, self._openai)
        return PlanRow(api, self.type, self.role, fmt, PATHS[fmt], (f"hand-over by {self._kv.name}",))

    def reason_to_skip(self, ctx: RequestContext, upstream: Upstream) -> str | None:
        """Return why decode is to compute this prompt itself; None where prefill does."""
        if self._kv.decodes_alone:
            if wants_prompt_logprobs(ctx.api, ctx.body):
                return "prompt_logprobs"  # decode computes the whole prompt for these, whatever it is handed
            if self._kv.several is Several.DECODE_ALONE and choices(ctx.api, ctx.body) > 1:
                return "n"  # several engine requests would read blocks that the first of them frees
            if ctx.body.get("use_beam_search"):
                return "beam_search"  # vLLM's beams are requests of their own, which are handed nothing
            if reason := self._not_worth_it(ctx, upstream):
                return reason
        if not upstream.serves(ctx, self.role):
            return "no_worker_named"
        return None

    def _not_worth_it(self, ctx: RequestContext, upstream: Upstream) -> str | None:
        most_out, fewest_in = asked_output(ctx.api, ctx.body), self.params.min_uncached_tokens
        if most_out is not None and most_out < self.params.min_output_tokens:
            return "few_output_tokens"
        if not fewest_in:
            return None
        uncached = upstream.uncached_tokens(ctx, "decode", fewest_in)
        return "few_uncached_tokens" if uncached is not None and uncached < fewest_in else None

    async def _ask(self, ctx: RequestContext, upstream: Upstream, fmt: Format) -> Reply:
        generate = ctx.rendered or ctx.body
        small = self._without_encoded(generate, ctx.ec_params) if fmt is Format.GENERATE else generate
        try:
            return await upstream.post_json(ctx, self._leg(ctx, fmt, small))
        except LegFailed:
            if small is generate or self._settings.on_encode_failure != "prefill_encodes":
                raise
            # An encoder may be gone with what it had made, and without tensors the worker could only give up.
            self._settings.events.encoding_missing("not_fetched", "prefill_encodes")
            ctx.ec_params = None
            return await upstream.post_json(ctx, self._leg(ctx, fmt, generate))

    def _leg(self, ctx: RequestContext, fmt: Format, generate: Json) -> Leg:
        if self._kv.own_body:
            body = unstreamed(ctx.body)
        elif fmt is Format.GENERATE:
            body = prefill_generate(generate, self._kv.prefill)
        else:
            token_ids = prompt_ids(ctx) if self.params.send_prompt_token_ids else None
            body = prefill_openai(fmt, ctx.body, self._kv.prefill, token_ids)
        if self._kv.one_id:
            body = identified(fmt, body, ctx.leg_id)
        late = partial(self._keep_late, ctx) if self._kv.needs_handover else None
        body = put(body, ctx.ec_params)
        return Leg(self.type, self.role, PATHS[fmt], body, self._limits, late=late, one_id=self._kv.one_id)

    def _keep_late(self, ctx: RequestContext, reply: Reply) -> None:
        """Take the hand-over of a prefill whose client has left, so that it can be released."""
        with suppress(HandoverMissing):
            ctx.handover = read_handover(self._kv, reply.body)
            ctx.on_late_handover(ctx)

    def _without_encoded(self, generate: Json, ec_params: Mapping[str, Any] | None) -> Json:
        """Return a prompt without the tensors of what prefill can fetch; itself where all of them are needed."""
        mode = self.params.mm_features
        if not ec_params or mode == "full" or (mode == "auto" and not self._ec.tells):
            return generate
        features = without_tensors(generate["features"], lambda item: key_of(item, ec_params) is not None)
        return generate if features == generate["features"] else {**generate, "features": features}

    def _keep(self, ctx: RequestContext, reply: Reply) -> str:
        try:
            handover = read_handover(self._kv, reply.body)
        except HandoverMissing as missing:
            policy = self._settings.on_missing_handover
            self._settings.events.handover_missing(missing.reason, policy)
            if policy == "decode_alone":
                return "handover_missing"
            raise LegFailed(
                self.type,
                f"the worker left nothing for decode to fetch: {missing}. Does it run with the KV connector that "
                f"{self._kv.name} stands for, as a producer?",
            ) from missing
        if handover is not None:
            ctx.handover, ctx.handover_at = handover, self._settings.clock()
        ctx.prefilled = True
        return "ok"
