"""A stream that has told its end: what becomes of the worker's connection afterwards is nobody's business."""

import json

import pytest

DONE = b"data: [DONE]\n\n"
FAILED = b'data: {"error": {"message": "no", "type": "InternalServerError", "param": null, "code": 500}}\n\n'


def chunk(text, shape, finish=None):
    if shape == "text":
        choice = {"index": 0, "text": text, "token_ids": [1], "finish_reason": finish, "stop_reason": None}
        return b"data: " + json.dumps({"output_mode": "text", "choices": [choice]}).encode() + b"\n\n"
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


@pytest.mark.parametrize("shape", ["alone", "text"])
async def test_a_connection_that_breaks_behind_the_end_mark_breaks_nothing(says, scripted, shape):
    """S11: the answer was whole, so no error follows it, its end is a proper one, and it counts as answered."""
    events = (chunk("a", shape), chunk("b", shape, "stop"), DONE)
    at, _ = await says(scripted.sse(*events, scripted.CUT), shape=shape)
    got = await at.chat(stream=True)
    assert (got.status, got.whole, got.text, got.events[-1]) == (200, True, "ab", "[DONE]")
    assert await at.count("coordinator_requests_total", outcome="ok") == 1


@pytest.mark.parametrize("shape", ["alone", "text"])
async def test_a_worker_that_is_silent_behind_the_end_mark_is_waited_for_no_longer_than_for_any_byte(
    says, scripted, shape
):
    """S11: the same when it keeps its connection open."""
    events = (chunk("a", shape), chunk("b", shape, "stop"), DONE)
    at, worker = await says(scripted.sse(*events, 5.0), shape=shape, steps={"decode": {"idle_timeout": "100ms"}})
    got = await at.chat(stream=True)
    assert (got.whole, got.text, got.events[-1], worker.open) == (True, "ab", "[DONE]", 0)


@pytest.mark.parametrize("shape", ["alone", "text"])
async def test_a_worker_that_told_of_its_failure_and_died_is_quoted_once(says, scripted, shape):
    """S09: its own error event is the last thing that the client reads, and the end is broken."""
    at, _ = await says(scripted.sse(chunk("a", shape), FAILED, scripted.CUT), shape=shape)
    got = await at.chat(stream=True)
    assert (got.status, got.whole) == (200, False)
    assert [event["error"]["code"] for event in got.chunks if "error" in event] == [500]
    assert await at.count("coordinator_requests_total", outcome="stream_broken") == 1


async def test_a_connection_that_breaks_before_the_end_mark_still_breaks_the_stream(says, scripted):
    """S11: a finish reason is no end."""
    at, _ = await says(scripted.sse(chunk("a", "alone", "stop"), scripted.CUT))
    got = await at.chat(stream=True)
    assert (got.whole, got.chunks[-1]["error"]["code"]) == (False, 502)
