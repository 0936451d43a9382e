"""render: client body -> token ids, sampling_params, features, parse_context.

Sets ``ctx.rendered``, the generate request behind the client's own: a render service makes it, or this process with the
model's tokenizer. A prompt that is tokenized already (a completions token array, a generate client) needs no renderer;
the limits hold for it all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Field, WithJsonSchema, model_validator

from coordinator.rendering.conversation import NEEDS_SERVICE
from coordinator.rendering.parsers import REASONING_PARSERS, TOOL_PARSERS
from coordinator.rendering.renderer import APIS, Model, Renderer
from coordinator.settings.outbound import Outbound
from coordinator.settings.units import BaseUrl, Count, Duration
from coordinator.step import Leg, LegLimits, PlanRow
from envelope.client_request import first_media, has_media, prompt_token_ids
from envelope.errors import BadRequest, LegUnreadable
from envelope.features import FeaturesWrong, check, check_counts, normal
from envelope.formats import PROMPT_FIELDS, RENDER_PATHS, Format
from envelope.json_codec import without
from envelope.kv_transfer import without_transfer_params
from envelope.legs import from_render, from_token_prompt
from envelope.media_items import check_kinds, counts, has_sound_in_video, media_items
from envelope.token_ids import are_token_ids
from envelope.written import loads_rendered
from steps.params import StepParams

if TYPE_CHECKING:
    from coordinator.context import RequestContext
    from coordinator.step import PipelineSettings, Upstream
    from envelope.json_codec import Json


def _known(parsers: frozenset[str]) -> AfterValidator:
    def check(name: str) -> str:
        if name not in parsers:
            known = ", ".join(sorted(parsers))
            raise ValueError(f"{name!r} is not known here, use a render service or write one of {known}")
        return name

    return AfterValidator(check)


class InProcess(StepParams):
    """How this process renders: the model, and what its workers were started with."""

    tokenizer: str | None = Field(
        default=None,
        description="render here, with the tokenizer and chat template of this folder; text of chat, completions "
        "and messages; needs pd-coordinator[render]",
    )
    max_model_len: Count | None = Field(
        default=None, description="the workers' context length in tokens, as their /v1/models says it"
    )
    tokenizer_sha: str | None = Field(
        default=None, description="SHA-256 of tokenizer.json; with another one the coordinator does not start"
    )
    chat_template: str | None = Field(
        default=None, description="file of a chat template, where the workers have one in place of the model's"
    )
    chat_template_content_format: Literal["string", "openai"] | None = Field(
        default=None, description="how the template takes content; unset is found out as vLLM does"
    )
    default_chat_template_kwargs: dict[str, Any] = Field(
        default={}, description="the workers' --default-chat-template-kwargs"
    )
    tool_parser: Annotated[str, _known(TOOL_PARSERS), WithJsonSchema({"enum": sorted(TOOL_PARSERS)})] | None = Field(
        default=None, description="the workers' --tool-call-parser"
    )
    reasoning_parser: (
        Annotated[str, _known(REASONING_PARSERS), WithJsonSchema({"enum": sorted(REASONING_PARSERS)})] | None
    ) = Field(default=None, description="the workers' --reasoning-parser")
    generation_config: str = Field(
        default="auto",
        description="the workers' --generation-config: auto is the model's own file, vllm none, else a folder",
    )
    override_generation_config: dict[str, Any] = Field(
        default={}, description="the workers' --override-generation-config"
    )
    render_threads: Count = Field(default=2, description="prompts that are rendered at a time")

    def model(self) -> Model:
        assert self.tokenizer is not None and self.max_model_len is not None
        return Model(
            folder=self.tokenizer,
            max_model_len=self.max_model_len,
            sha256=self.tokenizer_sha,
            chat_template=self.chat_template,
            content_format=self.chat_template_content_format,
            tool_parser=self.tool_parser,
            reasoning_parser=self.reasoning_parser,
            generation_config=self.generation_config,
            overrides=self.override_generation_config,
            template_kwargs=self.default_chat_template_kwargs,
        )


# Client fields that say what of its media the renderer is to send.
_TENSORS = frozenset(("mm_payload", "return_mm_kwargs"))

_EITHER: dict[str, Any] = {
    "dependentRequired": {name: ["tokenizer", "max_model_len"] for name in InProcess.model_fields},
    "not": {"required": ["address", "tokenizer"]},
}


class Params(InProcess, Outbound):
    """llm-d's parameters of the render step, what its server is told and has to prove; or what renders in its place."""

    model_config = ConfigDict(json_schema_extra=_EITHER)

    address: BaseUrl | None = Field(
        default=None, description="the render service, as http://host:port; or pools.render, or tokenizer"
    )
    timeout: Duration = Field(default=30.0, description="one render call; 0 is no limit")
    max_idle_conns_per_host: int = Field(default=100, ge=1, description="keep-alive connections kept open")
    idle_conn_timeout: Duration = Field(default=90.0, description="how long an idle connection is kept")
    max_total_tokens: int = Field(default=0, ge=0, description="longest prompt in tokens; 0 is no limit")
    max_total_placeholder_tokens: int = Field(
        default=0, ge=0, description="most placeholder tokens of media in a prompt; 0 is no limit"
    )

    @model_validator(mode="after")
    def _one_renderer(self) -> Params:
        here = [name for name in InProcess.model_fields if name in self.model_fields_set]
        there = [name for name in ("address", *Outbound.model_fields) if name in self.model_fields_set]
        if here and self.tokenizer is None:
            raise ValueError(f"{here[0]} is for rendering here: write tokenizer: and a model's folder, or take it out")
        if here and there:
            raise ValueError(f"{there[0]} is for a service and tokenizer for rendering here: take one of the two out")
        if here and self.max_model_len is None:
            raise ValueError("max_model_len is missing: write the context length that the workers' /v1/models says")
        return self


class Render:
    """Have a text prompt made into tokens, and check what came back against the limits."""

    type: ClassVar[str] = "render"

    def __init__(self, params: Params, settings: PipelineSettings) -> None:
        self.params = params
        self._settings = settings
        self._limits = LegLimits(request_s=params.timeout or None)
        self._renderer: Renderer | None = None

    @property
    def role(self) -> str | None:
        return "render" if self.params.tokenizer is None else None

    def open(self) -> Renderer:
        """Load the model that is rendered here.

        Raises:
            ValueError: a sentence that says what is wrong with its files, or which extra is to be installed.
        """
        self._renderer = Renderer(self.params.model(), self.params.render_threads)
        return self._renderer

    def admit(self, ctx: RequestContext) -> None:
        if self.role is None:
            self._admit_here(ctx)
        elif has_media(ctx.body):
            check_kinds(media_items(ctx.api, ctx.body))

    def _admit_here(self, ctx: RequestContext) -> None:
        if ctx.api not in (*APIS, Format.GENERATE):
            raise BadRequest(NEEDS_SERVICE.format(f"the {ctx.api} API"))
        if media := first_media(ctx.body):
            raise BadRequest(f"{media}: " + NEEDS_SERVICE.format("media"), param=media.partition(" ")[0])

    async def run(self, ctx: RequestContext, upstream: Upstream) -> str:
        if ctx.api is Format.GENERATE:
            ctx.rendered, outcome = ctx.body, "skipped"
        elif self.role is None:
            ctx.rendered, outcome = await self._render_here(ctx), "ok"
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
        if self.role is None:
            here = "rendered here" if api in APIS else "refused: needs a render service"
            return PlanRow(api, self.type, None, None, None, (here,))
        notes = ("no call for a token-array prompt",) if api is Format.COMPLETIONS else ()
        return PlanRow(api, self.type, self.role, api, path, notes)

    async def _render_here(self, ctx: RequestContext) -> Json:
        assert self._renderer is not None, "the application opens its steps before it serves"
        rendered = await self._renderer.render(ctx.api, ctx.body, ctx.leg_id, self._limits.request_s)
        return from_render(rendered, ctx.api, ctx.body)

    async def _ask(self, ctx: RequestContext, upstream: Upstream) -> Json:
        # The answer's stream fields follow the client's, so the body goes as it is.
        body = without(ctx.body, _TENSORS)
        if not self._settings.tokens_in and has_media(body):
            body["mm_payload"] = "none"  # tensors are megabytes, and no leg would be sent them
        leg = Leg(self.type, "render", RENDER_PATHS[ctx.api], body, self._limits, read=loads_rendered)
        reply = await upstream.post_json(ctx, leg)
        return from_render(self._with_checked_media(ctx, self._one_prompt(reply.body)), ctx.api, ctx.body)

    def _one_prompt(self, answer: Any) -> Json:
        """Return the one rendered prompt; the completions route answers with a list of them."""
        if isinstance(answer, list) and len(answer) == 1:
            answer = answer[0]
        if not isinstance(answer, dict) or not are_token_ids(answer.get("token_ids")):
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
        most, field = self.params.max_total_tokens, PROMPT_FIELDS[api]
        if most and (tokens := len(rendered["token_ids"])) > most:
            raise BadRequest(f"the prompt has {tokens} tokens; at most {most} are accepted here", param=field)
        most = self.params.max_total_placeholder_tokens
        if most and (tokens := _placeholder_tokens(rendered)) > most:
            raise BadRequest(
                f"the media of this request take {tokens} tokens; at most {most} are accepted here",
                param=field,
            )


def _placeholder_tokens(rendered: Json) -> int:
    """Return how many tokens stand for media. A generate client may send any shape: a wrong one is the worker's."""
    features = rendered.get("features")
    by_modality = features.get("mm_placeholders") if isinstance(features, dict) else None
    lists = by_modality.values() if isinstance(by_modality, dict) else ()
    spans = [span for spans in lists if isinstance(spans, list) for span in spans if isinstance(span, dict)]
    return sum(length for span in spans if isinstance(length := span.get("length"), int))
