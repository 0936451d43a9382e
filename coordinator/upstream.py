"""The way to the workers: picks one, sends the leg, times it, tries another, and maps every failure to an ApiError."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from coordinator.headers import downstream_headers, leg_headers
from coordinator.routing.router import Worker
from coordinator.settings.units import origin
from coordinator.step import Reply
from coordinator.telemetry.attempt import Watcher
from coordinator.workers.bootstrap import BootstrapServers
from coordinator.workers.call import WIRE_FAULTS, Call, earliest, wire_error
from coordinator.workers.retry import RetryBudget, may_go_on, spent, wait_s
from coordinator.workers.verdict import refusal
from coordinator.workers.wire import Broken, Pool, request_head
from envelope.errors import ApiError, LegError, LegFailed, LegTimeout, LegUnreadable, NoWorker
from envelope.json_codec import JSONDecodeError
from envelope.written import pieces

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from coordinator.background import Faults
    from coordinator.context import Headers, RequestContext
    from coordinator.metrics import Metrics
    from coordinator.routing.router import Router
    from coordinator.step import Leg, MediaFetcher, Parsers, Peer

T = TypeVar("T")

if TYPE_CHECKING:
    _Once = Callable[[RequestContext, Call, tuple[int, ...]], Coroutine[Any, Any, T]]
    """Sends a leg over a call; the statuses are those that its step accepts."""

# How long a leg is held after its client has left: a decode, to be started; a prefill, to tell what it left. One that
# ends in the milliseconds in which its connection is closed tells nobody, and its blocks wait for the end of the lease.
_LINGER_S = 0.5
_LATE_S = 0.8

# A decode worker that had a request for as long, and said nothing yet, has taken it up and read the hand-over.
_TAKEN_UP_S = 5.0


@dataclass(frozen=True, slots=True)
class RoleLink:
    """How one role is reached.

    Attributes:
        router: chooses the worker.
        idle: most idle connections kept to one worker.
        idle_s: how long an idle connection is kept, 0 is for ever. uvicorn closes its own after 5 s.
        first_byte_s: the limit of a leg that sets none of its own; None is no limit.
        tls: how https workers are verified; None is by the system's authorities.
        our_key: what the configuration calls the key that the legs carry, or should; None where the client's goes on.
    """

    router: Router
    idle: int = 100
    idle_s: float = 4.0
    first_byte_s: float | None = None
    tls: ssl.SSLContext | None = None
    our_key: str | None = None


class HttpUpstream:
    """Implements ``coordinator.step.Upstream`` on ``wire``.

    Args:
        links: by role.
        carry: response headers (lower case) that later legs of the same request repeat.
        media: the way to media, which is opened and closed apart from this.
        parsers: the way to parsers, of which the same holds.
    """

    def __init__(
        self,
        links: Mapping[str, RoleLink],
        carry: Sequence[str],
        metrics: Metrics,
        faults: Faults,
        media: MediaFetcher,
        parsers: Parsers | None = None,
    ) -> None:
        self.links = links
        self.media = media
        self.bootstrap = BootstrapServers(self.get)
        self.parsers = parsers
        self._carry = tuple(carry)
        self._metrics = metrics
        self._faults = faults
        self._watcher = Watcher(metrics, time.monotonic)
        self._budget = RetryBudget()
        self._lingering: set[asyncio.Task[Any]] = set()
        self._pools = {role: Pool(link.idle, link.idle_s, link.tls) for role, link in links.items()}

    async def settle(self) -> None:
        """Wait for the legs that are held open for a moment after their request has ended."""
        if self._lingering:
            await asyncio.wait(self._lingering, timeout=2 * _LATE_S)

    async def close(self) -> None:
        await self.settle()
        for task in self._lingering:
            task.cancel()  # a prefill that runs on may take longer than a process has to stop
        await asyncio.gather(*self._lingering, return_exceptions=True)
        for pool in self._pools.values():
            pool.close()

    def serves(self, ctx: RequestContext, role: str) -> bool:
        router = self.links[role].router
        if not router.serves(ctx):
            return False
        return role != "prefill" or not (only := self._only_decode(ctx)) or router.at(ctx).keys() != {only}

    def choose(self, ctx: RequestContext, role: str, needs: str = "") -> Worker:
        if worker := _first_choice(ctx, self.links[role].router, needs, self._barred(ctx, role)):
            return worker
        raise NoWorker(role, f"there is no {role} worker", headers={"Retry-After": "1"})

    def uncached_tokens(self, ctx: RequestContext, role: str, most: int) -> int | None:
        return self.links[role].router.uncached_tokens(ctx, most, ctx.failed)

    def post_json(self, ctx: RequestContext, leg: Leg, *, accept: tuple[int, ...] = ()) -> Coroutine[Any, Any, Reply]:
        return self._attempt(ctx, leg, self._answered, accept)

    async def get(self, ctx: RequestContext, leg: Leg) -> Reply:
        """Send a GET and read its whole JSON answer; errors as in ``post_json``."""
        return await self.post_json(ctx, dataclasses.replace(leg, method="GET"))

    def stream(
        self, ctx: RequestContext, leg: Leg, *, accept: tuple[int, ...] = ()
    ) -> Coroutine[Any, Any, Call | Reply]:
        return self._attempt(ctx, leg, self._streamed, accept)

    async def _answered(self, ctx: RequestContext, call: Call, accept: tuple[int, ...]) -> Reply:
        try:
            await self._open(ctx, call)
            return await self._whole(ctx, call, accept)
        except WIRE_FAULTS as error:
            raise wire_error(call.leg, error, reached=call.connected) from error
        except asyncio.CancelledError:
            self._linger(ctx, call)
            raise
        finally:
            if not call.lingering:
                call.close()

    async def _streamed(self, ctx: RequestContext, call: Call, accept: tuple[int, ...]) -> Call | Reply:
        leg, opened = call.leg, False
        try:
            await self._open(ctx, call)
            if call.connection.status != 200 or is_json(call.connection.headers):
                return await self._whole(ctx, call, accept)
            await call.read_first_event(self._first_byte_at(call))
            self._remember(ctx, call)
            opened = True
        except WIRE_FAULTS as error:
            raise wire_error(leg, error, reached=call.connected) from error
        except asyncio.CancelledError:
            self._linger(ctx, call)
            raise
        finally:
            if not (opened or call.lingering):
                call.close()
        return call

    async def _attempt(self, ctx: RequestContext, leg: Leg, once: _Once[T], accept: tuple[int, ...]) -> T:
        """Send a leg to one worker after another, until one answers or trying on makes no sense."""
        router = self.links[leg.role].router
        tried: list[Worker] = []  # list[Worker]() would raise and catch an AttributeError each time
        self._budget.deposit()
        begun = asyncio.get_running_loop().time()
        needs, barred = leg.needs, self._barred(ctx, leg.role, fetches=leg.single_use)
        worker = _first_choice(ctx, router, needs, barred) if leg.to is None else _worker(leg.to)
        while worker is not None:
            call = Call(leg, worker, self._pools[leg.role], len(tried), begun, router.sending(ctx, worker))
            call.watched = watched = self._watcher.begin(ctx, leg, worker, len(tried))
            call.report = router.report
            if leg.role == "prefill":
                ctx.prefill_at = worker.url
            try:
                answer = await once(ctx, call, accept)
                watched.answered(answer)
                if answer is not call:  # a stream that has begun may still break off
                    router.report(worker, None)
                return answer
            except LegError as error:
                watched.settle(type(error).__name__)
                if not call.stale:
                    router.report(worker, error)
                tried.append(worker)
                error.retryable |= leg.idempotent and isinstance(error, (LegFailed, LegTimeout))
                if error.retryable:
                    ctx.failed.append(worker)
                worker = router.pick(ctx, [*tried, *barred, *ctx.failed], needs) if error.retryable else None
                if call.stale:  # the worker is well: the request begins again, over a new connection
                    error.elsewhere = True
                    raise
                error.elsewhere = worker is not None and may_go_on(leg, error, len(tried)) and self._budget.withdraw()
                if not error.elsewhere or spent(leg, error):
                    raise
            finally:
                watched.settle("cancelled")
                if leg.single_use and (call.lingering or call.took_up):
                    ctx.handover_fetched = True
            self._metrics.retries.labels(leg.step).inc()
            await asyncio.sleep(wait_s(len(tried)))
        if why := router.why_none(needs):
            raise LegFailed(leg.step, f"no {leg.role} worker can do this: {why}")
        raise NoWorker(leg.step, f"there is no {leg.role} worker", headers={"Retry-After": "1"})

    def _barred(self, ctx: RequestContext, role: str, *, fetches: bool = False) -> tuple[Worker, ...]:
        """Return who may not have a leg: no worker can fetch from itself, and pools that are looked up may overlap.

        Args:
            fetches: the leg takes what prefill has left.
        """
        other = self._only_decode(ctx) if role == "prefill" else origin(ctx.prefill_at) if fetches else ""
        worker = self.links[role].router.at(ctx).get(other) if other else None
        return () if worker is None else (worker,)

    def _only_decode(self, ctx: RequestContext) -> str:
        """Return the origin of the worker that decode is sure to go to; empty where there is a choice."""
        known = self.links["decode"].router.at(ctx) if "decode" in self.links else {}
        return next(iter(known)) if len(known) == 1 else ""

    def _linger(self, ctx: RequestContext, call: Call) -> None:
        """Hold the connection of a leg for a moment after its client has left, where closing it at once leaks blocks.

        A prefill may be over already, its answer on the wire; then nobody would know what it left. vLLM never starts
        an unstreamed decode whose connection closes right behind its request, so that it never frees prefill's blocks.
        And where decode waits for blocks that are on their way, prefill is to send them.
        """
        leg = call.leg
        if not call.connected or leg.detached or not (leg.single_use or leg.late or leg.runs_on_s):
            return
        call.lingering = True
        task = asyncio.get_running_loop().create_task(self._let_go(ctx, call))
        self._lingering.add(task)  # owned: settle() awaits it
        task.add_done_callback(self._lingering.discard)

    async def _let_go(self, ctx: RequestContext, call: Call) -> None:
        leg = call.leg
        try:
            async with asyncio.timeout(leg.runs_on_s or (_LINGER_S if leg.late is None else _LATE_S)):
                await self._hear_out(ctx, call)
        except (ApiError, *WIRE_FAULTS):
            pass  # nobody is left to be told
        except Exception as error:
            self._faults.tell("lingering", error)
        finally:
            call.close()
        open_s = asyncio.get_running_loop().time() - call.began
        # Of a pair, prefill may be running on: its step knows, and the request may be at the next one by now.
        if leg.single_use and not leg.tied and not call.took_up and open_s < _TAKEN_UP_S:
            ctx.handover_fetched = False
            ctx.on_late_handover(ctx)

    async def _hear_out(self, ctx: RequestContext, call: Call) -> None:
        """Wait for what tells the fate of a hand-over: prefill's answer, or the beginning of decode's."""
        leg = call.leg
        await call.head()
        if leg.late or leg.runs_on_s:
            reply = await self._whole(ctx, call, ())
            if leg.late:
                leg.late(reply)
        elif call.streamed and call.connection.status == 200:
            await call.read_first_event()

    async def _open(self, ctx: RequestContext, call: Call) -> None:
        """Send the leg and read the head of its answer.

        Once more, silently, when a kept connection turns out to be dead before any byte of the answer: a worker
        closes idle connections on its own clock, and the notice may cross our request on the wire.
        """
        leg = call.leg
        body = pieces(leg.body) if leg.method == "POST" else []
        length = sum(map(len, body)) if leg.method == "POST" else None
        trace = () if call.watched is None else call.watched.headers
        headers = leg_headers(ctx, leg, call.worker, call.attempt, trace)
        head = request_head(leg.method, call.worker.url, leg.path, headers, length)
        ends_at = self._first_byte_at(call)
        try:
            # What begins again because one kept connection had died is not entrusted to the next.
            await call.open(head, body, ends_at, fresh=(leg.single_use or leg.tied) and call.worker in ctx.failed)
        except Broken:
            if not call.stale:
                raise
            self._metrics.stale_connections.labels(leg.role).inc()
            if (leg.single_use or leg.tied) and not leg.detached:
                raise  # it begins again at prefill instead
            await call.open(head, body, ends_at, fresh=True)

    async def _whole(self, ctx: RequestContext, call: Call, accept: tuple[int, ...]) -> Reply:
        leg, status = call.leg, call.connection.status
        raw = await call.read_all()
        if status in accept:
            return Reply(status, raw, None, _passed_on(call))
        if not 200 <= status < 300:
            raise refusal(leg, status, call.connection.headers, raw, self.links[leg.role].our_key)
        try:
            body = leg.read(raw)
        except (JSONDecodeError, RecursionError):
            raise LegUnreadable(leg.step, "the worker's answer is not JSON") from None
        if not isinstance(body, (dict, list)):
            raise LegUnreadable(leg.step, "the worker's answer is neither a JSON object nor a list")
        self._remember(ctx, call)
        return Reply(status, raw, body, _passed_on(call))

    def _remember(self, ctx: RequestContext, call: Call) -> None:
        for name in self._carry:
            if (value := call.connection.headers.get(name)) is not None:
                ctx.heard.setdefault(name, []).append(value)

    def _first_byte_at(self, call: Call) -> float | None:
        limit = call.leg.limits.first_byte_s
        if limit is None:
            limit = self.links[call.leg.role].first_byte_s
        if not limit:
            return call.ends_at
        return earliest(call.began + limit, call.ends_at)


def _first_choice(ctx: RequestContext, router: Router, needs: str, barred: Sequence[Worker]) -> Worker | None:
    """Return a worker that has not failed this request, or else one that has: it may be the only one."""
    if not ctx.failed:
        return router.pick(ctx, barred, needs)
    return router.pick(ctx, [*barred, *ctx.failed], needs) or router.pick(ctx, barred, needs)


def _passed_on(call: Call) -> Callable[[], Headers]:
    """Return what finds an answer's headers for the client: later, when the connection may have the next answer's."""
    return partial(downstream_headers, call.connection.headers.items())


def _worker(peer: Peer) -> Worker:
    assert isinstance(peer, Worker), "choose() has picked it"
    return peer


def is_json(headers: Mapping[str, str]) -> bool:
    """Say whether an answer calls itself one JSON document; anything else is read as an event stream."""
    return headers.get("Content-Type", "").partition(";")[0].strip().lower() == "application/json"
