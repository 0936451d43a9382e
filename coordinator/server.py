"""Routes of the coordinator: request id -> JSON -> context -> pipeline -> respond, and one log line each.

Only what is listed here is answered; nothing is passed on to workers by default, so that their other routes
(sleep, abort, metrics) stay out of reach.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.http import HttpVersion11

from coordinator.context import RequestContext
from coordinator.headers import leg_id, request_id, upstream_headers
from coordinator.intake import header_pairs, single
from coordinator.listener import stalled
from coordinator.logs import log
from coordinator.outcome import Outcome
from coordinator.questions import COUNT_TOKENS_PATH
from coordinator.respond import Exchange, refuse
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
    from coordinator.metrics import Metrics
    from coordinator.outcome import Recorder
    from coordinator.passage import Passage
    from coordinator.plan import Plan
    from coordinator.proxied import Route
    from coordinator.telemetry.tracing import Trace


class Front:
    """Answers requests, each by the plan that is in place when it begins.

    Args:
        apis: the client APIs that are served.
        clock: monotonic seconds.
        proxied: routes of the local worker that are passed on, by ``passage``.

    Attributes:
        page: gives the metrics and their content type; where there are several processes, of all of them.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        apis: Sequence[Format],
        metrics: Metrics,
        recorder: Recorder,
        clock: Callable[[], float],
        proxied: Sequence[Route] = (),
        passage: Passage | None = None,
    ) -> None:
        self.plan = plan
        self._apis = tuple(apis)
        self._metrics = metrics
        self._recorder = recorder
        self._clock = clock
        self.page: Callable[[], Awaitable[tuple[bytes, str]]] = self._own_page
        self._proxied = tuple(proxied)
        self._passage = passage
        self.draining = False
        self.in_flight = 0
        self.idle = asyncio.Event()
        self.idle.set()

    def routes(self, *, metrics: bool) -> list[web.RouteDef]:
        """Return the routes; ``metrics`` says whether /metrics is on this port."""
        posts = [web.post(PATHS[api], self._handler(api), expect_handler=self._expect) for api in self._apis]
        others = [
            web.post(COUNT_TOKENS_PATH, self._count_tokens, expect_handler=self._expect),
            web.get("/v1/models", self._list_models),
            web.get("/healthz", self._healthz),
            web.get("/health", self._healthz),  # where clients of vLLM look, load tools among them
            web.get("/readyz", self._readyz),
        ]
        passed = [web.route(route.method, route.path, self._pass_on) for route in self._proxied]
        return [*posts, *others, *passed, *([web.get("/metrics", self._guarded_metrics)] if metrics else [])]

    def _handler(self, api: Format) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            return await self._answer(request, api)

        return handle

    async def _answer(self, request: web.Request, api: Format) -> web.StreamResponse:
        begun, client_id = self._clock(), request_id(request.headers.get("X-Request-Id"))
        ctx: RequestContext | None = None
        plan = self.plan
        outcome, permit = self._recorder.begin(request), plan.admission.permit()
        self._enter(api, plan)
        try:
            self._check_head(request, plan)
            await permit.begin()
            ctx = await self._read(request, api, client_id, plan, outcome.trace)
            ctx.on_late_handover = partial(plan.releaser.release, ctx)
            return await self._run(request, ctx, permit, outcome, plan)
        except asyncio.CancelledError:
            gone_as = ClientStalled if stalled(request) else ClientGone
            outcome.fail(gone_as("the client left, or took nothing"))
            raise
        except ClientGone as gone:
            outcome.fail(gone)
            return web.Response(status=gone.status)  # never written: the connection is closed
        except Exception as error:
            return await self._refuse(request, api, client_id, outcome.fail(_told(error, client_id)), plan)
        finally:
            try:
                if ctx is not None:
                    await ctx.aclose()
                    plan.releaser.release(ctx)
            except Exception as error:
                _told(error, client_id)  # the answer is out already, or another failure is on its way
            finally:
                permit.release()
                self._leave(api, plan)
                self._recorder.record(api, client_id, ctx, outcome, self._clock() - begun)

    async def _run(
        self, request: web.Request, ctx: RequestContext, permit: Permit, outcome: Outcome, plan: Plan
    ) -> web.StreamResponse:
        exchange = Exchange(request, ctx, plan.manner)
        # Before the heart may beat: a comment line would spend the status that a refusal needs.
        await permit.reserve(ctx)
        ctx.queued_s = permit.waited_s
        ctx.places = permit
        async with exchange:
            try:
                await plan.pipeline.run(ctx)
                assert ctx.answer is not None
                result = await exchange.send(ctx.answer)
                outcome.done(result)
            except ClientGone:
                raise
            except Exception as error:
                result = outcome.result = await exchange.fail(outcome.fail(_told(error, ctx.request_id)))
        return result.response

    async def _refuse(
        self, request: web.Request, api: Format | None, client_id: str, error: ApiError, plan: Plan
    ) -> web.StreamResponse:
        if _expects_100(request):  # the body may come or not, so the next request's head cannot be told from it
            error.headers = {**error.headers, "Connection": "close"}
        return await refuse(request, api, client_id, error, plan.manner)

    def _enter(self, route: str, plan: Plan) -> None:
        plan.enter()
        self.in_flight += 1
        self.idle.clear()
        self._metrics.entered(route, 1)

    def _leave(self, route: str, plan: Plan) -> None:
        plan.leave()
        self.in_flight -= 1
        if not self.in_flight:
            self.idle.set()
        self._metrics.entered(route, -1)

    def _check_head(self, request: web.Request, plan: Plan) -> None:
        """Refuse what can be refused by the head alone, and before any waiting.

        Raises:
            Unauthorized, Unavailable.
        """
        plan.check_key(request.headers)
        if self.draining:
            raise Unavailable("this coordinator is shutting down; ask again", headers=_DRAINING)

    async def _read(
        self, request: web.Request, api: Format, client_id: str, plan: Plan, trace: Trace
    ) -> RequestContext:
        routing = {name: value for name in plan.routing_headers if (value := single(request, name)) is not None}
        body = without_transfer_params(check(api, await plan.intake.read_json(request, api)))
        return RequestContext(
            request_id=client_id,
            leg_id=leg_id(client_id),
            api=api,
            body=body,
            headers=trace.carry(upstream_headers(header_pairs(request), plan.drop)),
            routing=routing,
            stream=bool(body.get("stream")),
            trace=trace,
        )

    async def _expect(self, request: web.Request) -> web.StreamResponse | None:
        """Answer ``Expect: 100-continue``, unless the head alone is refused: such a body is never sent."""
        if not _expects_100(request):
            return None  # RFC 9110, section 10.1.1: an expectation we do not know may be ignored
        plan = self.plan
        try:
            self._check_head(request, plan)
            plan.intake.check_head(request)
            plan.admission.refuse_if_full()
        except ApiError:
            return None  # the handler comes to the same end, tells of it, and counts it
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer's head has not been sent yet
        return None

    async def _list_models(self, request: web.Request) -> web.StreamResponse:
        plan = self.plan
        return await self._question(request, "models", None, plan.questions.models, plan)

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        plan = self.plan
        permit = plan.admission.permit()

        async def count(headers: Headers, client_id: str) -> bytes:
            await permit.begin()
            asked = await plan.intake.read_json(request, Format.MESSAGES)
            return await plan.questions.count_tokens(headers, client_id, asked)

        try:
            return await self._question(request, "count_tokens", Format.MESSAGES, count, plan)
        finally:
            permit.release()

    async def _question(
        self,
        request: web.Request,
        route: str,
        api: Format | None,
        ask: Callable[[Headers, str], Awaitable[bytes]],
        plan: Plan,
    ) -> web.StreamResponse:
        begun, client_id = self._clock(), request_id(request.headers.get("X-Request-Id"))
        outcome = self._recorder.begin(request)
        self._enter(route, plan)
        try:
            self._check_head(request, plan)
            headers = outcome.trace.carry(upstream_headers(header_pairs(request), plan.drop))
            body = await ask(headers, client_id)
            outcome.status, outcome.word = 200, "ok"
            return web.Response(body=body, content_type="application/json", headers={"X-Request-Id": client_id})
        except asyncio.CancelledError:
            outcome.fail(ClientGone("the client left"))
            raise
        except Exception as error:
            return await self._refuse(request, api, client_id, outcome.fail(_told(error, client_id)), plan)
        finally:
            self._leave(route, plan)
            self._recorder.record(route, client_id, None, outcome, self._clock() - begun)

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        """Answer by a route of the local worker."""
        begun, client_id = self._clock(), request_id(request.headers.get("X-Request-Id"))
        assert self._passage is not None
        plan, outcome = self.plan, Outcome(status=500)
        permit = plan.admission.permit()
        self._enter("proxied", plan)
        try:
            self._check_head(request, plan)
            if request.method == "POST":  # the others look, and cost nothing
                await permit.begin()
            response, outcome.word = await self._passage.pass_on(request, plan, client_id)
            outcome.status = response.status
            return response
        except asyncio.CancelledError:
            outcome.fail(ClientGone("the client left"))
            raise
        except ConnectionError as error:
            gone = ClientGone("the client left")
            outcome.fail(gone)
            raise gone from error
        except Exception as error:
            return await self._refuse(request, None, client_id, outcome.fail(_told(error, client_id)), plan)
        finally:
            permit.release()
            self._leave("proxied", plan)
            self._recorder.record("proxied", client_id, None, outcome, self._clock() - begun)

    async def _healthz(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.StreamResponse:
        """Say whether requests can be served, and why not: to those with a key, where there are keys.

        Problems name workers by their addresses, and a probe goes by the status alone.
        """
        readiness, trusted = self.plan.readiness, self._has_key(request)
        problems = ["shutting down"] if self.draining else readiness.problems()
        if problems and not trusted:
            problems = ["not ready; the log says why, and so does this page to those who send a key"]
        notes = readiness.notes() if trusted else ()
        lines = problems or ("ok", *notes)
        return web.Response(status=503 if problems else 200, text="".join(f"{line}\n" for line in lines))

    def _has_key(self, request: web.Request) -> bool:
        try:
            self.plan.check_key(request.headers)
        except ApiError:
            return False
        return True

    async def _guarded_metrics(self, request: web.Request) -> web.StreamResponse:
        """Answer /metrics on the main port, where clients are: they tell of everybody's load."""
        plan = self.plan
        try:
            plan.check_key(request.headers)
        except ApiError as error:
            return await refuse(request, None, request_id(request.headers.get("X-Request-Id")), error, plan.manner)
        return await self.metrics_page(request)

    async def _own_page(self) -> tuple[bytes, str]:
        return self._metrics.page()

    async def metrics_page(self, request: web.Request) -> web.StreamResponse:
        try:
            body, content_type = await self.page()
        except TimeoutError:
            return web.Response(status=503, text="the supervisor of this process does not answer\n")
        return web.Response(body=body, headers={"Content-Type": content_type})


def _told(error: Exception, client_id: str) -> ApiError:
    """Return what the client is told of an error; what is none of the API's is a fault of ours, and is logged."""
    if isinstance(error, ApiError):
        return error
    log.error("request %s failed by a fault of the coordinator", client_id, exc_info=error)
    return InternalError("the coordinator failed; its log has the details")


_DRAINING = {"Retry-After": "1", "Connection": "close"}


def _expects_100(request: web.Request) -> bool:
    # RFC 9110, section 10.1.1: HTTP/1.0 knows no interim answers, and a client of it would take one for the answer.
    return request.version >= HttpVersion11 and request.headers.get("Expect", "").lower() == "100-continue"
