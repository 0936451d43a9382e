"""What the metrics say of a request: how fast its tokens came, which worker had it, and which model it was."""

from __future__ import annotations

import asyncio
import json
import operator

import pytest

from coordinator.sim import Canned, Fault, Settings
from tests.flows.line import Line
from tests.flows.setups import CHAT, COMPLETIONS, MESSAGES, RESPONSES, question
from tests.flows.wire import connect, head, post


def chunk(**delta: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode() + b"\n\n"


LAST = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7}}\n\n'
DONE = b"data: [DONE]\n\n"


async def test_only_gaps_between_frames_with_content_are_gaps(says, scripted, ask):
    """I1, S19: a role, a comment, the usage chunk and the end mark come at times of their own."""
    role, ping = chunk(role="assistant", content=""), b": ping\n\n"
    events = [role, chunk(content="a"), ping, chunk(content="b"), chunk(content="c"), LAST, DONE]
    gates = [asyncio.Event() for _ in events]  # each waits until the one before has come through
    at, _ = await says(scripted.sse(*(part for pair in zip(events, gates, strict=True) for part in pair)))
    async with at.open(CHAT, ask(stream=True, stream_options={"include_usage": True})) as live:
        await live.head()
        for event, gate in zip(events, gates, strict=True):
            assert await live.event() == event.strip()
            gate.set()
        assert (await live.rest()).whole
    assert await at.count("coordinator_time_to_first_token_seconds_count", route="chat") == 1
    assert await at.count("coordinator_inter_token_latency_seconds_count", route="chat") == 2
    assert await at.count("coordinator_time_per_output_token_seconds_count", route="chat") == 1
    lasted = await at.count("coordinator_inter_token_latency_seconds_sum", route="chat")
    assert await at.count("coordinator_time_per_output_token_seconds_sum", route="chat") == pytest.approx(lasted / 3)


@pytest.mark.parametrize("shape", ["openai", "text"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
async def test_a_stream_of_any_api_has_a_time_to_first_token_gaps_and_a_time_per_token(coordinator, fleet, shape, path):
    """I1: whether its frames are relayed or made anew."""
    at = await coordinator(fleet, shape)
    extra = {"stream_options": {"include_usage": True}} if path in (CHAT, COMPLETIONS) else {}
    got = await at.post(path, question(path, "Say hello.", stream=True, max_tokens=30, **extra))
    assert got.status == 200
    assert await at.count("coordinator_time_to_first_token_seconds_count") == 1
    gaps = await at.count("coordinator_inter_token_latency_seconds_count")
    tokens = await at.count("coordinator_tokens_total", kind="completion")
    assert 0 < gaps < tokens
    assert await at.count("coordinator_time_per_output_token_seconds_count") == 1


async def test_a_request_lasts_from_its_head_on_also_while_it_waits_for_its_turn(coordinator, fleet, ask, eventually):
    at = await coordinator(fleet)
    at.front.turns = line = Line()
    async with at.open(CHAT, ask()) as live:
        await eventually(lambda: line.waiting)
        await asyncio.sleep(0.1)
        line.go_on()
        await live.head()
        await live.rest()
    assert await at.count("coordinator_request_seconds_sum", route="chat") >= 0.1


async def test_a_whole_answer_has_no_times_of_tokens(coordinator, fleet):
    at = await coordinator(fleet, "text")
    await at.chat()
    for name in ("time_to_first_token", "inter_token_latency", "time_per_output_token"):
        assert await at.count(f"coordinator_{name}_seconds_count") == 0


async def test_a_model_has_its_name_once_a_worker_has_listed_it(coordinator, fleet_of, eventually):
    """I1: models from the workers' own lists; what a client invents is one series."""
    fleet = await fleet_of(settings=Settings(model="tiny"))
    at = await coordinator(fleet, "text")

    async def named() -> float:
        await at.chat(stream=True)
        return await at.count("coordinator_requests_total", route="chat", outcome="ok", model="tiny")

    assert await eventually(named)
    await at.chat(model="canary")
    assert await at.count("coordinator_requests_total", outcome="rejected", model="other") == 1
    assert await at.count("coordinator_time_to_first_token_seconds_count", model="tiny") > 0
    assert await at.count("coordinator_tokens_total", model="tiny", kind="completion") > 0


async def test_a_client_that_asks_for_the_list_teaches_the_names_in_it(coordinator, fleet):
    at = await coordinator(fleet)
    assert (await at.get("/v1/models")).status == 200
    await at.chat()
    assert await at.count("coordinator_requests_total", route="chat", model="tiny") == 1


async def test_each_worker_has_its_own_time_and_outcomes(coordinator, fleet_of):
    """I1: which worker is bad."""
    fleet = await fleet_of(prefills=2)
    fleet.prefills[0].behave.fault = Fault(canned=Canned(503, b"{}"))
    at = await coordinator(fleet)
    for _ in range(4):
        assert (await at.chat()).status == 200
    bad, good = (worker.url.partition("://")[2] for worker in fleet.prefills)
    count = "coordinator_worker_leg_seconds_count"
    assert await at.count(count, role="prefill", worker=good, outcome="ok") == 4
    assert await at.count(count, role="prefill", worker=bad, outcome="LegBusy") >= 1
    assert await at.count(count, role="prefill", worker=bad, outcome="ok") == 0


async def test_a_call_is_in_flight_at_its_worker_until_its_stream_is_over(coordinator, fleet, ask, eventually):
    """R06: back to 0, also where the client left."""
    at = await coordinator(fleet)
    fleet.decode.behave.fault = Fault(hang_after=2)
    where = {"role": "decode", "worker": fleet.decode.url.partition("://")[2]}

    async def idle() -> bool:
        return await at.count("coordinator_legs_in_flight", **where) == 0

    async with at.open(CHAT, ask(stream=True)) as live:
        await live.head()
        await live.event()
        assert await at.count("coordinator_legs_in_flight", **where) == 1
        live.cut()
    await eventually(idle)


async def test_the_age_of_a_hand_over_is_that_at_the_decode_leg(coordinator, fleet):
    """I1."""
    at = await coordinator(fleet)
    await at.chat()
    assert await at.count("coordinator_handover_age_seconds_count") == 1
    assert await at.count("coordinator_handover_age_seconds_bucket", le="15.0") == 1


async def test_an_answer_without_its_echo_is_counted_as_such(coordinator, fleet, excuse):
    """V19: an old worker in a new fleet is seen on a graph, and not only in a client's error."""
    excuse("unread", "the decode worker's answer is canned, so nothing is fetched")
    at = await coordinator(fleet, "text")
    ids = {"choices": [{"index": 0, "token_ids": [1, 2], "finish_reason": "stop"}]}
    fleet.decode.behave.next(Fault(canned=Canned(200, json.dumps(ids))))
    assert (await at.chat()).status == 502
    assert await at.count("coordinator_answers_unusable_total", step="decode", reason="not_echoed") == 1
    assert await at.count("coordinator_answers_unusable_total", reason="unreadable") == 0


async def test_a_stream_that_breaks_off_is_counted_for_its_worker(coordinator, fleet):
    """S11, S09: the status was 200, and the worker is the one to look at."""
    at = await coordinator(fleet)
    where = {"role": "decode", "worker": fleet.decode.url.partition("://")[2]}
    for fault in (Fault(die_after=3), Fault(error_after=3)):
        fleet.decode.behave.next(fault)
        await at.chat(stream=True)
    assert await at.count("coordinator_streams_broken_total", **where) == 2
    assert await at.count("coordinator_worker_leg_seconds_count", **where, outcome="ok") == 2  # up to their first event


async def test_a_stream_that_cannot_be_read_is_an_answer_of_no_use(says, scripted):
    """V19: also where the first events were well."""
    good = {"output_mode": "text", "choices": [{"index": 0, "text": "a", "token_ids": [1], "finish_reason": None}]}
    frame = b"data: " + json.dumps(good).encode() + b"\n\n"
    at, _ = await says(scripted.sse(frame, b"data: {no JSON\n\n"), shape="text")
    got = await at.chat(stream=True)
    assert (got.status, got.whole) == (200, False)
    assert await at.count("coordinator_answers_unusable_total", step="decode", reason="unreadable") == 1
    assert await at.count("coordinator_streams_broken_total") == 1


async def test_what_no_route_takes_is_counted_and_has_its_line_too(coordinator, fleet):
    """H25, H10: a client that speaks to the wrong port is seen."""
    at = await coordinator(fleet)
    assert (await at.post("/nope", {})).status == 404
    assert (await at.get(CHAT)).status == 405
    async with connect(at.url) as wire:
        await wire.send(b"NO HTTP\r\n\r\n")
        assert (await wire.answer()).status == 400
    async with connect(at.url) as wire:
        await wire.send(post(CHAT, b"{}", "Transfer-Encoding: gzip"))
        assert (await wire.answer()).status in (400, 501)
    async with connect(at.url) as wire:
        await wire.send(head("/healthz", f"X: {'x' * 40000}", method="GET"))
        assert (await wire.answer()).status == 431
    assert await at.count("coordinator_requests_total", route="none", outcome="bad_request") == 5
    assert await at.count("coordinator_requests_total") == 5


def broken(*_):
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("route", "method", "path", "part", "name"),
    [
        ("chat", "POST", CHAT, "plan.intake", "read_json"),
        ("count_tokens", "POST", "/v1/messages/count_tokens", "plan.intake", "read_json"),
        ("models", "GET", "/v1/models", "plan.questions", "models"),
        ("proxied", "GET", "/version", "_passage", "pass_on"),
    ],
)
async def test_a_fault_of_our_own_is_counted_once(
    coordinator, fleet, monkeypatch, caplog, route, method, path, part, name
):
    """Its route has told of it already when the listener, which tells of what no route took, comes to see it."""
    pools = {"decode": {"endpoints": [fleet.decode.url]}}
    at = await coordinator(fleet, pools=pools, server={"proxied_routes": ["GET /version"]})
    monkeypatch.setattr(operator.attrgetter(part)(at.front), name, broken)
    async with at.open(path, {} if method == "POST" else None, method=method) as live:
        await live.head()
        got = await live.rest()
    assert got.status == 500 and got.error["message"].startswith("the coordinator failed; its log has the details")
    counted = await at.metrics("coordinator_requests_total")
    assert counted == {f'coordinator_requests_total{{model="",outcome="internal_error",route="{route}"}}': 1}
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]


async def test_a_fault_of_our_own_in_letting_go_does_not_answer_a_second_time(coordinator, fleet, monkeypatch, caplog):
    at = await coordinator(fleet)
    monkeypatch.setattr(at.front.plan.releaser, "release", broken)
    got = await at.chat()
    assert (got.status, got.whole) == (200, True)
    counted = await at.metrics("coordinator_requests_total")
    assert list(counted.values()) == [1] and 'outcome="ok"' in next(iter(counted))
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]
