"""decode: the leg whose answer the client gets. Sets ``ctx.answer``.

In the client's own format the answer passes through. In generate format the worker is asked for an ``output_mode``,
must echo it, and its answer is rebuilt into the client's envelope where the file says so.

Media goes along whole, although a hand-over covers the prompt: in the client's format as its parts, never as token
ids, and in generate format with its tensors. A worker that preempts the request or cannot load the blocks computes the
prompt anew, and vLLM takes an item by its hash alone only where it has had the tensors before (else 500).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, WithJsonSchema, field_validator

from coordinator.context import Answer
from coordinator.settings.units import Count, Duration
from coordinator.step import Leg, PlanRow, Reply
from envelope import completions
from envelope.client_request import wants_prompt_logprobs
from envelope.collected import Collected
from envelope.connectors import KV_CONNECTORS
from envelope.ec_transfer import put
from envelope.errors import ApiError, BadRequest, LegFailed, LegUnreadable
from envelope.formats import PATHS, Format, leg_format
from envelope.generate import DERENDER, TOKENS, asked_mode, check_echo, check_first_echo
from envelope.json_codec import dumps
from envelope.legs import (
    decode_for_generate_client,
    decode_generate,
    decode_openai,
    identified,
    mode_for,
    prefill_generate,
    prefill_openai,
    stream_options,
)
from envelope.parse_context import with_parse_context
from envelope.parse_job import for_no_tokenizer, parse_job, without_stop_strings
from steps.params import LegParams
from steps.prompt import prompt_ids
from steps.stop_search import stops_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from coordinator.context import Headers, LiveStream, RequestContext
    from coordinator.step import PipelineSettings, Upstream
    from envelope.json_codec import Json

WRAPPABLE = ("chat", "completions", "responses", "messages")

_WRAP_SCHEMA = {"anyOf": [{"const": "all"}, {"type": "array", "items": {"enum": list(WRAPPABLE)}}]}


class Params(LegParams):
    use_openai_format: bool | None = Field(
        default=None, description="wire format of this leg; unset inherits pipeline.use_openai_format"
    )
    kv_connector: str | None = Field(default=None, description="overrides pipeline.kv_connector for this step")
    derender: Literal["worker", "coordinator", "service"] = Field(
        default="worker",
        description="in generate format, who tells reasoning and tool calls from text: the worker (output_mode: "
        "derender), the coordinator, or the service of a derender step",
    )
    tokenizer: str | None = Field(
        default=None, description="folder of the model's tokenizer and config.json, for derender: coordinator"
    )
    tool_parser: str | None = Field(
        default=None,
        description="the workers' --tool-call-parser, for derender: coordinator; unset leaves calls as text",
    )
    reasoning_parser: str | None = Field(
        default=None, description="the workers' --reasoning-parser, for derender: coordinator; unset finds no reasoning"
    )
    parser_processes: Count = Field(
        default=1, description="processes that parse, each with some 600 MB of vLLM's modules in memory"
    )
    parser_timeout: Duration = Field(
        default=30.0, description="a parser process that answers nothing for so long is replaced, and its requests fail"
    )
    output_mode: Literal["tokens", "text", "derender"] = Field(
        default="text", description="what a worker returns beside the tokens when the leg is in generate format"
    )
    wrap_chat_completion: bool = Field(
        default=False, description="rebuild the chat envelope for /v1/chat/completions clients"
    )
    wrap: Annotated[tuple[str, ...], WithJsonSchema(_WRAP_SCHEMA)] = Field(
        default=(), description="the same for several APIs: all, or a list of chat, completions, responses, messages"
    )
    send_prompt_token_ids: bool = Field(
        default=False, description="in OpenAI format, give the worker render's tokens so that it need not tokenize"
    )

    @field_validator("output_mode")
    @classmethod
    def _somebody_makes_text(cls, mode: str, info: ValidationInfo) -> str:
        by = info.data.get("derender", "worker")
        if mode == TOKENS and by == "worker":
            raise ValueError(
                "tokens would answer clients with ids and no text; write text or derender, "
                "or derender: coordinator or service beside it"
            )
        if mode != TOKENS and by == "service":
            raise ValueError(f"a derender service takes tokens and no {mode}; write tokens or take it out")
        if mode == DERENDER and by == "coordinator":
            raise ValueError("the worker would have parsed already; write text, or tokens where it has no tokenizer")
        return mode

    @field_validator("wrap", mode="before")
    @classmethod
    def _known_apis(cls, value: Any) -> Any:
        if value == "all":
            return WRAPPABLE
        if isinstance(value, str):
            value = [name.strip() for name in value.split(",") if name.strip()]
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{value!r} is not a list of APIs, write all, or some of {', '.join(WRAPPABLE)}")
        for name in value:
            if name not in WRAPPABLE:
                raise ValueError(f"{name!r} is not an API, write all, or some of {', '.join(WRAPPABLE)}")
        return tuple(value)

    @property
    def mode(self) -> str:
        """The output mode that is asked for."""
        return TOKENS if self.derender == "service" else self.output_mode

    @property
    def wrapped(self) -> frozenset[Format]:
        """The APIs whose envelope is rebuilt: all, where the worker's answer is not yet anybody's."""
        if self.derender != "worker":
            return frozenset(map(Format, WRAPPABLE))
        return frozenset((*map(Format, self.wrap), *((Format.CHAT,) if self.wrap_chat_completion else ())))


class Decode:
    """Generate the answer, from prefill's hand-over where there is one."""

    type: ClassVar[str] = "decode"
    role: ClassVar[str] = "decode"

    def __init__(self, params: Params, settings: PipelineSettings) -> None:
        self.params = params
        self._settings = settings
        self._openai = settings.use_openai_format if params.use_openai_format is None else params.use_openai_format
        self._limits = params.limits()
        kind = KV_CONNECTORS[params.kv_connector] if params.kv_connector else settings.kv
        self._one_id = kind.one_id
        self._wrapped = params.wrapped

    def admit(self, ctx: RequestContext) -> None:
        if ctx.api is Format.GENERATE or leg_format(ctx.api, self._openai) is not Format.GENERATE:
            return
        if ctx.api is Format.COMPLETIONS:
            completions.refuse(ctx.body)
        if self.params.mode == TOKENS and ctx.body.get("bad_words"):
            # vLLM would leave them out without a word on a worker without a tokenizer, as this one may be.
            raise BadRequest("bad_words need output_mode: text on the decode step", param="bad_words")

    async def run(self, ctx: RequestContext, upstream: Upstream) -> str:
        self._check_age(ctx)
        if ctx.handover is not None:
            self._settings.events.handover_sent(self._settings.clock() - ctx.handover_at)
        fmt = leg_format(ctx.api, self._openai)
        # Whoever computes the prompt fetches what encode legs have made.
        body = put(self._body(ctx, fmt), None if ctx.prefilled else ctx.ec_params)
        if self._one_id:
            body = identified(fmt, body, ctx.leg_id)
        single_use = ctx.handover is not None
        leg = Leg(self.type, self.role, PATHS[fmt], body, self._limits, single_use=single_use, one_id=self._one_id)
        mode = asked_mode(body) if fmt is Format.GENERATE else None
        job = self._job(ctx, fmt)
        if job is not None and job["decoding"] is not None:
            assert upstream.parsers is not None, "the wiring makes parsers where decode says so"
            leg = replace(leg, body=for_no_tokenizer(leg.body, upstream.parsers.eos_token_id))
        if self._left_to_service(ctx, fmt):
            body = without_stop_strings(body)
            leg = replace(leg, body=body if wants_prompt_logprobs(ctx.api, ctx.body) else _listened_to(body))
        if job is not None and not body["stream"] and self._may_be_stopped(ctx, job):
            await self._stopped(ctx, upstream, leg, mode, job)
        elif leg.body.get("stream"):
            await self._stream(ctx, upstream, leg, fmt, mode, job)
        else:
            await self._whole(ctx, upstream, leg, fmt, mode, job)
        return "ok"

    def plan(self, api: Format) -> PlanRow:
        fmt = leg_format(api, self._openai)
        return PlanRow(api, self.type, self.role, fmt, PATHS[fmt], self._notes(api, fmt))

    def release_leg(self, ctx: RequestContext, handover: Mapping[str, Any]) -> Leg:
        """Return the leg that fetches a hand-over nobody wants any more, so that prefill frees its blocks."""
        fmt = leg_format(ctx.api, self._openai)
        if fmt is Format.GENERATE:
            body = prefill_generate(ctx.rendered or ctx.body, handover)
        else:
            token_ids = prompt_ids(ctx) if self.params.send_prompt_token_ids else None
            body = prefill_openai(fmt, ctx.body, handover, token_ids)
        # Ids end in what is unique, and a salt has at most 128 characters.
        body = {**body, "cache_salt": ctx.leg_id[-64:]}
        if self._one_id:
            body = identified(fmt, body, ctx.leg_id)
        return Leg(
            "release",
            self.role,
            PATHS[fmt],
            body,
            self._limits,
            single_use=True,
            detached=True,
            id_suffix="" if self._one_id else "-release",
            one_id=self._one_id,
        )

    def _check_age(self, ctx: RequestContext) -> None:
        """Refuse a hand-over whose blocks prefill may soon give to others: decode would read another prompt's."""
        oldest = self._settings.max_handover_age_s
        if ctx.handover is None or oldest is None or self._settings.clock() - ctx.handover_at <= oldest:
            return
        self._settings.events.handover_missing("too_old", "begin_again")
        late = LegFailed(self.type, f"the hand-over is older than {oldest:g} s (pipeline.max_handover_age)")
        late.retryable = late.elsewhere = True
        raise late

    def _body(self, ctx: RequestContext, fmt: Format) -> Json:
        if fmt is not Format.GENERATE:
            token_ids = prompt_ids(ctx) if self.params.send_prompt_token_ids else None
            return decode_openai(fmt, ctx.body, ctx.handover, token_ids)
        if ctx.api is Format.GENERATE:
            return decode_for_generate_client(ctx.body, ctx.handover)
        assert ctx.rendered is not None, "the registry lets no tokens-in decode start without a render step"
        return decode_generate(
            with_parse_context(ctx.rendered, ctx.api, ctx.body),
            mode_for(ctx.api, self.params.mode),
            ctx.handover,
            stream=ctx.stream,
            stream_options=stream_options(ctx.api, ctx.body, counted=self._wraps(ctx.api, fmt)),
        )

    def _job(self, ctx: RequestContext, fmt: Format) -> Json | None:
        """Return what our parsers are to do; None where they are not asked."""
        if self.params.derender != "coordinator" or not self._wraps(ctx.api, fmt):
            return None
        assert ctx.rendered is not None, "tokens-in has a render step"
        job = parse_job(ctx.api, ctx.rendered, ctx.body, self.params.mode, ctx.leg_id)
        return None if job["context"] is None and job["decoding"] is None else job

    async def _whole(
        self, ctx: RequestContext, upstream: Upstream, leg: Leg, fmt: Format, mode: str | None, job: Json | None
    ) -> None:
        reply = await upstream.post_json(ctx, leg)
        if mode is not None:
            check_echo(self.type, mode, reply.body)
        elif not isinstance(reply.body, dict):
            raise LegUnreadable(self.type, "the worker's answer is not a JSON object")
        answer = self._answer(ctx, fmt, reply.raw, reply.headers)
        answer.body = reply.body
        if job is not None:
            assert upstream.parsers is not None, "the wiring makes parsers where decode says so"
            answer.body = await upstream.parsers.whole(job, reply.body)
        self._hand_on(ctx, fmt, answer)

    async def _stream(
        self, ctx: RequestContext, upstream: Upstream, leg: Leg, fmt: Format, mode: str | None, job: Json | None
    ) -> None:
        if job is not None:
            await self._parsed_stream(ctx, upstream, leg, mode, job)
            return
        live = await self._opened(ctx, upstream, leg)
        # On the context first: whatever happens next, the server closes what the context holds.
        self._hand_on(ctx, fmt, self._answer(ctx, fmt, live, live.headers))
        if mode is not None:
            check_first_echo(self.type, mode, live.first_event)

    async def _parsed_stream(
        self, ctx: RequestContext, upstream: Upstream, leg: Leg, mode: str | None, job: Json
    ) -> None:
        assert upstream.parsers is not None, "the wiring makes parsers where decode says so"
        parsing = upstream.parsers.open(job)  # before the worker is asked: they are made meanwhile
        try:
            live = await self._opened(ctx, upstream, leg)
        except BaseException:
            parsing.close()
            raise
        ctx.answer = self._answer(ctx, Format.GENERATE, parsing.attach(live), live.headers)
        ctx.answer.parsed = job["context"] is not None
        if mode is not None:
            check_first_echo(self.type, mode, live.first_event)

    async def _stopped(self, ctx: RequestContext, upstream: Upstream, leg: Leg, mode: str | None, job: Json) -> None:
        """Have a whole answer that a stop string may end, which the worker cannot see: listen, and hang up on it."""
        assert upstream.parsers is not None, "the wiring makes parsers where decode says so"
        leg = replace(leg, body=_listened_to(leg.body))
        await self._parsed_stream(ctx, upstream, leg, mode, {**job, "context": None})
        held, collected = ctx.answer, Collected()
        assert held is not None and not isinstance(held.source, bytes), "that was a stream"
        try:
            while not await held.source.push(collected.feed):
                pass
            await held.aclose()
            reply = collected.reply()
        except ApiError as error:
            held.source.ended(error)
            raise
        held.source.ended(None)
        if job["context"] is not None:
            reply = await upstream.parsers.whole({**job, "decoding": None}, reply)
        ctx.answer = self._answer(ctx, Format.GENERATE, dumps(reply), held.headers)
        ctx.answer.body = reply

    def _may_be_stopped(self, ctx: RequestContext, job: Json) -> bool:
        """Say whether a stop string may end a whole answer here; no stream has a prompt's logprobs, so not these."""
        return bool((job["decoding"] or {}).get("stop")) and not wants_prompt_logprobs(ctx.api, ctx.body)

    def _left_to_service(self, ctx: RequestContext, fmt: Format) -> bool:
        """Say whether stop strings end the answer that the derender step has to find by the service's word."""
        by_service = self.params.derender == "service" and self._wraps(ctx.api, fmt)
        return by_service and stops_of(ctx.rendered or {}) is not None

    async def _opened(self, ctx: RequestContext, upstream: Upstream, leg: Leg) -> LiveStream:
        live = await upstream.stream(ctx, leg)
        if isinstance(live, Reply):
            raise LegUnreadable(self.type, "the worker was asked for a stream and answered with one JSON body")
        return live

    def _hand_on(self, ctx: RequestContext, fmt: Format, answer: Answer) -> None:
        """Set the answer, or what the derender step makes it of."""
        if self.params.derender == "service" and self._wraps(ctx.api, fmt):
            ctx.generated = answer
        else:
            ctx.answer = answer

    def _answer(self, ctx: RequestContext, fmt: Format, source: bytes | LiveStream, headers: Headers) -> Answer:
        return Answer(
            source,
            fmt,
            wrap=self._wraps(ctx.api, fmt),
            headers=headers,
            expose_transfer_params=self._settings.expose_transfer_params,
        )

    def _wraps(self, api: Format, fmt: Format) -> bool:
        return fmt is Format.GENERATE and api in self._wrapped

    def _notes(self, api: Format, fmt: Format) -> tuple[str, ...]:
        if fmt is not Format.GENERATE:
            return ("the worker's answer passes through",)
        if api is Format.GENERATE:
            return ("output_mode is the client's own",)
        rebuilt = f"rebuilt as {api}" if api in self._wrapped else "the generate envelope passes through"
        return (f"output_mode {mode_for(api, self.params.mode)}", rebuilt)


def _listened_to(body: Json) -> Json:
    """Return the body of a leg whose answer may be ended by us, so that it is heard as it comes."""
    return {**body, "stream": True, "stream_options": {"include_usage": True}}
