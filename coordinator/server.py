"""Routes of the coordinator: request id -> JSON -> context -> pipeline -> respond, and one log line each.

Only what is listed here is answered; nothing is passed on to workers by default, so that their other routes
(sleep, abort, metrics) stay out of reach.
"""

from __future__ import annotations

import asyncio
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from coordinator.context import RequestContext
from coordinator.headers import leg_id, request_id, upstream_headers
from coordinator.http.server import text
from coordinator.http.turns import AT_ONCE, Turns
from coordinator.intake import single
from coordinator.logs import log
from coordinator.outcome import Outcome
from coordinator.questions import COUNT_TOKENS_PATH
from coordinator.respond import Exchange, refuse, write_whole
from envelope.client_request import check
from envelope.errors import (
    ApiError,
    ClientGone,
    ClientStalled,
    InternalError,
    Unavailable,
)
from envelope.formats import PATHS, Format
from envelope.kv_transfer import without_transfer_params

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from coordinator.admission import Permit
    from coordinator.context import Headers
    from coordinator.http.request import Request
    from coordinator.http.server import Handler
    from coordinator.metrics import Metrics
    from coordinator.outcome import Recorder
    from coordinator.passage import Passage
    from coordinator.plan import Plan
    from coordinator.settings.proxied import Route
    from coordinator.telemetry.tracing import Trace


class Front:
    """Answers requests, each by the plan that is in place when it begins.

    Args:
        apis: the client APIs that are served.
        proxied: routes of the local worker that are passed on, by ``passage``.

    Attributes:
        page: gives the metrics and their content type; where there are several processes, of all of them.
        turns: who of many requests may begin.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        apis: Sequence[Format],
        metrics: Metrics,
        recorder: Recorder,
        proxied: Sequence[Route] = (),
        passage: Passage | None = None,
    ) -> None:
        self.plan = plan
        self._apis = tuple(apis)
        self._metrics = metrics
        self._recorder = recorder
        self.page: Callable[[], Awaitable[tuple[bytes, str]]] = self._own_page
        self._proxied = tuple(proxied)
        self._passage = passage
        self.turns = Turns(AT_ONCE)
        self.draining = False
        self.in_flight = 0
        self.idle = asyncio.Event()
        self.idle.set()

    def routes(self, *, metrics: bool) -> dict[str, dict[str, Handler]]:
        """Return the routes by path and method; ``metrics`` says whether /metrics is on this port."""
        routes: dict[str, dict[str, Handler]] = {
            COUNT_TOKENS_PATH: {"POST": self._count_tokens},
            "/v1/models": {"GET": self._list_models},
            "/healthz": {"GET": self._healthz},
            "/health": {"GET": self._healthz},  # where clients of vLLM look, load tools among them
            "/readyz": {"GET": self._readyz},
        }
        for api in self._apis:
            routes[PATHS[api]] = {"POST": partial(self._answer, api)}
        for route in self._proxied:
            routes.setdefault(route.path, {})[route.method] = self._pass_on
        if metrics:
            routes["/metrics"] = {"GET": self._guarded_metrics}
        return routes

    async def _answer(self, api: Format, request: Request) -> None:
        client_id = request_id(request.headers.get("X-Request-Id"))
        ctx: RequestContext | None = None
        plan = self.plan
        outcome, permit = self._recorder.begin(request), plan.admission.permit()
        self._enter(api, plan)
        try:
            await self._turn(request)
            self._check_head(request, plan)
            self._let_send(request, plan)
            await permit.begin()
            ctx = await self._read(request, api, client_id, plan, outcome.trace)
            ctx.on_late_handover = plan.releaser.release
            await self._run(request, ctx, permit, outcome, plan)
        except asyncio.CancelledError:
            outcome.fail(_cancelled(request))
            raise
        except ClientGone as gone:
            outcome.fail(gone)
            raise
        except Exception as error:
            await refuse(request, api, client_id, outcome.fail(_told(error, client_id)), plan.manner)
        finally:
            try:
                if ctx is not None:
                    await ctx.aclose()
                    plan.releaser.release(ctx)
            except Exception as error:
                _told(error, client_id)  # the answer is out already, or another failure is on its way
            finally:
                self._leave(api, request, client_id, ctx, outcome, permit, plan)

    async def _run(
        self, request: Request, ctx: RequestContext, permit: Permit, outcome: Outcome, plan: Plan
    ) -> None:
        exchange = Exchange(request, ctx, plan.manner)
        # Before the heart may beat: a comment line would spend the status that a refusal needs.
        await permit.reserve(ctx)
        ctx.places = permit
        async with exchange:
            try:
                await plan.pipeline.run(ctx)
                assert ctx.answer is not None
                outcome.done(await exchange.send(ctx.answer))
            except ClientGone:
                raise
            except Exception as error:
                outcome.result = await exchange.fail(outcome.fail(_told(error, ctx.request_id)))

    def _enter(self, route: str, plan: Plan) -> None:
        plan.enter()
        if not self.in_flight:
            self.idle.clear()
        self.in_flight += 1
        self._metrics.entered(route, 1)

    def _leave(
        self,
        route: str,
        request: Request,
        client_id: str,
        ctx: RequestContext | None,
        outcome: Outcome,
        permit: Permit,
        plan: Plan,
    ) -> None:
        """Give back what a request had, and tell how it ended."""
        permit.release()
        outcome.queued_s = permit.waited_s
        plan.leave()
        self.in_flight -= 1
        if not self.in_flight:
            self.idle.set()
        self._metrics.entered(route, -1)
        self._recorder.record(route, client_id, ctx, outcome, request.begun, monotonic() - request.begun)

    async def _turn(self, request: Request) -> None:
        """Wait for a request's turn; what only looks is little work, and waits behind no burst of what is more."""
        if request.method == "POST" and (turn := self.turns.take(asyncio.get_running_loop())) is not None:
            await turn

    def _check_head(self, request: Request, plan: Plan) -> None:
        """Refuse what can be refused by the head alone, and before any waiting.

        Raises:
            Unauthorized, Unavailable.
        """
        plan.check_key(request.headers)
        if self.draining:
            raise Unavailable("this coordinator is shutting down; ask again", headers=_DRAINING)

    async def _read(
        self, request: Request, api: Format, client_id: str, plan: Plan, trace: Trace
    ) -> RequestContext:
        routing = {name: value for name in plan.routing_headers if (value := single(request, name)) is not None}
        body = without_transfer_params(check(api, await plan.intake.read_json(request, api)))
        return RequestContext(
            request_id=client_id,
            leg_id=leg_id(client_id),
            api=api,
            body=body,
            headers=trace.carry(upstream_headers(request.headers.items(), plan.drop)),
            routing=routing,
            stream=bool(body.get("stream")),
            trace=trace,
        )

    def _let_send(self, request: Request, plan: Plan) -> None:
        """Answer ``Expect: 100-continue``, unless the head alone is refused: such a body is never sent.

        Raises:
            ApiError: ClientGone among them.
        """
        if request.expects_100:
            plan.intake.check_head(request)
            plan.admission.refuse_if_full()
            try:
                request.response.go_on()
            except ConnectionError as gone:
                raise ClientGone("the client left") from gone

    async def _list_models(self, request: Request) -> None:
        plan = self.plan
        await self._question(request, "models", None, plan.questions.models, plan, plan.admission.permit())

    async def _count_tokens(self, request: Request) -> None:
        plan = self.plan
        permit = plan.admission.permit()

        async def count(headers: Headers, client_id: str) -> bytes:
            self._let_send(request, plan)
            await permit.begin()
            asked = await plan.intake.read_json(request, Format.MESSAGES)
            return await plan.questions.count_tokens(headers, client_id, asked)

        await self._question(request, "count_tokens", Format.MESSAGES, count, plan, permit)

    async def _question(
        self,
        request: Request,
        route: str,
        api: Format | None,
        ask: Callable[[Headers, str], Awaitable[bytes]],
        plan: Plan,
        permit: Permit,
    ) -> None:
        client_id = request_id(request.headers.get("X-Request-Id"))
        outcome = self._recorder.begin(request)
        self._enter(route, plan)
        try:
            await self._turn(request)
            self._check_head(request, plan)
            headers = outcome.trace.carry(upstream_headers(request.headers.items(), plan.drop))
            body = await ask(headers, client_id)
            ours = [("Content-Type", "application/json"), ("X-Request-Id", client_id)]
            await write_whole(request, 200, ours, body, plan.manner)
            outcome.status, outcome.word = 200, "ok"
        except asyncio.CancelledError:
            outcome.fail(_cancelled(request))
            raise
        except ClientGone as gone:
            outcome.fail(gone)
            raise
        except Exception as error:
            await refuse(request, api, client_id, outcome.fail(_told(error, client_id)), plan.manner)
        finally:
            self._leave(route, request, client_id, None, outcome, permit, plan)

    async def _pass_on(self, request: Request) -> None:
        """Answer by a route of the local worker."""
        client_id = request_id(request.headers.get("X-Request-Id"))
        assert self._passage is not None
        plan, outcome = self.plan, Outcome(status=500)
        permit = plan.admission.permit()
        self._enter("proxied", plan)
        try:
            await self._turn(request)
            self._check_head(request, plan)
            if request.method == "POST":  # the others look, and cost nothing
                await permit.begin()
            if request.expects_100:
                request.response.go_on()
            outcome.word = await self._passage.pass_on(request, plan, client_id)
            outcome.status = request.response.status
        except asyncio.CancelledError:
            outcome.fail(_cancelled(request))
            raise
        except ConnectionError as error:
            gone = ClientGone("the client left")
            outcome.fail(gone)
            raise gone from error
        except Exception as error:
            await refuse(request, None, client_id, outcome.fail(_told(error, client_id)), plan.manner)
        finally:
            self._leave("proxied", request, client_id, None, outcome, permit, plan)

    async def _healthz(self, request: Request) -> None:
        text(request, 200, "ok\n")

    async def _readyz(self, request: Request) -> None:
        """Say whether requests can be served, and why not: to those with a key, where there are keys.

        Problems name workers by their addresses, and a probe goes by the status alone.
        """
        readiness, trusted = self.plan.readiness, self._has_key(request)
        problems = ["shutting down"] if self.draining else readiness.problems()
        if problems and not trusted:
            problems = ["not ready; the log says why, and so does this page to those who send a key"]
        notes = readiness.notes() if trusted else ()
        lines = problems or ("ok", *notes)
        text(request, 503 if problems else 200, "".join(f"{line}\n" for line in lines))

    def _has_key(self, request: Request) -> bool:
        try:
            self.plan.check_key(request.headers)
        except ApiError:
            return False
        return True

    async def _guarded_metrics(self, request: Request) -> None:
        """Answer /metrics on the main port, where clients are: they tell of everybody's load."""
        plan = self.plan
        try:
            plan.check_key(request.headers)
        except ApiError as error:
            await refuse(request, None, request_id(request.headers.get("X-Request-Id")), error, plan.manner)
            return
        await self.metrics_page(request)

    async def _own_page(self) -> tuple[bytes, str]:
        return self._metrics.page()

    async def metrics_page(self, request: Request) -> None:
        try:
            body, content_type = await self.page()
        except TimeoutError:
            text(request, 503, "the supervisor of this process does not answer\n")
            return
        await write_whole(request, 200, [("Content-Type", content_type)], body, self.plan.manner)


def _told(error: Exception, client_id: str) -> ApiError:
    """Return what the client is told of an error; what is none of the API's is a fault of ours, and is logged."""
    if isinstance(error, ApiError):
        return error
    log.error("request %s failed by a fault of the coordinator", client_id, exc_info=error)
    return InternalError()


def _cancelled(request: Request) -> ApiError:
    """Return why a request's task was cancelled."""
    if request.given_up:
        return Unavailable("this coordinator stopped before the answer was over")
    if request.stalled:
        return ClientStalled("the client took nothing")
    return ClientGone("the client left")


_DRAINING = {"Retry-After": "1", "Connection": "close"}
