"""Answers of workers that are JSON of another shape than their route's: a 502, and never a 500 or a lost log line."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from coordinator.logs import access

PATHS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Say hello."}]},
    "/v1/completions": {"prompt": "Say hello.", "logprobs": 1},
    "/v1/responses": {"input": "Say hello."},
    "/v1/messages": {"max_tokens": 9, "messages": [{"role": "user", "content": "Say hello."}]},
}
DONE = b"data: [DONE]\n\n"


def answer(**changes: Any) -> dict[str, Any]:
    """Return a generate answer in both output modes, with some of its parts changed."""
    message = {"role": "assistant", "content": "Hello", "reasoning": None, "tool_calls": changes.pop("tool_calls", [])}
    choice = {"index": 0, "token_ids": [4], "finish_reason": "stop", "stop_reason": None, "logprobs": None}
    mode = changes.pop("output_mode")
    choice |= {"message": message} if mode == "derender" else {"text": "Hello"}
    for name in ("logprobs", "index", "text"):
        if name in changes:
            choice[name] = changes.pop(name)
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    return {"request_id": "r", "output_mode": mode, "usage": usage, "choices": [choice], **changes}


# Each of them is read by at least one of the APIs.
ODD: dict[str, dict[str, Any]] = {
    "counts that are text": {"usage": {"prompt_tokens": "3", "completion_tokens": [1]}},
    "details that are a list": {"usage": {"prompt_tokens": 3, "prompt_tokens_details": [1]}},
    "usage that is a list": {"usage": [1]},
    "counts below zero": {"usage": {"prompt_tokens": -3, "completion_tokens": -1}},
    "logprobs that are a list": {"logprobs": [[]]},
    "positions that are numbers": {"logprobs": {"content": [5]}},
    "tool calls that are a number": {"tool_calls": 5},
    "tool calls that are texts": {"tool_calls": ["x"]},
    "a call without a function": {"tool_calls": [{"id": "x"}]},
    "text that is an object": {"text": {"a": 1}},
    "an index without an end": {"index": float("inf")},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shape", ["text", "derender"])
async def test_what_cannot_be_read_of_an_answer_is_a_502_that_names_decode(
    says, scripted, caplog, monkeypatch, path, stream, shape
):
    """Where an API does not read the odd part, its answer is whole; nothing in between, and one log line for each."""
    answers = [answer(output_mode="text" if path == "/v1/completions" else shape, **odd) for odd in ODD.values()]
    streamed = stream and (shape == "text" or path == "/v1/completions")
    events = [[b"data: " + json.dumps(one).encode() + b"\n\n", DONE] for one in answers]
    scripts = [scripted.sse(*two) for two in events] if streamed else [scripted.json(one) for one in answers]
    at, _ = await says(*scripts, shape=shape)
    caplog.set_level(logging.INFO, "coordinator.access")
    lines: list[bytes] = []
    monkeypatch.setattr(access, "put", lines.append)
    for odd in ODD:
        got = await at.post(path, {"model": "tiny", "stream": stream, **PATHS[path]})
        told = [chunk for chunk in got.chunks if chunk.get("error")] if got.status == 200 and stream else []
        if got.status != 200:
            assert (got.status, b"decode: " in got.raw) == (502, True), odd
        elif not got.whole:
            assert told, odd
        assert not (got.whole and told), odd
    assert [record for record in caplog.records if record.exc_info] == []
    assert len(lines) == len(ODD)
    assert await at.count("coordinator_requests_total") == len(ODD)


async def test_a_fault_in_the_last_read_of_a_stream_is_told_as_it_is(says, scripted):
    """The end of the answer has come with it, and must not be taken for the end of its reading."""
    good = answer(output_mode="text")
    good["choices"][0]["finish_reason"] = None
    bad = {**good, "choices": [{"no": "index"}]}
    whole = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in (good, bad)) + DONE
    first, rest = whole[:20], whole[20:]
    framed = scripted.sse(first, rest)
    at, _ = await says([*framed[:-2], framed[-2] + framed[-1]], shape="text")
    got = await at.chat(stream=True)
    assert (got.status, got.whole) == (200, False)
    assert "cannot read a chunk of the worker's stream" in got.chunks[-1]["error"]["message"]


@pytest.mark.parametrize("name", ["sampling_params", "reasoning_parser_kwargs", "parse_context"])
async def test_a_rendered_prompt_of_another_shape_is_a_502_that_names_render(coordinator, fleet, scripted, name):
    render = await scripted(scripted.json({"token_ids": [1, 2], name: [1]}))
    at = await coordinator(fleet, "derender", steps={"render": {"address": render.url}})
    got = await at.chat()
    assert (got.status, got.error["message"].partition(":")[0]) == (502, "render")
    assert name in got.error["message"]


@pytest.mark.parametrize("kind", [5, ["x"], {"a": 1}, ""])
async def test_an_event_whose_type_is_no_text_is_relayed_as_it_is(says, scripted, kind):
    """It is not ours to judge: the client asked this route and gets its words."""
    event = b"data: " + json.dumps({"type": kind, "choices": [{"index": 0, "delta": {"content": "a"}}]}).encode()
    at, _ = await says(scripted.sse(event + b"\n\n", DONE))
    got = await at.chat(stream=True)
    assert (got.status, got.whole, got.raw) == (200, True, event + b"\n\n" + DONE)


@pytest.mark.parametrize("path", PATHS)
async def test_a_list_is_no_answer_of_any_route(says, scripted, path):
    """An answer in the client's own format passes as it is, as long as it is an object."""
    at, _ = await says(scripted.json([{"choices": []}]))
    got = await at.post(path, {"model": "tiny", **PATHS[path]})
    assert (got.status, b"decode: the worker's answer is not a JSON object" in got.raw) == (502, True)


@pytest.mark.parametrize(("stream", "body"), [(True, {"choices": []}), (False, [{"choices": []}])])
async def test_a_probe_that_is_answered_with_the_wrong_thing_is_no_hit(coordinator, fleet, scripted, stream, body):
    """A client that asked for a stream would get a whole answer as its one event."""
    text = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n' + DONE
    message = {"choices": [{"index": 0, "message": {"content": "a"}, "finish_reason": "stop"}]}
    decode = await scripted(scripted.json(body), scripted.sse(text) if stream else scripted.json(message))
    steps = {"conditional-decode": {}, "prefill": None}
    at = await coordinator(fleet, "alone", steps=steps, pools={"decode": {"endpoints": [decode.url]}})
    got = await at.chat(stream=stream)
    assert (got.status, got.whole, got.text, len(decode.received)) == (200, True, "a", 2)
