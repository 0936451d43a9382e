"""One JSON line per request on standard error, with how it went, and nothing of what was said."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from coordinator.logs import TRACE, JsonFormatter, access
from coordinator.sim import Canned, Fault
from tests.bounds import HANG_S
from tests.flows.client import exchange
from tests.flows.conftest import config_tree

if TYPE_CHECKING:
    from coordinator.sim import SimFleet

ROOT = Path(__file__).resolve().parents[2]
CHAT = "/v1/chat/completions"
ALWAYS = {"time", "level", "logger", "message", "request_id", "route", "status", "outcome", "seconds"}
KEY = ("Authorization", "Bearer canary-key")


class Lines(logging.Handler):
    """Collects what would be written, in JSON."""

    def __init__(self) -> None:
        super().__init__(level=0)
        self.setFormatter(JsonFormatter())
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    @property
    def requests(self) -> list[dict[str, Any]]:
        every = [json.loads(line) for line in self.lines]
        return [line for line in every if line["logger"] == "coordinator.access"]


@pytest.fixture
def lines():
    """Every line of every logger, at the lowest level."""
    root = logging.getLogger()
    handler, level = Lines(), root.level
    root.addHandler(handler)
    root.setLevel(TRACE)
    access.put = lambda line: handler.lines.append(line.decode())
    yield handler
    access.put = None
    root.removeHandler(handler)
    root.setLevel(level)


async def test_an_answered_request_is_one_line_with_its_legs_and_tokens(coordinator, fleet, lines):
    at = await coordinator(fleet, "text")
    got = await at.chat("Say hello.", ("X-Request-Id", "ask-1"))
    (line,) = lines.requests
    assert set(line) == ALWAYS | {"leg_id", "model", "stream", "legs", "prompt_tokens", "completion_tokens"}
    assert {
        name: line[name] for name in ("message", "level", "request_id", "route", "status", "outcome", "stream")
    } == {
        "message": "request",
        "level": "info",
        "request_id": "ask-1",
        "route": "chat",
        "status": 200,
        "outcome": "ok",
        "stream": False,
    }
    usage = got.body["usage"]
    assert (line["prompt_tokens"], line["completion_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert list(line["legs"]) == ["render", "prefill", "decode"]
    assert all(set(leg) == {"seconds", "outcome", "worker"} and leg["outcome"] == "ok" for leg in line["legs"].values())
    assert [f"http://{leg['worker']}" for leg in line["legs"].values()] == [worker.url for worker in fleet.workers]
    assert 0 < sum(leg["seconds"] for leg in line["legs"].values()) <= line["seconds"]


async def test_a_lines_leg_id_is_the_one_that_the_workers_log(coordinator, fleet, lines):
    """I3: a client's failure is found in a worker's log by it."""
    at = await coordinator(fleet, "text")
    await at.chat("Say hello.", ("X-Request-Id", "ask-1"))
    (line,) = lines.requests
    asked = [worker.received[-1].header("x-request-id") for worker in fleet.workers]
    assert asked == [line["leg_id"]] * 3
    assert line["leg_id"].startswith("ask-1-")


@pytest.mark.parametrize("shape", ["openai", "text", "derender"])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate"])
async def test_a_stream_is_one_line_too_with_the_time_of_its_first_token(coordinator, fleet, lines, shape, path):
    at = await coordinator(fleet, shape)
    got = await at.post(path, {**question(path, "Say hello."), "stream": True})
    assert got.status == 200
    (line,) = lines.requests
    assert (line["status"], line["outcome"], line["stream"]) == (200, "ok", True)
    assert 0 < line["ttft_seconds"] <= line["seconds"]


async def test_tokens_of_a_relayed_stream_are_counted_when_the_worker_tells_them(coordinator, fleet, lines):
    at = await coordinator(fleet)
    await at.chat(stream=True, stream_options={"include_usage": True})
    (line,) = lines.requests
    assert (line["prompt_tokens"], line["completion_tokens"]) == (18, 10)


def question(path: str, text: str) -> dict[str, Any]:
    if path == "/v1/completions":
        return {"model": "tiny", "prompt": text, "max_tokens": 20}
    if path == "/v1/responses":
        return {"model": "tiny", "input": text}
    if path == "/inference/v1/generate":
        return {"token_ids": [10, 11, 12], "sampling_params": {"max_tokens": 5}, "output_mode": "text"}
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 40}


async def test_a_failure_is_one_line_that_says_whose_it_was(coordinator, fleet, lines, excuse):
    """I1: nothing is lost silently."""
    excuse("unread", "the decode leg is refused by a canned answer, which frees nothing")
    at = await coordinator(fleet)
    worker = fleet.decode.behave
    await at.post(CHAT, b"[]")
    await at.chat(model="nope")
    worker.next(Fault(canned=Canned(500, b"{}")))
    await at.chat()
    worker.next(Fault(die_after=3))
    await at.chat(stream=True)
    worker.next(Fault(error_after=3))
    await at.chat(stream=True)
    assert [(line["status"], line["outcome"], line["error"].partition(":")[0]) for line in lines.requests] == [
        (400, "bad_request", "BadRequest"),
        (404, "rejected", "LegRejected"),
        (502, "leg_failed", "LegFailed"),
        (200, "stream_broken", "decode"),
        (200, "stream_broken", "the worker failed in mid-stream"),
    ]
    assert lines.requests[1]["legs"] == {"prefill": {**lines.requests[1]["legs"]["prefill"], "outcome": "LegRejected"}}
    for outcome, count in {"bad_request": 1, "rejected": 1, "leg_failed": 1, "stream_broken": 2, "ok": 0}.items():
        assert await at.count("coordinator_requests_total", route="chat", outcome=outcome) == count


async def test_a_side_question_is_a_line_and_a_metric_too(coordinator, fleet, lines):
    """I1: a failed one would be lost silently."""
    at = await coordinator(fleet, "text")
    asking = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    await at.post("/v1/messages/count_tokens", asking, ("X-Request-Id", "ask-1"))
    await at.post("/v1/messages/count_tokens", b"[]")
    await at.get("/v1/models")
    await fleet.decode.refuse_connections()
    await at.get("/v1/models")
    assert [(line["route"], line["status"], line["outcome"], line.get("error")) for line in lines.requests] == [
        ("count_tokens", 200, "ok", None),
        ("count_tokens", 400, "bad_request", "BadRequest"),
        ("models", 200, "ok", None),
        ("models", 503, "unavailable", "NoWorker"),
    ]
    assert set(lines.requests[0]) == ALWAYS
    assert lines.requests[0]["request_id"] == "ask-1"
    assert await at.count("coordinator_requests_total", route="models") == 2
    assert await at.count("coordinator_requests_total", route="count_tokens", outcome="bad_request") == 1


async def test_a_line_for_people_says_the_same(coordinator, fleet, lines, monkeypatch):
    monkeypatch.setattr(access, "human", True)
    at = await coordinator(fleet)
    await at.chat("Say hello.", ("X-Request-Id", "ask-1"))
    (line,) = [line for line in lines.lines if not line.startswith("{")]
    assert "info    request request_id=ask-1 route=chat status=200 outcome=ok" in line


async def serve(fleet: SimFleet, folder: Path) -> tuple[asyncio.subprocess.Process, str, list[str]]:
    """Start ``coordinator serve`` as a process of its own; give its URL, and what it has written so far."""
    tree = config_tree(fleet, "text", {}, {"log_level": "trace"})
    file = folder / "pd.json"
    file.write_text(json.dumps(tree))
    command = [sys.executable, "-m", "coordinator", "serve", "--config", str(file)]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert process.stderr is not None
    seen: list[str] = []
    while line := (await process.stderr.readline()).decode():
        seen.append(line)
        if json.loads(line)["message"] == "listening":
            return process, f"http://{json.loads(line)['address']}", seen
    raise AssertionError(f"it ended: {seen}")


async def test_no_line_at_any_level_holds_a_prompt_an_answer_or_a_key(fleet, tmp_path, excuse):
    """J4: of a real process at its loudest, with answers, refusals and failures of every kind."""
    excuse("unread", "some decode legs are refused by a canned answer, which frees nothing")
    quoted = json.dumps(
        {"error": {"message": "no: canary-quote", "type": "BadRequestError", "param": None, "code": 400}}
    )
    faults = [
        Fault(),
        Fault(canned=Canned(400, quoted)),
        Fault(canned=Canned(500, quoted)),
        Fault(canned=Canned(200, '"canary-quote"')),
        Fault(canned=Canned(200, "canary-quote")),
        Fault(die_after=2),
        Fault(truncate="cut", half_event_after=1),
        Fault(end_after=2),
    ]
    asked = 0
    async with asyncio.timeout(HANG_S):
        process, url, seen = await serve(fleet, tmp_path)
        # Read all the while: what nobody reads fills the pipe, and then the process waits for whoever does.
        rest = asyncio.create_task(process.communicate())
        try:
            for path in (CHAT, "/v1/completions", "/v1/responses", "/v1/messages"):
                for stream in (False, True):
                    for fault in faults:
                        fleet.decode.behave.next(fault)
                        body = {**question(path, "Repeat: canary-prompt"), "stream": stream, "user": "canary-user"}
                        async with exchange(url, path, body, headers=[KEY, ("Cookie", "canary-cookie")]) as live:
                            await live.head()
                            await live.rest()
                        fleet.decode.behave.clear()
                        asked += 1
            for raw in (b'{"model":"canary-model"', b'{"max_tokens":"canary-cap","messages":[]}', b'["canary-list"]'):
                async with exchange(url, CHAT, raw, headers=[KEY]) as live:
                    await live.head()
                    await live.rest()
                asked += 1
        finally:
            process.terminate()
            out, err = await rest
    seen += err.decode().splitlines()
    lines = [json.loads(line) for line in seen]
    assert (process.returncode, out) == (0, b"")
    assert sum(line["logger"] == "coordinator.access" for line in lines) == asked
    assert [line for line in seen if "canary" in line] == []
    assert {line["message"] for line in lines} >= {"request", "leg", "leg body", "leg answer"}
    assert fleet.decode.received[-1].header("authorization") == KEY[1]


async def test_debug_tells_of_every_call_of_a_worker_and_trace_of_its_bodies(coordinator, fleet_of, lines):
    """I1: what a request did, without a prompt in it (J4)."""
    fleet = await fleet_of(prefills=2)
    at = await coordinator(fleet, "text")
    fleet.prefills[0].behave.fault = Fault(canned=Canned(503, b"{}"))
    for _ in range(2):
        await at.chat("Say canary.", ("X-Request-Id", "ask-1"))
    every = [line for line in map(json.loads, lines.lines) if line.get("request_id") == "ask-1"]
    calls = [line for line in every if line["message"] == "leg"]
    assert {line["level"] for line in calls} == {"debug"}
    told = [(line["step"], line["worker"], line["attempt"], line["outcome"]) for line in calls]
    bad, good = (worker.url.partition("://")[2] for worker in fleet.prefills)
    assert ("prefill", bad, 0, "LegBusy") in told
    assert ("prefill", good, 1, "ok") in told
    bodies = [line for line in every if line["message"] == "leg body"]
    assert {line["level"] for line in bodies} == {"trace"}
    assert len(bodies) == len(calls)
    answers = {line["step"]: line["body"] for line in every if line["message"] == "leg answer"}
    assert answers.keys() == {"render", "prefill", "decode"}
    assert answers["prefill"]["kv_transfer_params"]["remote_block_ids"]
    assert not [line for line in lines.lines if "canary" in line]
    (first, second) = lines.requests
    both = {**first["legs"], **second["legs"]} if "calls" in second["legs"]["prefill"] else first["legs"]
    assert [call["outcome"] for call in both["prefill"]["calls"]] == ["LegBusy", "ok"]


async def test_a_step_that_ran_again_stands_twice(coordinator, fleet_of, lines, excuse):
    """R08: decode had failed with its hand-over, so prefill was asked for another."""
    excuse("unread", "the first decode is refused by a canned answer, which frees nothing")
    fleet = await fleet_of(decodes=2)
    at = await coordinator(fleet)
    fleet.decodes[0].behave.next(Fault(canned=Canned(503, b"{}")))
    fleet.decodes[1].behave.next(Fault(canned=Canned(503, b"{}")))
    got = await at.chat()
    (line,) = lines.requests
    assert got.status in (200, 503)
    assert list(line["legs"]) == ["prefill", "decode", "prefill#2", "decode#2"]
