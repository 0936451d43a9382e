"""What an operator looks at (readiness, metrics), and the questions that need no pipeline (models, token counts)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from coordinator.sim import Canned, Fault, Settings
from tests.flows.line import Line

OFF = Settings(scale_out=False)
FLAG = "--enable-scale-out"
ROLES = ["render", "prefill", "decode"]
GENERATE = "/inference/v1/generate"


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("shape", ["text", "derender"])
async def test_a_worker_without_its_scale_out_routes_is_not_ready_and_the_flag_is_named(
    coordinator, fleet_of, eventually, shape, role
):
    """H26, G10: vLLM serves these routes only with a flag; found at start-up, and not by the first request."""
    fleet = await fleet_of(**{f"{role}_settings": OFF})
    at = await coordinator(fleet, shape, ready=False, server={"readiness_interval": "20ms"})

    async def says() -> str:
        got = await at.get("/readyz")
        return got.raw.decode() if got.status == 503 and b"not asked yet" not in got.raw else ""

    worker = getattr(fleet, role)
    (problem,) = (await eventually(says)).splitlines()
    assert problem.startswith(f"{role}: {worker.url} answers 403 on ")
    assert FLAG in problem
    assert (await at.get("/healthz")).status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("shape", ["text", "derender"])
async def test_a_worker_without_its_scale_out_routes_is_a_502_with_the_flag(
    coordinator, fleet_of, excuse, shape, role, stream
):
    """H26: the client asked for a good path, so the worker's 403 is none of its own."""
    excuse("unread", "a decode worker that refuses on the generate route frees nothing (A2)")
    fleet = await fleet_of(**{f"{role}_settings": OFF})
    at = await coordinator(fleet, shape, ready=False)
    got = await at.chat(stream=stream)
    assert (got.status, got.error["type"], got.error["code"]) == (502, "BadGatewayError", 502)
    # By the leg that was refused, or, once the workers have been asked what they can do, without one.
    told = f"{role}: the worker answered 403 on ", f"{role}: no {role} worker can do this: "
    assert got.error["message"].startswith(told) and "403 on" in got.error["message"]
    assert FLAG in got.error["message"]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("status", [404, 405])
async def test_a_worker_that_has_no_such_route_is_a_502_that_asks_whether_it_is_the_right_server(
    coordinator, fleet, excuse, role, status
):
    """H26: a route that is missing and a model that is missing are both a 404, and only the second is the client's."""
    excuse("unread", "the decode leg is refused by a canned answer, which frees nothing")
    at = await coordinator(fleet, "text")
    getattr(fleet, role).behave.next(Fault(canned=Canned(status, '{"detail":"Not Found"}')))
    got = await at.chat()
    assert got.status == 502
    assert f"is this the right server for {role}?" in got.error["message"]
    assert FLAG in got.error["message"]


async def test_a_missing_route_that_needs_no_flag_is_not_blamed_on_it(coordinator, fleet):
    """H26: vLLM serves the OpenAI routes always, so the server is another one."""
    at = await coordinator(fleet, "alone")
    fleet.decode.behave.next(Fault(canned=Canned(404, '{"detail":"Not Found"}')))
    got = await at.chat()
    assert got.status == 502
    assert "is this the right server for decode?" in got.error["message"]
    assert FLAG not in got.error["message"]


async def test_a_worker_without_the_flag_serves_the_openai_format_all_the_same(coordinator, fleet_of):
    """H26: what no leg uses is not asked for."""
    at = await coordinator(await fleet_of(settings=OFF))
    assert (await at.get("/readyz")).raw == b"ok\n"
    assert (await at.chat()).status == 200


@pytest.mark.parametrize("role", ROLES)
async def test_a_role_without_a_worker_is_not_ready_until_it_comes_back(coordinator, fleet, eventually, role):
    """E2: alive is not ready."""
    at = await coordinator(fleet, "text", server={"readiness_interval": "20ms"})
    worker = getattr(fleet, role)
    await worker.refuse_connections()

    async def problems() -> str:
        got = await at.get("/readyz")
        return got.raw.decode() if got.status == 503 else ""

    async def ready() -> bool:
        return (await at.get("/readyz")).status == 200

    assert await eventually(problems) == f"{role}: {worker.url} cannot be reached\n"
    assert (await at.get("/healthz")).status == 200
    await worker.accept_connections()
    await eventually(ready)


async def test_one_usable_worker_of_a_role_is_enough(coordinator, fleet_of):
    fleet = await fleet_of(decodes=2)
    await fleet.decodes[0].refuse_connections()
    at = await coordinator(fleet)
    assert (await at.get("/readyz")).status == 200


async def test_a_probe_of_readiness_asks_no_worker(coordinator, fleet):
    """R05: what 1,000 probes a second cost the workers is nothing."""
    at = await coordinator(fleet, "text", server={"readiness_interval": "1h"})
    before = [len(worker.received) for worker in fleet.workers]
    for _ in range(20):
        assert (await at.get("/readyz")).status == 200
    assert [len(worker.received) for worker in fleet.workers] == before


async def test_what_only_looks_waits_behind_nobody(coordinator, fleet, ask, eventually):
    """A probe or a scrape behind a burst of requests is answered before them."""
    at = await coordinator(fleet, "alone", server={"proxied_routes": ["GET /version"]})
    at.front.turns = line = Line()
    async with at.open("/v1/chat/completions", ask()) as live:
        await eventually(lambda: line.waiting)
        for path in ("/healthz", "/readyz", "/metrics", "/v1/models", "/version"):
            assert (await at.get(path)).status == 200
        line.go_on()
        await live.head()
        assert (await live.rest()).status == 200
    assert len(line.waiting) == 1


async def test_the_models_are_what_a_decode_worker_says(coordinator, fleet_of):
    """I5: OpenAI clients ask for it first."""
    fleet = await fleet_of(decode_settings=Settings(model="decodes-own"))
    at = await coordinator(fleet, "text", ready=False)
    got = await at.get("/v1/models", ("X-Request-Id", "ask-1"))
    assert (got.status, got.headers["Content-Type"], got.headers["X-Request-Id"]) == (200, "application/json", "ask-1")
    (model,) = got.body["data"]
    assert (got.body["object"], model["id"], model["owned_by"]) == ("list", "decodes-own", "vllm")
    assert {leg.method for leg in fleet.decode.received if leg.path == "/v1/models"} == {"GET"}
    assert not any(leg.path == "/v1/models" for worker in (fleet.render, fleet.prefill) for leg in worker.received)


async def test_the_models_of_a_fleet_that_is_down_are_a_503(coordinator, fleet):
    at = await coordinator(fleet)
    await fleet.decode.refuse_connections()
    got = await at.get("/v1/models")
    assert (got.status, got.error["type"]) == (503, "ServiceUnavailableError")
    assert got.headers["Retry-After"]
    assert got.headers["X-Request-Id"]


SYSTEM = {"system": "Be brief.", "tools": [{"name": "t", "input_schema": {"type": "object"}}]}
THINKING = {"thinking": {"type": "enabled", "budget_tokens": 2048}}


@pytest.mark.parametrize(
    "own", [{}, SYSTEM, THINKING, {"max_tokens": 99, "stream": False}], ids=["plain", "tools", "thinking", "cap"]
)
async def test_a_token_count_is_what_the_answers_usage_will_say(coordinator, fleet, own):
    """Anthropic clients ask before they send: render's count and decode's must be one."""
    at = await coordinator(fleet, "text")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "What is 2 + 2?"}], **own}
    counted = await at.post("/v1/messages/count_tokens", body, ("X-Request-Id", "ask-1"))
    assert (counted.status, counted.headers["X-Request-Id"]) == (200, "ask-1")
    answered = await at.post("/v1/messages", {**body, "max_tokens": 4096})
    tokens = answered.body["usage"]["input_tokens"]
    assert counted.body == {"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}}


async def test_a_token_count_without_a_renderer_is_the_decode_workers(coordinator, fleet, scripted):
    """Where no step renders, the worker's own route counts."""
    worker = await scripted(scripted.json({"input_tokens": 7}))
    at = await coordinator(fleet, "alone", pools={"decode": {"endpoints": [worker.url]}})
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    got = await at.post("/v1/messages/count_tokens", {**body, "kv_transfer_params": {"remote_host": "192.0.2.1"}})
    assert (got.status, got.body) == (200, {"input_tokens": 7})
    assert worker.received[0][1] == body


async def test_a_drain_waits_for_a_token_count_as_for_any_other_request(coordinator, fleet, scripted, eventually):
    gate = asyncio.Event()
    worker = await scripted([gate, *scripted.json({"input_tokens": 7})])
    at = await coordinator(fleet, "alone", pools={"decode": {"endpoints": [worker.url]}})
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    asking = asyncio.ensure_future(at.post("/v1/messages/count_tokens", body))
    await eventually(lambda: worker.received)
    assert at.front.in_flight == 1 and not at.front.idle.is_set()
    assert await at.count("coordinator_requests_in_flight", route="count_tokens") == 1
    gate.set()
    assert (await asking).status == 200
    await eventually(at.front.idle.is_set)


async def test_a_token_count_that_is_refused_tells_so_as_anthropic_does(coordinator, fleet):
    at = await coordinator(fleet, "text")
    for body in (b"[]", b"{", json.dumps({"model": "nope", "messages": []}).encode()):
        got = await at.post("/v1/messages/count_tokens", body)
        assert got.status in (400, 404)
        assert (got.body["type"], set(got.error) >= {"type", "message"}) == ("error", True)


async def test_a_new_coordinators_metrics_have_no_requests_yet(coordinator, fleet):
    """I1: every name is there from the start, so that an alert on it is not one on nothing."""
    at = await coordinator(fleet)
    page = await at.get("/metrics")
    assert page.headers["Content-Type"].startswith("text/plain")
    named = {line.split()[2] for line in page.raw.decode().splitlines() if line.startswith("# TYPE ")}
    assert named >= {
        "coordinator_requests_total",
        "coordinator_request_seconds",
        "coordinator_requests_in_flight",
        "coordinator_leg_seconds",
        "coordinator_time_to_first_token_seconds",
        "coordinator_tokens_total",
        "coordinator_handovers_missing_total",
        "coordinator_prefills_skipped_total",
        "coordinator_stale_connections_total",
    }
    assert await at.count("coordinator_requests_total") == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_counted_with_its_legs_and_tokens(coordinator, fleet, stream):
    """I1."""
    at = await coordinator(fleet, "text")
    await at.chat(stream=stream)
    await at.chat(stream=stream)
    assert await at.count("coordinator_requests_total", route="chat", outcome="ok") == 2
    assert await at.count("coordinator_request_seconds_count", route="chat") == 2
    assert await at.count("coordinator_time_to_first_token_seconds_count", route="chat") == (2 if stream else 0)
    assert await at.count("coordinator_tokens_total", route="chat", kind="prompt") == 36
    assert await at.count("coordinator_tokens_total", route="chat", kind="completion") == 20
    for role in ROLES:
        assert await at.count("coordinator_leg_seconds_count", step=role, outcome="ok") == 2


async def test_no_label_has_a_value_of_the_clients(coordinator, fleet):
    """I1: a client that invents models must not fill the memory of whoever scrapes."""
    at = await coordinator(fleet, "text")
    canary: dict[str, Any] = {"model": "canary", "user": "canary"}
    await at.chat("canary", ("X-Request-Id", "canary"), **canary)
    await at.post("/canary", {})
    await at.get("/v1/models?canary=1")
    assert b"canary" not in (await at.get("/metrics")).raw


async def test_the_metrics_may_have_a_port_of_their_own_or_none(coordinator, fleet, excuse):
    excuse("in_flight", "the harness reads it from the page that is not there")
    for port in (0, 65000):
        at = await coordinator(fleet, server={"metrics_port": port})
        assert (await at.get("/metrics")).status == 404
