"""A role is reachable when one of its workers is healthy and serves the routes that its legs use."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from coordinator.routing.router import Worker
from coordinator.workers import health
from coordinator.workers.health import Readiness, RoleProbe
from tests.background import FaultsTold
from tests.bounds import HANG_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

GENERATE, RENDER = "/inference/v1/generate", "/v1/chat/completions/render"

NOBODY = "http://127.0.0.1:1"  # a port that nothing listens on


class FakeWorker:
    """A server that answers each path with a status, and counts who asked."""

    def __init__(self, statuses: dict[str, int]) -> None:
        self.statuses = statuses
        self.asked: list[tuple[str, str, str]] = []
        self.headers: list[Any] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append((request.method, request.path, await request.text()))
        self.headers.append(request.headers)
        status = self.statuses.get(request.path, 404)
        return web.Response(status=status, headers={"Location": "/elsewhere"} if status == 302 else {})


@pytest.fixture
async def worker(aiohttp_server: Any) -> Callable[..., Awaitable[FakeWorker]]:
    async def start(**statuses: int) -> FakeWorker:
        paths = {"health": "/health", "generate": GENERATE, "render": RENDER}
        made = FakeWorker({paths[name]: status for name, status in statuses.items()})
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", made.answer)
        made.url = str((await aiohttp_server(app)).make_url("/")).rstrip("/")
        return made

    return start


@pytest.fixture
async def asked() -> AsyncIterator[Callable[..., Awaitable[list[str]]]]:
    """Run a Readiness until every role has been asked so many times; return its problems."""

    async def run(*probes: RoleProbe, until: Callable[[list[str]], bool]) -> list[str]:
        readiness = Readiness(probes, 0.001, FaultsTold())
        running = asyncio.ensure_future(readiness.run())
        try:
            async with asyncio.timeout(HANG_S):
                while not until(readiness.problems()):
                    await asyncio.sleep(0.001)
            return readiness.problems()
        finally:
            running.cancel()
            await asyncio.wait((running,))

    yield run


def told(problems: list[str]) -> bool:
    """Say whether every role has been asked."""
    return not any("not asked yet" in problem for problem in problems)


def probe(*urls: str, role: str = "decode", **options: Any) -> RoleProbe:
    workers = [Worker(url) for url in urls]
    return RoleProbe(role, lambda: workers, **options)


async def test_before_anybody_was_asked_nobody_is_ready() -> None:
    assert Readiness([probe(NOBODY), probe(NOBODY, role="prefill")], 1.0, FaultsTold()).problems() == [
        "decode: not asked yet",
        "prefill: not asked yet",
    ]


async def test_a_healthy_worker_is_enough(asked: Any, worker: Any) -> None:
    good = await worker(health=200)
    assert await asked(probe(NOBODY, good.url), until=told) == []
    assert good.asked[0] == ("GET", "/health", "")


# (what /health answers, the fault)
UNHEALTHY = [(503, "answers 503"), (500, "answers 500"), (404, "answers 404"), (302, "answers 302")]


@pytest.mark.parametrize(("status", "fault"), UNHEALTHY)
async def test_a_worker_that_says_anything_but_200_is_not_healthy(
    asked: Any, worker: Any, status: int, fault: str
) -> None:
    """A redirect is not followed: it may lead to somebody else."""
    bad = await worker(health=status)
    assert await asked(probe(bad.url), until=told) == [f"decode: {bad.url}/health {fault}"]
    assert all(path == "/health" for _, path, _ in bad.asked)


async def test_nobody_there_is_a_fault_that_names_the_worker(asked: Any) -> None:
    assert await asked(probe(NOBODY), until=told) == [f"decode: {NOBODY} cannot be reached"]


async def test_a_worker_that_does_not_answer_in_time_cannot_be_reached(
    asked: Any, aiohttp_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    monkeypatch.setattr("coordinator.workers.health.PROBE_TIMEOUT_S", 0.05)
    app = web.Application()
    app.router.add_get("/health", hang)
    url = str((await aiohttp_server(app)).make_url("/")).rstrip("/")
    assert await asked(probe(url), until=told) == [f"decode: {url} cannot be reached"]


async def test_a_gateway_has_no_health_of_its_own_so_any_answer_will_do(asked: Any, worker: Any) -> None:
    gateway = await worker(health=404)
    assert await asked(probe(gateway.url, gateway=True), until=told) == []
    assert await asked(probe(NOBODY, gateway=True), until=told) == [f"decode: {NOBODY} cannot be reached"]


# (what the route answers to an empty body, the fault): 400 is a worker that serves it
ROUTES = [
    (400, None),
    (422, None),
    (200, None),
    (401, None),
    (403, "{url} answers 403 on {path}: start vllm serve with --enable-scale-out"),
    (404, "{url} has no {path}: is it the right server, and vllm serve with --enable-scale-out?"),
    (405, "{url} has no {path}: is it the right server, and vllm serve with --enable-scale-out?"),
]


@pytest.mark.parametrize(("status", "fault"), ROUTES)
async def test_a_missing_flag_is_named_before_the_first_request_fails(
    asked: Any, worker: Any, status: int, fault: str | None
) -> None:
    """Case H26."""
    made = await worker(health=200, generate=status)
    problems = await asked(probe(made.url, scale_out=(GENERATE,)), until=told)
    expected = [] if fault is None else ["decode: " + fault.format(url=made.url, path=GENERATE)]
    assert problems == expected
    assert ("POST", GENERATE, "{}") in made.asked, "an empty body, refused before any work"


async def test_our_key_that_a_worker_does_not_know_is_named(asked: Any, worker: Any) -> None:
    made = await worker(health=200, generate=401)
    problems = await asked(probe(made.url, scale_out=(GENERATE,), our_key="pools.decode.api_key"), until=told)
    assert problems == [
        f"decode: {made.url} answers 401 on {GENERATE}: pools.decode.api_key must be the key that it was started with"
    ]


async def test_every_route_is_tried_and_what_a_worker_lacks_is_passed_on(asked: Any, worker: Any) -> None:
    made, learned = await worker(health=200, generate=403, render=404), []
    asking = probe(made.url, scale_out=(GENERATE, RENDER), learn=lambda worker, lacks: learned.append(lacks))
    (problem,) = await asked(asking, until=told)
    assert "answers 403" in problem
    assert [*learned[0]] == [GENERATE, RENDER] and "has no" in learned[0][RENDER]


async def test_a_worker_that_does_not_fit_is_named_while_others_serve(
    asked: Any, worker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fit, misfit = await worker(health=200, generate=400), await worker(health=200, generate=403)
    readiness = Readiness([probe(fit.url, misfit.url, scale_out=(GENERATE,))], 0.001, FaultsTold())
    with caplog.at_level(logging.WARNING, "coordinator"):
        running = asyncio.ensure_future(readiness.run())
        try:
            await asyncio.wait_for(readiness.until_ready(), HANG_S)
            await until(lambda _: [path for _, path, _ in misfit.asked].count("/health") > 3)
            assert (readiness.problems(), len(readiness.notes())) == ([], 1)
            misfit.statuses[GENERATE] = 400
            await until(lambda _: not readiness.notes())
        finally:
            running.cancel()
            await asyncio.wait((running,))
    sentence = f"decode: {misfit.url} answers 403 on {GENERATE}: start vllm serve with --enable-scale-out"
    assert [record.getMessage() for record in caplog.records] == [sentence]


async def test_a_route_that_was_proven_is_not_tried_again_until_the_worker_was_gone(asked: Any, worker: Any) -> None:
    made = await worker(health=200, generate=400)

    def healths(count: int) -> Callable[[list[str]], bool]:
        return lambda _: [path for _, path, _ in made.asked].count("/health") >= count

    readiness = Readiness([probe(made.url, scale_out=(GENERATE,))], 0.001, FaultsTold())
    running = asyncio.ensure_future(readiness.run())
    await until(healths(3))
    assert [path for _, path, _ in made.asked].count(GENERATE) == 1
    made.statuses["/health"] = 503
    await until(lambda _: bool(readiness.problems()))
    made.statuses["/health"] = 200
    await until(lambda _: not readiness.problems())
    assert [path for _, path, _ in made.asked].count(GENERATE) == 2
    running.cancel()
    await asyncio.wait((running,))


async def until(holds: Callable[[list[str]], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while not holds([]):
            await asyncio.sleep(0.001)


async def test_a_worker_that_goes_while_its_route_is_tried_cannot_be_reached(asked: Any, aiohttp_server: Any) -> None:
    async def healthy(request: web.Request) -> web.Response:
        return web.Response()

    async def gone(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    app = web.Application()
    app.router.add_get("/health", healthy)
    app.router.add_post(GENERATE, gone)
    url = str((await aiohttp_server(app)).make_url("/")).rstrip("/")
    assert await asked(probe(url, scale_out=(GENERATE,)), until=told) == [f"decode: {url} cannot be reached"]


async def test_a_role_without_workers_is_not_ready_until_one_comes(asked: Any, worker: Any) -> None:
    good = await worker(health=200)
    assert await asked(probe(role="prefill"), probe(good.url), until=told) == ["prefill: there are no workers"]
    asked_of = iter([(), ()])
    coming = RoleProbe("prefill", lambda: next(asked_of, (Worker(good.url),)))
    assert await asked(coming, until=lambda problems: not problems) == []


async def test_ready_is_told_once_every_role_is(worker: Any) -> None:
    good, late = await worker(health=200), await worker(health=503)
    readiness = Readiness([probe(good.url), probe(late.url, role="prefill")], 0.001, FaultsTold())
    running = asyncio.ensure_future(readiness.run())
    waiting = asyncio.ensure_future(readiness.until_ready())
    await until(lambda _: told(readiness.problems()))
    assert (readiness.problems(), waiting.done()) == ([f"prefill: {late.url}/health answers 503"], False)
    late.statuses["/health"] = 200
    await asyncio.wait_for(waiting, HANG_S)
    assert readiness.problems() == []
    running.cancel()
    await asyncio.wait((running,))


async def test_a_change_is_logged_once_and_not_at_every_look(
    asked: Any, worker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made = await worker(health=503)
    with caplog.at_level("INFO", logger="coordinator"):
        await asked(probe(made.url), until=lambda _: len(made.asked) >= 4)
        warnings = [record.getMessage() for record in caplog.records if record.name == "coordinator"]
        assert warnings == [f"not ready: decode: {made.url}/health answers 503"]
        caplog.clear()
        made.statuses["/health"] = 200
        await asked(probe(made.url), until=told)
        assert [record.getMessage() for record in caplog.records] == ["decode: reachable"]


async def test_a_worker_s_own_headers_go_with_the_question(asked: Any, worker: Any) -> None:
    made = await worker(health=200, generate=400)
    keyed = Worker(made.url, headers=(("Authorization", "Bearer k"),))
    named = RoleProbe("decode", lambda: [keyed], scale_out=(GENERATE,))
    assert await asked(named, until=told) == []
    assert {headers["Authorization"] for headers in made.headers} == {"Bearer k"}


async def test_a_fault_of_ours_in_asking_one_worker_leaves_the_others_asked(
    worker: Callable[..., Awaitable[FakeWorker]], monkeypatch: pytest.MonkeyPatch
) -> None:
    good, faults = await worker(health=200), FaultsTold()
    asks = health._health_fault

    async def faulty(probe: RoleProbe, asked: Worker, session: Any) -> str | None:
        return await asks(probe, asked, session) if asked.url == good.url else str(1 // 0)

    monkeypatch.setattr(health, "_health_fault", faulty)
    readiness = Readiness([probe(good.url, NOBODY), probe(NOBODY, role="prefill")], 0.001, faults)
    running = asyncio.ensure_future(readiness.run())
    try:
        async with asyncio.timeout(HANG_S):
            while faults.counts["probes"] < 6:
                await asyncio.sleep(0.001)
        sentence = f"asking {NOBODY} failed by a fault of the coordinator; its log has the details"
        assert (readiness.problems(), readiness.notes()) == ([f"prefill: {sentence}"], [f"decode: {sentence}"])
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.wait((running,))
