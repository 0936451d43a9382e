"""What a request would become: the body and headers of every leg, worked out without sending anything.

The real pipeline runs against an upstream that writes down what it is given and answers with stand-ins for what only
workers know: token ids, what media becomes, the hand-over.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coordinator.context import RequestContext
from coordinator.headers import leg_headers, leg_id, request_id, upstream_headers
from coordinator.pipeline import Pipeline
from coordinator.step import Fetched, Reply
from envelope.client_request import check
from envelope.errors import ApiError, BadRequest, NoWorker
from envelope.formats import PATHS, Format
from envelope.generate import asked_mode
from envelope.json_codec import dumps
from envelope.kv_transfer import without_transfer_params
from envelope.media_items import has_sound_in_video, media_items
from envelope.media_types import Kind
from envelope.passthrough import DONE
from envelope.sampling import client_sampling
from envelope.sse import frame

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from coordinator.context import Headers, LiveStream
    from coordinator.routing.router import Worker
    from coordinator.step import Events, FetchLimits, Leg, Step
    from coordinator.upstream import RoleLink
    from envelope.json_codec import Json

STAND_IN_TOKENS = [101, 102, 103]

# Stands for a number that only render knows; a worker never sees it.
STAND_IN_CAP = "<the rest of the context>"

STAND_IN_TYPES = {
    Kind.IMAGE: "image/png",
    Kind.AUDIO: "audio/wav",
    Kind.VIDEO: "video/mp4",
    Kind.DOCUMENT: "application/pdf",
}

STAND_IN_HANDOVER: Json = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1]],
    "remote_engine_id": "<prefill's engine>",
    "remote_request_id": "<prefill's request>",
    "remote_host": "<prefill's host>",
    "remote_port": 5600,
}

STAND_IN_PLACEHOLDER = 999
STAND_IN_ENCODING: Json = {"peer_host": "<encode's host, where the connector has one>", "peer_port": 5502}

_FEATURES = ("mm_hashes", "mm_placeholders", "kwargs_data", "mm_metadata")

# A terminal is a log, and so is what an operator pastes into a ticket.
_SECRETS = frozenset(("authorization", "api-key", "x-api-key", "cookie"))


@dataclass(frozen=True, slots=True)
class SentLeg:
    """One leg as it would be sent; ``picked`` is how its worker came to be picked."""

    step: str
    method: str
    url: str
    headers: Headers
    body: Json
    picked: str | None = None

    def as_json(self) -> Json:
        """Return the leg to be shown: keys are masked, all else is exact."""
        return {
            "step": self.step,
            "method": self.method,
            "url": self.url,
            **({} if self.picked is None else {"picked": self.picked}),
            "headers": [[name, _masked(name, value)] for name, value in self.headers],
            "body": self.body,
        }


class _Scribe:
    """Implements ``coordinator.step.Upstream`` without a network."""

    def __init__(self, links: Mapping[str, RoleLink]) -> None:
        self._links = links
        self.sent: list[SentLeg] = []
        self.media = _NoFetcher(self.sent)
        self.bootstrap = _NoBootstrap()
        self.parsers = _NoParsers()
        self._chosen: Worker | None = None

    def choose(self, ctx: RequestContext, role: str, needs: str = "") -> Worker:
        self._chosen = self._links[role].router.pick(ctx)
        if self._chosen is None:
            raise NoWorker(role, f"there is no {role} worker")
        return self._chosen

    def serves(self, ctx: RequestContext, role: str) -> bool:
        return self._links[role].router.serves(ctx)

    def uncached_tokens(self, ctx: RequestContext, role: str, most: int) -> int | None:
        return None  # stand-in tokens say nothing of a prompt; a new and long one is what shows the whole pipeline

    async def post_json(self, ctx: RequestContext, leg: Leg, *, accept: tuple[int, ...] = ()) -> Reply:
        self._write_down(ctx, leg)
        if leg.step == "conditional-decode":
            return Reply(412, b"", None)  # a miss is what shows the rest of the pipeline
        body = _stand_in(ctx, leg)
        return Reply(200, dumps(body), body)

    async def stream(self, ctx: RequestContext, leg: Leg, *, accept: tuple[int, ...] = ()) -> _Opened | Reply:
        if leg.step == "conditional-decode":
            return await self.post_json(ctx, leg, accept=accept)
        self._write_down(ctx, leg)
        return _Opened(dumps(_stand_in(ctx, leg)))

    def _write_down(self, ctx: RequestContext, leg: Leg) -> None:
        worker = self._links[leg.role].router.pick(ctx) if leg.to is None else self._chosen
        if worker is None:
            raise NoWorker(leg.step, f"there is no {leg.role} worker")
        headers = (("Content-Type", "application/json"), *leg_headers(ctx, leg, worker))
        picked = self._links[leg.role].router.why(ctx, worker)
        self.sent.append(SentLeg(leg.step, "POST", worker.url + leg.path, headers, leg.body, picked))


class _NoBootstrap:
    """Implements ``coordinator.step.Bootstrap`` without a network."""

    async def engines(self, ctx: RequestContext, address: str) -> Mapping[int, str]:
        return {0: "<prefill's engine>"}

    def forget(self, address: str) -> None:
        pass


class _NoParsers:
    """Implements ``coordinator.step.Parsers``, and ``Parsing``, of answers that hold nothing to parse."""

    eos_token_id = None

    def open(self, job: Json) -> _NoParsers:
        return self

    async def whole(self, job: Json, reply: Json) -> Json:
        return reply

    def attach(self, live: LiveStream) -> LiveStream:
        return live

    def close(self) -> None:
        pass


class _NoFetcher:
    """Implements ``coordinator.step.MediaFetcher`` without a network."""

    def __init__(self, sent: list[SentLeg]) -> None:
        self._sent = sent

    async def fetch(self, url: str, kind: Kind, limits: FetchLimits) -> Fetched:
        self._sent.append(SentLeg("replace-media-urls", "GET", url, (), {}))
        return Fetched(STAND_IN_TYPES[kind], b"<what is there>")


class _Opened:
    """A stream of one stand-in event, and its end."""

    headers: Headers = ()

    def __init__(self, first_event: bytes) -> None:
        self.first_event = first_event
        self._given = False

    def ended(self, error: ApiError | None) -> None:
        pass

    async def push(self, take: Callable[[bytes], bool]) -> bool:
        if self._given:
            return True
        self._given = True
        return take(frame(self.first_event) + frame(DONE))

    async def aclose(self) -> None:
        pass


async def explain(
    steps: Sequence[Step],
    links: Mapping[str, RoleLink],
    events: Events,
    api: Format,
    body: Any,
    raw_headers: Headers,
    routing_headers: Sequence[str],
    discard: Sequence[str] = (),
) -> list[SentLeg]:
    """Return the legs that a request would make, in their order.

    Args:
        raw_headers: the client's headers.
        routing_headers: lower-case names of those that name workers.
        discard: lower-case names of those that only workers may set.

    Raises:
        ApiError: the request would be refused.
    """
    named = {name.lower(): value for name, value in raw_headers}
    for name in routing_headers:
        if sum(sent.lower() == name for sent, _ in raw_headers) > 1:
            raise BadRequest(f"the header {name} was sent more than once; send it once", param=name)
    client_id = request_id(named.get("x-request-id", "example"))
    clean = without_transfer_params(check(api, body))
    ctx = RequestContext(
        request_id=client_id,
        leg_id=leg_id(client_id),
        api=api,
        body=clean,
        headers=upstream_headers(raw_headers, frozenset((*routing_headers, *discard))),
        routing={name: named[name] for name in routing_headers if name in named},
        stream=bool(clean.get("stream")),
    )
    scribe = _Scribe(links)
    await Pipeline(steps, scribe, events, time.monotonic).run(ctx)
    return scribe.sent


def guess_api(body: Any) -> Format:
    """Return the API that a body is written for."""
    if isinstance(body, dict):
        if "token_ids" in body:
            return Format.GENERATE
        if "prompt" in body:
            return Format.COMPLETIONS
        if "input" in body:
            return Format.RESPONSES
    return Format.CHAT


def _stand_in(ctx: RequestContext, leg: Leg) -> Any:
    if leg.role == "render":
        token_ids, features = _rendered_media(ctx)
        rendered = {
            "request_id": f"chatcmpl-{ctx.leg_id}",
            "token_ids": token_ids,
            **({} if features is None else {"features": features}),
            "sampling_params": {"max_tokens": STAND_IN_CAP, **client_sampling(ctx.api, ctx.body), "output_kind": 2},
            "model": ctx.body.get("model"),
            "parse_context": {} if ctx.api in (Format.CHAT, Format.MESSAGES) else None,
        }
        return [rendered] if ctx.api is Format.COMPLETIONS else rendered
    if leg.role == "encode":
        # Of all media at once: each leg keeps its own.
        return {"ec_transfer_params": {each: STAND_IN_ENCODING for _, each in _hashed_media(ctx)}}
    if leg.role == "prefill":
        return {"choices": [{"index": 0, "finish_reason": "length"}], "kv_transfer_params": STAND_IN_HANDOVER}
    if leg.role == "decode":
        mode = asked_mode(leg.body) if leg.path == PATHS[Format.GENERATE] else None
        choice = {"index": 0, "finish_reason": "stop", "text": "", "token_ids": STAND_IN_TOKENS}
        return {"choices": [choice], "output_mode": mode}
    if leg.role == "derender":
        return _derendered(leg.body)
    raise NoWorker(leg.step, f"explain knows no {leg.role} workers")


def _derendered(body: Json) -> Json:
    """Return what a derender service would answer, for a whole answer or a chunk."""
    choice = {"index": 0, "text": "", "message": {"content": ""}, "delta": {}, "finish_reason": "stop"}
    answer: Json = {"choices": [choice]}
    return {"chunk": answer, "stream_state": {}} if body.get("stream") else answer


def _rendered_media(ctx: RequestContext) -> tuple[list[int], Json | None]:
    """Return a prompt in which each piece of media has one token, and where it stands."""
    token_ids = list(STAND_IN_TOKENS)
    features: Json = {name: {} for name in _FEATURES}
    for modality, each in _hashed_media(ctx):
        item = (each, {"offset": len(token_ids), "length": 1}, f"<tensors of {each}>", f"<metadata of {each}>")
        for name, value in zip(_FEATURES, item, strict=True):
            features[name].setdefault(modality, []).append(value)
        token_ids.append(STAND_IN_PLACEHOLDER)
    return token_ids, features if features["mm_hashes"] else None


def _hashed_media(ctx: RequestContext) -> list[tuple[str, str]]:
    """Return modality and a name in the place of the hash for each piece of media, the same name for the same media."""
    names: dict[Any, str] = {}
    found = []
    for item in media_items(ctx.api, ctx.body):
        name = names.setdefault(item.same, f"hash of {item.where}")
        found.append((str(item.kind), name))
        if item.kind is Kind.VIDEO and has_sound_in_video(ctx.body):
            found.append((str(Kind.AUDIO), f"hash of the sound of {item.where}"))
    return found


def _masked(name: str, value: str) -> str:
    if name.lower() not in _SECRETS:
        return value
    scheme, blank, _ = value.partition(" ")
    return f"{scheme} ***" if blank and name.lower() == "authorization" else "***"
