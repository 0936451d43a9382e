"""prefill-decode: a prefill and a decode leg in flight at once, for connectors whose decode meets prefill at work.

Both are the legs of the steps of those names. What ties them together is made anew for every attempt, and put on their
bodies on the way out. The first leg that fails ends the other and decides what the client gets; while nothing of the
answer has reached the client, both are sent again, to another pair of workers if there is one.

A prefill that is given up with its decode: SGLang frees both sides when either request ends. Mooncake's decode keeps
room for the blocks until they come, so there prefill runs to its end although nobody waits (``prefill_runs_on``).

Source: vLLM 0.33 ``v1/core/sched/scheduler.py`` (``finish_requests``), ``mooncake_connector.py``
(``send_kv_to_decode``); SGLang 0.5.23 ``disaggregation/common/conn.py`` (abort notifications).
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import urlsplit

from coordinator.context import LegTime
from envelope.client_request import choices
from envelope.connectors import KV_CONNECTORS, Several, Tie
from envelope.errors import ApiError, BadRequest, LegError, NotSupported
from envelope.formats import Format
from envelope.kv_transfer import HandoverMissing, read_handover
from envelope.pairing import by_kv_request, by_room, by_transfer
from steps import decode, prefill
from steps.joined import Joined, end, settle
from steps.tied import Again, Tied

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from coordinator.context import Headers, RequestContext
    from coordinator.step import Leg, Peer, PipelineSettings, PlanRow, Reply, Upstream
    from envelope.connectors import KvConnector
    from envelope.pairing import Pair

# How long a prefill that runs on may take.
_RUNS_ON_S = 120.0


class Params(decode.Params, prefill.Params):
    """What the two steps have; time limits and attempts are those of the pair."""


class PrefillDecode:
    """Compute the prompt on one worker while another is ready to take it and generate the answer."""

    type: ClassVar[str] = "prefill-decode"
    role: ClassVar[str] = "decode"

    def __init__(self, params: Params, settings: PipelineSettings) -> None:
        self.params = params
        self._kv = KV_CONNECTORS[params.kv_connector] if params.kv_connector else settings.kv
        self._settings = settings = replace(settings, kv=self._kv)
        self._prefill = prefill.Prefill(params, settings)
        self._decode = decode.Decode(params, settings)
        self._turn = -1

    def admit(self, ctx: RequestContext) -> None:
        if self._kv.openai_only and ctx.api is Format.GENERATE:
            raise NotSupported(f"the workers behind this coordinator ({self._kv.name}) have no generate route")
        if self._kv.several is Several.REFUSED and choices(ctx.api, ctx.body) > 1:
            raise BadRequest(
                f"n must be 1: with {self._kv.name}, workers would let all samples of a prompt share one hand-over",
                param="n",
            )
        self._decode.admit(ctx)

    async def run(self, ctx: RequestContext, upstream: Upstream) -> str:
        if reason := self._prefill.reason_to_skip(ctx, upstream):
            if not self._kv.decodes_alone:
                raise BadRequest(f"the request names no prefill worker, and {self._kv.name} needs one")
            self._settings.events.prefill_skipped(reason)
            await self._decode.run(ctx, upstream)
            return "skipped"
        id, attempt = ctx.leg_id, 1
        while True:
            again = attempt < self.params.max_attempts
            try:
                return await self._together(ctx, upstream, again=again)
            except LegError as error:
                if not (again and error.retryable and error.elsewhere):
                    raise
                attempt += 1
                self._settings.events.begun_again()
                ctx.begin_again(f"{id}-{attempt}")

    def plan(self, api: Format) -> PlanRow:
        row = self._decode.plan(api)
        return replace(
            row, step=self.type, also=(self._prefill.role,), notes=(f"beside prefill by {self._kv.name}", *row.notes)
        )

    def release_leg(self, ctx: RequestContext, handover: Mapping[str, Any]) -> Leg:
        return self._decode.release_leg(ctx, handover)

    async def _together(self, ctx: RequestContext, upstream: Upstream, *, again: bool) -> str:
        """Make one attempt.

        Args:
            again: another attempt may follow, so what the file says of a prefill that failed is not yet done.

        Raises:
            ApiError: of the leg that failed first.
        """
        try:
            worker = upstream.choose(ctx, self._prefill.role, self._prefill.plan(ctx.api).path or "")
            pair, headers = await self._tie(ctx, upstream, worker)
        except LegError as error:
            if again and error.retryable and error.elsewhere:
                raise
            self._prefill.fail_over(error)
            await self._decode.run(ctx, upstream)
            return "failed_over"
        if not self._kv.own_body:
            ctx.handover, ctx.handover_at = pair.decode, self._settings.clock()
        ctx.prefilled = True
        held = _Held(ctx, self._kv, pair)
        loop = asyncio.get_running_loop()
        # Owned: what is not awaited here is cancelled at the end, or goes with the stream.
        prefilling = loop.create_task(self._run_prefill(ctx, self._to_prefill(upstream, held, worker, headers, again)))
        # Where decode takes params, its step puts them there, as it does with any hand-over.
        fields = pair.decode if self._kv.own_body else {}
        decoding = loop.create_task(self._decode.run(ctx, Tied(upstream, self._kv, fields, {})))
        try:
            how = await _first(prefilling, decoding)
            if how in (None, "ok"):
                await decoding
            else:  # the file says that decode may do without
                await end(decoding)
                self._forget(upstream, pair)
                ctx.handover, ctx.prefilled = None, False
                await self._decode.run(ctx, upstream)
        except BaseException:
            await end(prefilling, decoding)
            await ctx.aclose()
            ctx.answer = ctx.generated = None
            held.give_up(prefilling)
            self._forget(upstream, pair)
            raise
        await self._join(ctx, prefilling)
        return how or "ok"

    def _forget(self, upstream: Upstream, pair: Pair) -> None:
        """Ask anew whose engine is behind the address of a pair that failed."""
        upstream.bootstrap.forget(pair.decode.get("remote_bootstrap_addr", ""))

    def _to_prefill(self, upstream: Upstream, held: _Held, worker: Peer, headers: Headers, again: bool) -> Tied:
        changes: dict[str, Any] = {"to": worker, "headers": headers}
        if self._kv.prefill_runs_on:
            changes |= {"runs_on_s": _RUNS_ON_S, "late": held.came}
        return Tied(upstream, self._kv, held.pair.prefill, changes, again=again)

    async def _tie(self, ctx: RequestContext, upstream: Upstream, worker: Peer) -> tuple[Pair, Headers]:
        """Return what ties the legs to this worker, and the headers that prefill needs for it."""
        host, port = urlsplit(worker.url).hostname or "", self._settings.bootstrap_port(worker.url)
        if self._kv.tie is Tie.ROOM:
            return by_room(host, port, 1 + secrets.randbelow(2**63 - 1)), ()
        if self._kv.tie is Tie.KV_REQUEST:
            return by_kv_request(secrets.token_hex(16), host, port), ()
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        try:
            engines = await upstream.bootstrap.engines(ctx, address)
        except LegError as error:
            ctx.failed.append(worker)
            error.retryable = error.elsewhere = True
            raise
        self._turn += 1
        rank = sorted(engines)[self._turn % len(engines)]
        # A worker with one rank may know it by another number than its bootstrap server does.
        headers = (("X-data-parallel-rank", str(rank)),) if len(engines) > 1 else ()
        return by_transfer(f"xfer-{secrets.token_hex(16)}", address, engines[rank]), headers

    async def _run_prefill(self, ctx: RequestContext, upstream: Upstream) -> str:
        begun, outcome, before = self._settings.clock(), "cancelled", len(ctx.attempts)
        try:
            outcome = await self._prefill.run(ctx, upstream)
        except Again as again:
            outcome = type(again.error).__name__
            raise again.error from None
        except ApiError as error:
            outcome = type(error).__name__
            raise
        finally:
            attempts = [attempt for attempt in ctx.attempts[before:] if attempt.step == self._prefill.type]
            ctx.legs.append(LegTime(self._prefill.type, self._settings.clock() - begun, outcome, attempts, begun))
            if ctx.places is not None:
                ctx.places.free(self._prefill.role)
        return outcome

    async def _join(self, ctx: RequestContext, prefilling: asyncio.Task[str]) -> None:
        answer = ctx.answer or ctx.generated
        assert answer is not None, "decode has run"
        if isinstance(answer.source, bytes):
            await settle(prefilling)
        else:
            answer.source = Joined(answer.source, prefilling)


async def _first(prefilling: asyncio.Task[str], decoding: asyncio.Task[str]) -> str | None:
    """Wait for the first leg to end; return how prefill went, None while it runs.

    Raises:
        ApiError: prefill failed.
    """
    await asyncio.wait((prefilling, decoding), return_when=asyncio.FIRST_COMPLETED)
    return prefilling.result() if prefilling.done() else None


class _Held:
    """What prefill holds for a decode, once either was given up: if nobody has come for it, it is to be released."""

    def __init__(self, ctx: RequestContext, kv: KvConnector, pair: Pair) -> None:
        self.pair = pair
        self._ctx = ctx
        self._kv = kv
        self._there = False
        self._unread = False

    def give_up(self, prefilling: asyncio.Task[str]) -> None:
        """Take the hand-over back from a decode that has ended without an answer."""
        ctx = self._ctx
        ended_well = not prefilling.cancelled() and prefilling.exception() is None
        if ended_well and self._kv.delivered:
            return  # it is on the context, as any that decode was to read
        self._unread = self._kv.delivered and prefilling.cancelled() and not ctx.handover_fetched
        ctx.handover = None
        self._tell()

    def came(self, reply: Reply) -> None:
        """Hear how a prefill ended that was left to run on."""
        with suppress(HandoverMissing):
            read_handover(self._kv, reply.body)
            self._there = True
            self._tell()

    def _tell(self) -> None:
        if self._there and self._unread:
            self._ctx.abandoned.append(self.pair.decode)
            # Of a pair that has taken its place, a hand-over may be on its way yet: then all is released at its end.
            if self._ctx.handover is None or self._ctx.handover_fetched:
                self._ctx.on_late_handover(self._ctx)
