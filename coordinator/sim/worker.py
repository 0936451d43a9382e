"""One simulated vLLM server: a real aiohttp application on an ephemeral loopback port."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from typing import TYPE_CHECKING, Any, Literal

from aiohttp import web

from coordinator.sim import chat, completions, generate, messages, probes, render, responses
from coordinator.sim.answers import Answer, Call, Received, Whole
from coordinator.sim.bootstrap import BootstrapServer
from coordinator.sim.core import Core
from coordinator.sim.encodings import EncodingStore
from coordinator.sim.faults import Behaviour, Fault
from coordinator.sim.handover import HandoverStore
from coordinator.sim.pairs import Mooncake, PairStore, Sglang
from coordinator.sim.plug import plug
from coordinator.sim.refusals import SCHEMA, Refusal, scale_out_off
from coordinator.sim.schema import parse_object
from coordinator.sim.settings import Settings
from coordinator.sim.writer import Reset, misbehave_early, write

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable

    Route = Callable[[Core, Call], Awaitable[Answer]]

Role = Literal["render", "encode", "prefill", "decode"]

_RENDER: dict[str, Route] = {
    "/v1/chat/completions/render": render.chat,
    "/v1/completions/render": render.completions,
    "/v1/responses/render": render.responses,
    "/v1/messages/render": render.messages,
}
_SERVE: dict[str, Route] = {
    "/inference/v1/generate": generate.generate,
    "/v1/chat/completions": chat.chat,
    "/v1/completions": completions.completions,
    "/v1/responses": responses.responses,
    "/v1/messages": messages.messages,
}
_ABORT = "/inference/v1/abort_requests"
_LEGACY_ABORT = "/abort_requests"  # registered with --tokens-only alone, and needs no key
_ROUTES: dict[Role, dict[str, Route]] = {
    "render": _RENDER,
    **dict.fromkeys(("encode", "prefill", "decode"), _RENDER | _SERVE),
}
_SGLANG = {path: route for path, route in _SERVE.items() if path.startswith("/v1/")}
_UNAUTHORIZED = Whole({"error": "Unauthorized"}, 401)
_GUARDED = ("/v1", "/inference")
_SCALE_OUT = ("/inference/v1/generate", _ABORT)
# What makes two requests the same prompt, for the rule ``seen_before``.
_PROMPT_FIELDS = ("token_ids", "messages", "prompt", "input", "system", "tools")


# How many requests a worker remembers; a demo may run for days.
_KEPT = 10_000
_MAX_HEAD_BYTES = 1 << 16  # as uvicorn


class SimWorker:
    """
    Attributes:
        received: the requests, also those that were refused or that hit a fault.
        aborted: those whose client went away before the answer ended.
        in_flight: requests that are being answered.
        behave: its manners; may be changed at any time.
        core: the engine core, with its counters.
        pairs: where its legs meet those of others, with connectors that need both in flight.
        bootstrap: of a Mooncake prefill worker, the server that decode workers ask who it is.
    """

    def __init__(
        self,
        role: Role,
        *,
        settings: Settings | None = None,
        store: HandoverStore | None = None,
        encodings: EncodingStore | None = None,
        pairs: PairStore | None = None,
        behave: Behaviour | None = None,
        engine_id: str | None = None,
    ) -> None:
        self.role = role
        self.behave = behave or Behaviour()
        self.received: list[Received] = []
        self.aborted: list[Received] = []
        self.in_flight = 0
        self.core = Core(
            settings or Settings(),
            store or HandoverStore(),
            encodings or EncodingStore(),
            engine_id=engine_id or f"engine-{role}-{secrets.token_hex(4)}",
            encoder=role == "encode",
        )
        self.pairs = pairs or PairStore()
        self.core.pair = self._side()
        self.bootstrap: BootstrapServer | None = None
        if self.settings.kv == "mooncake" and role == "prefill":
            self.bootstrap = BootstrapServer(self.pairs, self.core.engine_id, self.settings.dp_size)
        self._port = 0
        self._seen: set[str] = set()
        self._stopping = False
        self._runner: web.AppRunner | None = None
        self._site: web.TCPSite | None = None
        self._plug: socket.socket | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def settings(self) -> Settings:
        return self.core.settings

    @property
    def store(self) -> HandoverStore:
        return self.core.store

    @property
    def dead(self) -> bool:
        return self.core.dead

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._server.connections) if self._runner else 0

    def _side(self) -> Mooncake | Sglang | None:
        if self.settings.kv == "mooncake":
            return Mooncake(self.pairs, self.core.engine_id, self.settings.dp_size)
        return Sglang(self.pairs, self.role) if self.settings.kv == "sglang" else None

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        app.on_response_prepare.append(self._add_headers)
        # Cancelling a handler is how a client that went away is noticed, also before the first byte.
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=0.1,
            max_line_size=_MAX_HEAD_BYTES,
            max_field_size=_MAX_HEAD_BYTES,
        )
        await self._runner.setup()
        await self.accept_connections()
        if self.bootstrap is not None:
            await self.bootstrap.start()

    async def stop(self) -> None:
        self._stopping = True
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        self._unplug()
        if self.bootstrap is not None:
            await self.bootstrap.stop()

    async def refuse_connections(self) -> None:
        """Stop listening, as a process that is gone; what is connected is cut."""
        if self._site is not None:
            await self._site.stop()
            self._site = None
            self._plug = plug(self._port)
        for connection in self._server.connections:
            if connection.transport is not None:
                connection.transport.close()

    async def accept_connections(self) -> None:
        """Listen, again on the same port if there was one; an engine that died is a new one."""
        assert self._runner is not None, "not started"
        self._unplug()
        self._site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await self._site.start()
        self.core.dead = False
        self._port = self.core.port = self._runner.addresses[0][1]

    def _unplug(self) -> None:
        if self._plug is not None:
            self._plug.close()
            self._plug = None

    @property
    def _server(self) -> web.Server:
        assert self._runner is not None
        assert self._runner.server is not None
        return self._runner.server

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = "uvicorn"
        if self.settings.request_id_headers:
            response.headers["X-Request-Id"] = request.headers.get("X-Request-Id") or secrets.token_hex(16)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        received = _received(request, raw)
        self.received.append(received)
        del self.received[:-_KEPT]
        self.in_flight += 1
        try:
            return await self._respond(request, received)
        except Reset:
            return web.Response()
        except ConnectionError:  # raised on, it would be logged as a fault of ours
            self._note_abort(received)
            return web.Response()
        except asyncio.CancelledError:
            self._note_abort(received)
            raise
        finally:
            self.in_flight -= 1

    def _note_abort(self, received: Received) -> None:
        if not self._stopping:
            self.aborted.append(received)

    async def _respond(self, request: web.Request, received: Received) -> web.StreamResponse:
        fault = self.behave.take(received.path, probe=received.path in probes.PATHS)
        early = await misbehave_early(request, fault)
        if early is not None:
            return early
        response = await write(request, await self._answer(received, fault), fault)
        if self.core.dead and not self._stopping:
            await self.refuse_connections()
        return response

    async def _answer(self, received: Received, fault: Fault) -> Answer:
        try:
            if received.path in probes.PATHS:
                return probes.answer(self.core, received.path) if self._has_key(received) else _UNAUTHORIZED
            return await self._route(received, fault)
        except Refusal as refusal:
            return Whole(refusal.body(), refusal.status)

    async def _route(self, received: Received, fault: Fault) -> Answer:
        path = received.path
        sglang = self.settings.kv == "sglang"
        route = (_SGLANG if sglang else _ROUTES[self.role]).get(path)
        legacy = path == _LEGACY_ABORT and self.settings.tokens_only
        aborts = (path == _ABORT or legacy) and self.role != "render"
        if not self._has_key(received):
            return _UNAUTHORIZED
        if route is None and not aborts:
            return Whole({"detail": "Not Found"}, 404)
        if received.method != "POST":
            return Whole({"detail": "Method Not Allowed"}, 405)
        if not self.settings.scale_out and (path in _SCALE_OUT or path.endswith("/render")):
            raise scale_out_off()
        if aborts:
            return self._abort(received)
        assert route is not None
        body = parse_object(received.raw, received.header("content-type") or "")
        if sglang:
            body = _with_room(body, prefill=self.role == "prefill")
        if self._misses(received, body):
            return Whole("the prompt is not cached", 412)
        itl_s = fault.itl_s or 0.0
        call = Call(received, body, itl_s=itl_s, tokens_per_step=self.behave.tokens_per_step)
        try:
            return await route(self.core, call)
        except Refusal as refusal:
            if path.startswith("/v1/") and refusal.type != SCHEMA:
                self._free(body)
            raise

    def _abort(self, received: Received) -> Answer:
        try:
            body = json.loads(received.raw)
        except ValueError as error:
            raise Refusal(f"JSON decode error: {error}", type=SCHEMA) from error
        if "request_ids" not in body:
            raise Refusal("Missing 'request_ids' in request body", type=SCHEMA)
        ids = body["request_ids"]
        self.core.abort([ids] if isinstance(ids, str) else ids)
        return Whole(None)

    def _has_key(self, received: Received) -> bool:
        key = self.settings.api_key
        guarded = received.path.startswith(_GUARDED)
        return key is None or not guarded or received.header("authorization") == f"Bearer {key}"

    def _misses(self, received: Received, body: dict[str, Any]) -> bool:
        """Say whether a probe for a cached prompt is to be answered 412, as an endpoint picker does."""
        rule = self.behave.cache_rule
        if rule is None:
            return False
        prompt = json.dumps([body.get(name) for name in _PROMPT_FIELDS], sort_keys=True)
        hit = rule(received) if callable(rule) else rule == "always_hit" or prompt in self._seen
        if rule == "always_miss":
            hit = False
        if received.header("prefer") == "if-available" and not hit:
            return True
        self._seen.add(prompt)
        return False

    def _free(self, body: dict[str, Any]) -> None:
        """Tell the prefill to let go: the native routes do so when they refuse what they have read; generate not."""
        params = body.get("kv_transfer_params")
        if isinstance(params, dict) and params.get("do_remote_prefill"):
            self.store.free(params)


def _with_room(body: dict[str, Any], *, prefill: bool) -> dict[str, Any]:
    """Return a request of an SGLang worker as the engine's core takes it: what ties the legs, and where to stop.

    A prefill worker stops after one token, whatever was asked for.
    """
    room = {name: body[name] for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room") if name in body}
    caps = [name for name in ("max_tokens", "max_completion_tokens", "max_output_tokens") if name in body]
    stop = dict.fromkeys(caps or ["max_tokens"], 1) if prefill else {}
    return {**body, **stop, "kv_transfer_params": room}


def _received(request: web.Request, raw: bytes) -> Received:
    try:
        body = json.loads(raw) if raw else None
    except ValueError:
        body = None
    headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in request.raw_headers)
    return Received(request.method, request.path, headers, raw, body, time.monotonic(), request.query_string)
