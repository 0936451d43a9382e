"""Spans, as a real collector gets them: OTLP over HTTP, decoded with the protocol's own messages."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.semconv.attributes import error_attributes, http_attributes, server_attributes, url_attributes

from coordinator.app import build
from coordinator.config import Config, ConfigError
from coordinator.sim import Canned, Fault
from coordinator.telemetry import otel
from tests.bounds import HANG_S
from tests.flows.conftest import config_tree
from tests.flows.setups import CHAT, question

CLIENT = "00f067aa0ba902b7"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = ("traceparent", f"00-{TRACE}-{CLIENT}-01")
SERVER, CALL = Span.SPAN_KIND_SERVER, Span.SPAN_KIND_CLIENT


@dataclass
class Collector:
    """Attributes: ``spans`` are those that came, ``raw`` the bytes of all requests; it waits for ``gate``."""

    url: str = ""
    spans: list[Span] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    raw: bytes = b""
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.Response:
        assert request.content_type == "application/x-protobuf"
        raw = await request.read()
        await self.gate.wait()
        self.raw += raw
        for resource in ExportTraceServiceRequest.FromString(raw).resource_spans:
            self.resources.append(values(resource.resource.attributes))
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        return web.Response(content_type="application/x-protobuf")

    @property
    def requests(self) -> list[Span]:
        return [span for span in self.spans if span.kind == SERVER]

    @property
    def legs(self) -> list[Span]:
        return sorted((span for span in self.spans if span.kind == CALL), key=lambda span: span.start_time_unix_nano)


def values(attributes: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in attributes}


@pytest.fixture
async def collector(stack, monkeypatch):
    made, app = Collector(), web.Application()
    made.gate.set()
    app.router.add_post("/v1/traces", made.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = "http://{}:{}".format(*runner.addresses[0][:2])
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    return made


@pytest.fixture
def traced(coordinator, collector):
    """``await traced(fleet, shape, ..)`` is a coordinator that exports to the collector."""

    async def start(fleet, shape="text", **changes):
        return await coordinator(fleet, shape, tracing=True, **changes)

    return start


def context_of(received) -> tuple[str, str, str]:
    _, trace, span, flags = received.header("traceparent").split("-")
    return trace, span, flags


@pytest.mark.parametrize("stream", [False, True])
async def test_each_leg_is_a_child_of_the_request_which_is_the_clients(traced, collector, fleet, eventually, stream):
    """R10: prefill and decode are siblings, each worker has its own leg as its parent, and tracestate is kept."""
    at = await traced(fleet)
    sent = [PARENT, ("tracestate", "vendor=a,other=b"), ("baggage", "k=v")]
    assert (await at.chat("Say hello.", *sent, stream=stream)).status == 200
    await eventually(lambda: collector.requests)
    (request,), legs = collector.requests, collector.legs
    assert (request.name, request.trace_id.hex(), request.parent_span_id.hex()) == (f"POST {CHAT}", TRACE, CLIENT)
    assert [leg.name for leg in legs] == ["render", "prefill", "decode"]
    assert {leg.parent_span_id for leg in legs} == {request.span_id}
    assert {leg.trace_id.hex() for leg in legs} == {TRACE}
    assert len({leg.span_id for leg in legs}) == 3
    received = [worker.received[-1] for worker in (fleet.render, fleet.prefill, fleet.decode)]
    assert [context_of(one) for one in received] == [(TRACE, leg.span_id.hex(), "01") for leg in legs]
    assert {one.header("tracestate") for one in received} == {"vendor=a,other=b"}
    assert {one.header("baggage") for one in received} == {"k=v"}
    assert {leg.trace_state for leg in legs} == {"vendor=a,other=b"}
    assert all(request.start_time_unix_nano <= leg.start_time_unix_nano <= leg.end_time_unix_nano for leg in legs)


@pytest.mark.parametrize("sent", [(), (("traceparent", "00-zzz"),), (PARENT, PARENT)], ids=["none", "invalid", "two"])
async def test_without_a_valid_parent_a_request_is_the_root(traced, collector, fleet, eventually, sent):
    """R10: and what a client sent in its place goes nowhere."""
    at = await traced(fleet)
    await at.chat("Say hello.", *sent, ("tracestate", "vendor=a"))
    await eventually(lambda: collector.requests)
    (request,) = collector.requests
    assert request.parent_span_id == b""
    assert request.trace_id.hex() != TRACE
    for worker in fleet.workers:
        trace, span, _ = context_of(worker.received[-1])
        assert trace == request.trace_id.hex()
        assert span in {leg.span_id.hex() for leg in collector.legs}
        assert worker.received[-1].header("tracestate") is None


@pytest.mark.parametrize("sent", [PARENT, ("traceparent", "garbage")])
async def test_context_is_passed_on_when_nothing_is_exported(coordinator, fleet, sent):
    """R10: prefill's and decode's own spans are one trace all the same."""
    at = await coordinator(fleet, "text")
    await at.chat("Say hello.", sent)
    received = {worker.received[-1].header("traceparent") for worker in fleet.workers}
    assert len(received) == 1
    assert (received == {PARENT[1]}) is (sent == PARENT)
    assert "garbage" not in received


async def test_a_request_says_what_was_asked_and_what_came(traced, collector, fleet, eventually):
    """By the names of the semantic conventions, which are under development: the library's say what they are now."""
    at = await traced(fleet)
    limits = {"max_tokens": 40, "temperature": 0.5, "top_p": 0.9}
    await at.chat("Say hello.", ("X-Request-Id", "ask-1"), stream=True, **limits)
    await eventually(lambda: collector.requests)
    told = values(collector.requests[0].attributes)
    ttft = told.pop(gen_ai.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK)
    assert 0 < ttft < 30
    assert told == {
        http_attributes.HTTP_REQUEST_METHOD: "POST",
        http_attributes.HTTP_ROUTE: CHAT,
        url_attributes.URL_PATH: CHAT,
        http_attributes.HTTP_RESPONSE_STATUS_CODE: 200,
        gen_ai.GEN_AI_OPERATION_NAME: gen_ai.GenAiOperationNameValues.CHAT.value,
        gen_ai.GEN_AI_PROVIDER_NAME: "vllm",
        gen_ai.GEN_AI_REQUEST_MODEL: "tiny",
        gen_ai.GEN_AI_REQUEST_STREAM: True,
        gen_ai.GEN_AI_REQUEST_MAX_TOKENS: 40,
        gen_ai.GEN_AI_REQUEST_TEMPERATURE: 0.5,
        gen_ai.GEN_AI_REQUEST_TOP_P: 0.9,
        gen_ai.GEN_AI_USAGE_INPUT_TOKENS: 18,
        gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS: 10,
        "coordinator.request_id": "ask-1",
        "coordinator.outcome": "ok",
    }
    assert collector.requests[0].status.code == Status.STATUS_CODE_UNSET


async def test_a_leg_says_which_worker_had_it(traced, collector, fleet, eventually):
    at = await traced(fleet)
    await at.chat()
    await eventually(lambda: collector.requests)
    told = {leg.name: values(leg.attributes) for leg in collector.legs}
    assert told["prefill"] == {
        http_attributes.HTTP_REQUEST_METHOD: "POST",
        url_attributes.URL_FULL: f"{fleet.prefill.url}/inference/v1/generate",
        server_attributes.SERVER_ADDRESS: "127.0.0.1",
        server_attributes.SERVER_PORT: int(fleet.prefill.url.rpartition(":")[2]),
        "coordinator.step": "prefill",
        "coordinator.role": "prefill",
        "coordinator.outcome": "ok",
    }


async def test_the_resource_is_this_program_unless_the_environment_says_otherwise(
    traced, collector, fleet, eventually, monkeypatch
):
    at = await traced(fleet)
    await at.chat()
    await eventually(lambda: collector.resources)
    assert collector.resources[0]["service.name"] == "pd-coordinator"
    assert collector.resources[0]["service.version"]
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    at = await traced(fleet)
    await at.chat()
    ours = {"service.name": "ours", "deployment.environment": "test"}
    await eventually(lambda: any(resource.items() >= ours.items() for resource in collector.resources))


async def test_a_leg_that_was_tried_again_is_two_spans(traced, collector, fleet_of, eventually):
    fleet = await fleet_of(prefills=2)
    at = await traced(fleet)
    fleet.prefills[0].behave.next(Fault(canned=Canned(503, b"{}")))
    for _ in range(2):  # one of them asks this worker first
        assert (await at.chat()).status == 200
    await eventually(lambda: len(collector.requests) == 2)
    (failed,) = [leg for leg in collector.legs if leg.status.code]
    again = [leg for leg in collector.legs if values(leg.attributes).get(http_attributes.HTTP_REQUEST_RESEND_COUNT)]
    assert (failed.name, values(failed.attributes)[error_attributes.ERROR_TYPE]) == ("prefill", "LegBusy")
    assert failed.status.code == Status.STATUS_CODE_ERROR
    assert [(leg.name, leg.parent_span_id) for leg in again] == [("prefill", failed.parent_span_id)]


FAILURES = {
    "a client's mistake": ({"messages": 3}, None, "rejected", Status.STATUS_CODE_UNSET),
    "a worker's failure": ({}, Fault(canned=Canned(500, b"{}")), "leg_failed", Status.STATUS_CODE_ERROR),
    "a stream that breaks off": ({"stream": True}, Fault(die_after=3), "stream_broken", Status.STATUS_CODE_ERROR),
}


@pytest.mark.parametrize(("body", "fault", "outcome", "status"), FAILURES.values(), ids=FAILURES)
async def test_a_failure_is_an_error_of_the_span_where_it_is_one_of_the_server(
    traced, collector, fleet, eventually, excuse, body, fault, outcome, status
):
    excuse("unread", "decode fails before it has fetched anything")
    at = await traced(fleet)
    if fault is not None:
        fleet.decode.behave.next(fault)
    await at.chat(**body)
    await eventually(lambda: collector.requests)
    (request,) = collector.requests
    told = values(request.attributes)
    assert (told["coordinator.outcome"], request.status.code) == (outcome, status)
    assert told[error_attributes.ERROR_TYPE]
    if fault is not None:
        assert collector.legs[-1].name == "decode"
        assert collector.legs[-1].status.code == Status.STATUS_CODE_ERROR


async def test_a_client_that_leaves_ends_its_spans_and_blames_nobody(traced, collector, fleet, ask, eventually):
    at = await traced(fleet)
    fleet.decode.behave.fault = Fault(hang_after=2)
    async with at.open(CHAT, ask(stream=True)) as live:
        await live.head()
        await live.event()
        live.cut()
    await eventually(lambda: collector.requests)
    assert values(collector.requests[0].attributes)["coordinator.outcome"] == "client_gone"
    await eventually(lambda: len(collector.legs) == 3)
    assert {span.status.code for span in collector.spans} == {Status.STATUS_CODE_UNSET}


async def test_a_client_that_samples_nothing_is_followed(traced, collector, fleet, eventually):
    at = await traced(fleet)
    await at.chat("Say hello.", ("traceparent", f"00-{TRACE}-{CLIENT}-00"))
    assert {context_of(worker.received[-1])[::2] for worker in fleet.workers} == {(TRACE, "00")}
    await at.chat("Say hello.", PARENT)
    await eventually(lambda: collector.requests)
    assert len(collector.requests) == 1


async def test_the_sampler_is_that_of_the_environment(traced, collector, fleet, monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    at = await traced(fleet)
    await at.chat("Say hello.", PARENT)
    assert {context_of(worker.received[-1])[2] for worker in fleet.workers} == {"00"}


async def test_a_side_question_is_a_span_and_a_parent(traced, collector, fleet, eventually):
    at = await traced(fleet)
    await at.get("/v1/models", PARENT)
    await eventually(lambda: collector.requests)
    (request,) = collector.requests
    assert (request.name, request.trace_id.hex()) == ("GET /v1/models", TRACE)
    asked = [one for one in fleet.decode.received if one.path == "/v1/models" and one.header("x-request-id")]
    assert context_of(asked[-1]) == (TRACE, request.span_id.hex(), "01")


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_no_word_of_a_prompt_or_an_answer_and_no_key_is_exported(traced, collector, fleet, eventually, path):
    """J4."""
    at = await traced(fleet)
    body = question(path, "Repeat: canary-prompt", max_tokens=50, user="canary-user")
    await at.post(path, body, ("Authorization", "Bearer canary-key"), ("Cookie", "canary-cookie"))
    await at.post(path, b'{"model": "x", "canary": ["canary"]}')
    await eventually(lambda: len(collector.requests) == 2)
    assert b"canary" not in collector.raw


async def test_a_collector_that_hangs_keeps_no_request_waiting_and_no_process_alive(
    traced, collector, fleet, monkeypatch, excuse
):
    excuse("in_flight", "the coordinator has been stopped")
    monkeypatch.setattr(otel, "_SHUTDOWN_S", 0.05)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    collector.gate.clear()
    at = await traced(fleet)
    for _ in range(20):
        assert (await at.chat()).status == 200
    await at.stop()  # ends, though nothing could be sent
    assert collector.spans == []
    collector.gate.set()


async def test_a_collector_that_is_not_there_does_no_harm(coordinator, fleet, monkeypatch, excuse):
    excuse("in_flight", "the coordinator has been stopped")
    monkeypatch.setattr(otel, "_SHUTDOWN_S", 0.05)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    at = await coordinator(fleet, "text", tracing=True)
    assert (await at.chat()).status == 200
    await at.stop()


async def test_what_is_left_is_sent_when_the_coordinator_stops(traced, collector, fleet, monkeypatch, excuse):
    excuse("in_flight", "the coordinator has been stopped")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    at = await traced(fleet)
    await at.chat()
    assert collector.spans == []
    await at.stop()
    assert (len(collector.requests), len(collector.legs)) == (1, 3)


def config(fleet: Any) -> Config:
    return Config.model_validate(config_tree(fleet, "text", {}, {"tracing": True}))


async def test_without_the_package_the_file_is_refused_with_what_to_install(fleet, monkeypatch):
    monkeypatch.setitem(sys.modules, "coordinator.telemetry.otel", None)
    with pytest.raises(ConfigError, match=r"tracing: needs OpenTelemetry: pip install 'pd-coordinator\[otel\]'"):
        build(config(fleet))


@pytest.mark.parametrize(
    ("name", "value"),
    [("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"), ("OTEL_TRACES_EXPORTER", "zipkin")],
)
async def test_what_the_environment_asks_for_in_vain_is_named(fleet, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"tracing: {name} is {value}"):
        build(config(fleet))


def test_nothing_of_it_is_loaded_where_it_is_off(tmp_path):
    file = tmp_path / "pd.json"
    tree = {"pools": {"decode": {"endpoints": ["http://d:1"]}}, "pipeline": {"steps": [{"type": "decode"}]}}
    file.write_text(json.dumps(tree))
    script = (
        "import sys; from coordinator.app import build; from coordinator.config import load; "
        f"build(load({str(file)!r}, {{}})); print([name for name in sys.modules if 'opentelemetry' in name])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stdout == "[]\n"
