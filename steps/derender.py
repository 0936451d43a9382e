"""derender: what decode has generated, as token ids, becomes text, reasoning and tool calls by a service's word.

The service keeps nothing between calls. A whole answer takes one; a stream takes one for each chunk, on the way of
every token, and on a service with parsers each costs more than the one before: it parses again from the start. Where
latency counts, ``derender: coordinator`` on the decode step keeps the parser with the request instead.

Source: the RFC's pipeline of render, generate and derender; vLLM 0.33 ``entrypoints/scale_out/derender``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from coordinator.context import Answer
from coordinator.settings.outbound import Outbound
from coordinator.settings.units import BaseUrl, Duration
from coordinator.step import Leg, LegLimits, PlanRow
from envelope.derender import (
    chunk_body,
    derender_path,
    derendered,
    derendered_chunk,
    request_of,
    text_body,
    whole_body,
)
from envelope.errors import ApiError, LegError, LegUnreadable
from envelope.formats import Format
from envelope.json_codec import JSONDecodeError, dumps, loads_lenient
from envelope.rebuild import choices_of, reading
from envelope.sse import Events, data_of, frame
from steps.params import StepParams
from steps.stop_search import StopSearch, stops_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.context import Headers, LiveStream, RequestContext
    from coordinator.step import PipelineSettings, Upstream
    from envelope.json_codec import Json


class Params(StepParams, Outbound):
    """Where the service is, and how long one call to it may take."""

    address: BaseUrl = Field(description="the derender service, as http://host:port; a render service has its routes")
    timeout: Duration = Field(default=30.0, description="one derender call; 0 is no limit")
    max_idle_conns_per_host: int = Field(default=100, ge=1, description="keep-alive connections kept open")
    idle_conn_timeout: Duration = Field(default=90.0, description="how long an idle connection is kept")


class Derender:
    """Ask the service what the tokens say. Takes ``ctx.generated``, sets ``ctx.answer``."""

    type: ClassVar[str] = "derender"
    role: ClassVar[str] = "derender"

    def __init__(self, params: Params, settings: PipelineSettings) -> None:
        self.params = params
        self._limits = LegLimits(request_s=params.timeout or None)

    def admit(self, ctx: RequestContext) -> None:
        """Take every request: what render was given, this step can name to the service."""

    async def run(self, ctx: RequestContext, upstream: Upstream) -> str:
        generated, calls = ctx.generated, Calls(ctx, upstream, self._limits)
        assert generated is not None, "the registry lets no derender step stand before decode"
        if isinstance(generated.source, bytes) or calls.search is not None:
            body = await calls.whole(await _reply(generated, calls))
            ctx.answer = Answer(dumps(body), Format.GENERATE, wrap=True, headers=generated.headers, body=body)
            return "ok"
        stream = DerenderedStream(generated.source, calls)
        try:
            await stream.begin()
        except ApiError as error:
            stream.ended(error)
            raise
        parsed = ctx.api is not Format.COMPLETIONS
        ctx.answer = Answer(stream, Format.GENERATE, wrap=True, parsed=parsed, headers=generated.headers)
        return "ok"

    def plan(self, api: Format) -> PlanRow:
        if api is Format.GENERATE:
            return PlanRow(api, self.type, None, None, None, ("the client takes token ids",))
        notes = ("one call for a whole answer, one per chunk for a stream",)
        return PlanRow(api, self.type, self.role, api, derender_path(api), notes)


class Calls:
    """The calls of one request, and the state that each choice of a stream carries from one to the next."""

    def __init__(self, ctx: RequestContext, upstream: Upstream, limits: LegLimits) -> None:
        assert ctx.rendered is not None, "tokens-in has a render step"
        self._ctx, self._upstream, self._limits = ctx, upstream, limits
        self._rendered = ctx.rendered
        self._request = request_of(ctx.api, ctx.rendered, ctx.body)
        self._states: dict[int, Json] = {}
        stops = stops_of(ctx.rendered)
        self.search = None if stops is None else StopSearch(self, stops)

    @property
    def prompt_tokens(self) -> int:
        return len(self._rendered["token_ids"])

    async def whole(self, reply: Json) -> Json:
        """Return a whole generate answer, derendered."""
        if not any(choice.get("token_ids") for choice in choices_of(reply)):
            return derendered(self._ctx.api, reply, {"choices": []})
        answer = await self._ask(self._ctx.api, whole_body(self._ctx.api, reply, self._rendered, self._request))
        return derendered(self._ctx.api, reply, answer)

    async def chunk(self, chunk: Json) -> Json:
        """Return one chunk of a generate stream, derendered."""
        with reading("decode"):
            index = chunk["choices"][0]["index"]
            body = chunk_body(self._ctx.api, chunk, self._states.get(index), self._rendered, self._request)
        answer = await self._ask(self._ctx.api, body)
        with reading("derender"):
            self._states[index] = answer["stream_state"]
            return derendered_chunk(self._ctx.api, chunk, answer["chunk"])

    async def text(self, token_ids: list[int], finish: Json, state: Json | None) -> tuple[str, Json]:
        """Implements ``steps.stop_search.Texts``."""
        answer = await self._ask(Format.COMPLETIONS, text_body(token_ids, finish, state, self._rendered))
        with reading("derender"):
            (made,) = answer["chunk"]["choices"]
            return str(made["text"]), answer["stream_state"]

    async def _ask(self, api: Format, body: Json) -> Json:
        path = derender_path(api)
        leg = Leg(Derender.type, Derender.role, path, body, self._limits, idempotent=True)
        reply = await self._upstream.post_json(self._ctx, leg)
        if not isinstance(reply.body, dict):
            raise LegUnreadable(Derender.type, "the service's answer is not a JSON object")
        return reply.body


async def _reply(generated: Answer, calls: Calls) -> Json:
    """Return the worker's whole answer, ended by stop strings where the request has some."""
    search, live = calls.search, generated.source
    if isinstance(live, bytes):
        reply: Json = generated.body
        return reply if search is None else await search.whole(reply, calls.prompt_tokens)
    assert search is not None, "any other stream is derendered as it comes"
    try:
        reply = await search.listen(live, calls.prompt_tokens)
    except ApiError as error:
        _ended(live, error)
        raise
    live.ended(None)
    return reply


def _ended(live: LiveStream, error: ApiError | None) -> None:
    """Tell how a worker's stream ended; a failure of the service is no fault of the worker's."""
    if not (isinstance(error, LegError) and error.leg == Derender.type):
        live.ended(error)


class DerenderedStream:
    """A worker's stream with every chunk of tokens derendered. Implements ``coordinator.context.LiveStream``.

    One chunk at a time: while the service is asked, the worker's socket is not read.
    """

    def __init__(self, live: LiveStream, calls: Calls) -> None:
        self._live = live
        self._calls = calls
        self._events = Events()
        self._waiting: list[bytes] = []  # events that have come and are not derendered
        self._ready: list[bytes] = []  # derendered, not given to anybody
        self._over = False

    @property
    def headers(self) -> Headers:
        return self._live.headers

    @property
    def first_event(self) -> bytes:
        return data_of(self._ready[0]) or b"" if self._ready else self._live.first_event

    async def begin(self) -> None:
        """Derender up to the first event, so that a failure of the service is still one with a status."""
        while not self._ready and await self._more():
            await self._derender()

    async def push(self, take: Callable[[bytes], bool]) -> bool:
        while True:
            while self._ready:
                if not take(self._ready.pop(0)):
                    return False
            if not await self._more():
                return True
            await self._derender()

    def ended(self, error: ApiError | None) -> None:
        _ended(self._live, error)

    async def aclose(self) -> None:
        await self._live.aclose()

    async def _more(self) -> bool:
        """Wait for an event of the worker's; False at the end."""
        while not self._waiting and not self._over:
            self._over = await self._live.push(self._collect)
        return bool(self._waiting)

    def _collect(self, data: bytes) -> bool:
        self._waiting += self._events.feed(data)
        return not self._waiting

    async def _derender(self) -> None:
        event = self._waiting.pop(0)
        data = data_of(event)
        chunk = _chunk_of(data) if data is not None else None
        self._ready.append(event if chunk is None else frame(dumps(await self._calls.chunk(chunk))))


def _chunk_of(data: bytes) -> Json | None:
    """Return a chunk that has a choice; None for the usage, an error and the end mark, which hold no tokens."""
    if data[:1] != b"{":
        return None
    try:
        chunk = loads_lenient(data)
    except JSONDecodeError as error:
        raise LegUnreadable("decode", f"a chunk of the worker's stream is no JSON: {error}") from None
    return chunk if chunk.get("choices") else None
