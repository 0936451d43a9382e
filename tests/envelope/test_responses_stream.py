"""Streamed ``/v1/responses`` answers: vLLM's own events, in its order, however the worker's bytes are cut."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from envelope import responses
from envelope.errors import LegFailed
from envelope.shape import Asked, Shape

RECORDINGS = Path(__file__).parent.parent / "data" / "recordings" / "vllm-0.33.0"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

SAMPLING = {"temperature": 0.0, "max_tokens": 60}
RENDERED = {"model": "tiny", "token_ids": [1] * 16, "sampling_params": SAMPLING}
ASKED = Asked(body={"model": "tiny", "stream": True}, rendered=RENDERED, leg_id="a1", created=1790000000)
LOGPROBS = Asked(
    body={"model": "tiny", "include": ["message.output_text.logprobs"], "top_logprobs": 1},
    rendered={**RENDERED, "sampling_params": {**SAMPLING, "logprobs": 1}},
    leg_id="a1",
    created=1790000000,
)

ERROR = {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}
DONE = b"data: [DONE]\n\n"


def recorded(name: str) -> bytes:
    return (RECORDINGS / f"{name}.sse").read_bytes()


def asked_as(name: str, sampling: dict[str, Any]) -> Asked:
    body = json.loads((RECORDINGS / f"{name}.json").read_text())["request"]["body"]
    return Asked(body, {**RENDERED, "sampling_params": sampling}, "a1", 1790000000)


def blanked(stream: bytes) -> bytes:
    """The stream without what is random on either side, and without the counts that generate does not tell."""
    stream = re.sub(rb'"((?:item_|call_)?id)":"[^"]*"', rb'"\1":"-"', stream)
    return re.sub(rb'"(created_at|cached_tokens|reasoning_tokens)":\d+', rb'"\1":0', stream)


def chunk(text: str, tokens: int = 1, **more: Any) -> bytes:
    choice = {"index": 0, "finish_reason": None, "stop_reason": None, "token_ids": [5] * tokens, "text": text}
    return event({"request_id": "g", "usage": None, "output_mode": "text", "choices": [{**choice, **more}]})


def counted(prompt: int, completion: int) -> bytes:
    usage = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
    return event({"request_id": "g", "usage": usage, "output_mode": "text", "choices": []})


def event(data: Any) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


# What generate sends in text mode for the tokens of responses_text_stream, which needs no parsing: "Hi." and EOS.
TEXT = b"".join([chunk("H"), chunk("i"), chunk("."), chunk("", finish_reason="stop"), counted(16, 4), DONE])


def sent(stream: bytes, asked: Asked = ASKED, shape: Shape | None = None) -> bytes:
    shape = shape or responses.Chunks(asked)
    out = shape.feed(stream)
    shape.close()
    return out


def events(stream: bytes) -> list[dict[str, Any]]:
    """The events of a stream, each checked: its type is its name, its number its place, its fields the SDK's."""
    found = []
    for i, frame in enumerate(stream.removesuffix(b"\n\n").split(b"\n\n") if stream else ()):
        name, data = frame.split(b"\ndata: ", 1)
        body = json.loads(data)
        assert name == b"event: " + body["type"].encode()
        assert body["sequence_number"] == i
        EVENT.validate_python(body, strict=True)
        found.append(body)
    return found


def told(stream: bytes) -> Response:
    """What the official SDK makes of a stream, which it accumulates event by event."""

    def answer(_: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=stream)

    with (
        httpx2.Client(transport=httpx2.MockTransport(answer)) as http,
        openai.OpenAI(api_key="-", base_url="http://test/v1", http_client=http, max_retries=0) as client,
        client.responses.stream(model="tiny", input="Hi") as live,
    ):
        *_, last = live
        assert last.type in ("response.completed", "response.incomplete")
        return last.response


def test_the_recorded_streams_are_what_these_tests_take_them_for():
    for path in sorted((RECORDINGS / "responses").glob("*.sse")):
        events(path.read_bytes())


def test_text_chunks_become_the_recorded_stream_byte_for_byte():
    out = sent(TEXT, asked_as("responses/responses_text_stream", SAMPLING))
    assert blanked(out) == blanked(recorded("responses/responses_text_stream"))


def test_the_recorded_text_stream_becomes_one_message_that_is_incomplete():
    shape = responses.Chunks(ASKED)
    out = sent(recorded("generate/generate_text_stream_usage"), shape=shape)
    response = told(out)
    assert response.output_text == "\n" * 8
    assert (response.status, response.output[0].status) == ("incomplete", "incomplete")
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (28, 8)
    assert events(out)[-1]["type"] == "response.incomplete"
    assert shape.usage == {"prompt_tokens": 28, "total_tokens": 36, "completion_tokens": 8}
    assert shape.content_seen
    assert shape.error is None


@pytest.mark.parametrize(
    "name",
    [
        "generate_text_stream",
        "generate_text_stream_continuous_usage",
        "generate_text_stream_interval4",
        "generate_text_stream_logprobs",
        "generate_text_stream_reasoning",
        "generate_text_stream_return_token_ids",
        "generate_text_stream_stop_string",
        "generate_text_stream_tool_call",
    ],
)
def test_every_recorded_text_stream_is_a_response_to_the_sdk(name: str):
    stream = recorded(f"generate/{name}")
    lines = [line[6:] for line in stream.split(b"\n") if line.startswith(b"data: {")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    out = sent(stream, LOGPROBS)
    response = told(out)
    assert events(out)
    assert response.output_text == "".join(choice["text"] for choice in choices)
    assert response.usage is not None
    assert response.usage.output_tokens == sum(len(choice["token_ids"]) for choice in choices)


def test_logprobs_go_with_their_delta_without_bytes_and_all_together_with_the_part():
    stream = recorded("generate/generate_text_stream_logprobs")
    assert b"logprob" in stream
    found = events(sent(stream, LOGPROBS))
    deltas = [body["logprobs"] for body in found if body["type"] == "response.output_text.delta"]
    part = next(body["part"] for body in found if body["type"] == "response.content_part.done")
    assert [set(position) for shown in deltas for position in shown] == [
        {"token", "logprob", "top_logprobs"} for _ in part["logprobs"]
    ]
    assert part["logprobs"] == found[-1]["response"]["output"][0]["content"][0]["logprobs"]
    assert all(len(position["top_logprobs"]) == 1 and position["bytes"] for position in part["logprobs"])
    unasked = events(sent(stream))
    assert all(body["logprobs"] == [] for body in unasked if body["type"] == "response.output_text.delta")


def test_an_empty_answer_has_no_item():
    out = sent(chunk("", finish_reason="stop") + DONE)
    assert [body["type"] for body in events(out)] == ["response.created", "response.in_progress", "response.completed"]
    assert told(out).output == []


@pytest.mark.parametrize("stream", [TEXT, chunk("héllo\u2028 \U0001f600", finish_reason="length") + DONE])
def test_one_byte_at_a_time_gives_the_same_bytes(stream: bytes):
    shape = responses.Chunks(ASKED)
    assert b"".join(shape.feed(stream[i : i + 1]) for i in range(len(stream))) == sent(stream)
    shape.close()


@settings(max_examples=60)
@given(
    texts=st.lists(st.text(max_size=8), max_size=6),
    cuts=st.lists(st.integers(0, 2000), max_size=8),
    line_end=st.sampled_from([b"\n", b"\r\n", b"\r"]),
)
def test_any_text_cut_anywhere_arrives_whole(texts: list[str], cuts: list[int], line_end: bytes):
    stream = b"".join([*map(chunk, texts), chunk("", finish_reason="stop"), DONE]).replace(b"\n", line_end)
    shape = responses.Chunks(ASKED)
    at = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    out = b"".join(shape.feed(stream[a:b]) for a, b in pairwise(at))
    shape.close()
    assert out == sent(stream)
    found = events(out)
    deltas = [body["delta"] for body in found if body["type"] == "response.output_text.delta"]
    assert "".join(deltas) == "".join(texts)
    output = found[-1]["response"]["output"]
    assert "".join(item["content"][0]["text"] for item in output) == "".join(texts)


def test_an_event_is_sent_as_soon_as_it_is_whole_and_the_first_one_with_the_start():
    shape = responses.Chunks(ASKED)
    assert shape.feed(chunk("a")).count(b"event: ") == 5
    assert shape.feed(chunk("b")).count(b"event: ") == 1


def test_content_is_seen_with_the_first_text_and_not_with_the_start():
    shape = responses.Chunks(ASKED)
    assert shape.feed(chunk("")).startswith(b"event: response.created")
    assert not shape.content_seen
    shape.feed(chunk("a"))
    assert shape.content_seen


def test_without_a_usage_chunk_the_tokens_that_came_are_counted():
    (*_, last) = events(sent(chunk("a", tokens=2) + chunk("", tokens=0, finish_reason="stop") + DONE))
    counts = last["response"]["usage"]
    assert (counts["input_tokens"], counts["output_tokens"]) == (16, 2)


@pytest.mark.parametrize(
    "stream",
    [b"", chunk("a"), chunk("a") + DONE, chunk("a", finish_reason="stop"), chunk("a") + chunk("b")[:40]],
)
def test_a_stream_that_is_cut_short_is_a_failure_and_is_not_completed(stream: bytes):
    shape = responses.Chunks(ASKED)
    out = shape.feed(stream)
    with pytest.raises(LegFailed):
        shape.close()
    assert b"response.completed" not in out


@pytest.mark.parametrize(
    "stream", [b"data: {nonsense\n\n", b"data: [1]\n\n", event({"choices": [1]}), event({"choices": [{"index": 0}]})]
)
def test_an_event_that_cannot_be_understood_is_a_failure(stream: bytes):
    with pytest.raises(LegFailed):
        responses.Chunks(ASKED).feed(stream)


def test_an_event_above_the_cap_is_a_failure():
    with pytest.raises(LegFailed):
        responses.Chunks(ASKED, max_event_bytes=64).feed(chunk("a" * 100))


def test_a_workers_error_ends_the_stream_as_failed_and_the_sdk_raises_on_it():
    """vLLM itself cuts the connection here, which a client cannot tell from a fault of the network."""
    shape = responses.Chunks(ASKED)
    out = shape.feed(chunk("a") + event({"error": ERROR}) + DONE)
    shape.close()
    *_, error, failed = events(out)
    assert (error["type"], error["message"], error["error"]) == ("error", "Internal server error", ERROR)
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": "server_error", "message": "Internal server error"}
    assert failed["response"]["output"][0]["content"][0]["text"] == "a"
    assert shape.error == "Internal server error"
    with pytest.raises(openai.APIError, match="Internal server error"):
        told(out)


def test_an_error_before_anything_else_is_told_alone():
    out = responses.Chunks(ASKED).feed(event({"error": "gone"}))
    assert [body["type"] for body in events(out)] == ["error"]


def test_a_failure_of_ours_is_told_once_and_what_follows_is_dropped():
    shape = responses.Chunks(ASKED)
    begun = shape.feed(chunk("a"))
    failure = LegFailed("decode", "cut")
    out = shape.fail(failure, "r1")
    assert [body["type"] for body in events(begun + out)][-2:] == ["error", "response.failed"]
    assert shape.fail(failure, "r1") == shape.feed(chunk("b")) == b""
    shape.close()


def test_a_failure_without_a_shape_at_hand_is_one_event():
    out = responses.error_event(LegFailed("decode", "cut"), "r1")
    (body,) = events(out)
    assert (body["code"], body["error"]["code"]) == ("BadGatewayError", 502)
    assert body["message"] == "decode: cut (request id r1)"
    with pytest.raises(openai.APIError, match="cut"):
        told(out)


@pytest.mark.parametrize(
    ("name", "generate"),
    [
        ("responses_plain_stream", "generate_derender"),
        ("responses_reasoning_stream", "generate_derender_reasoning"),
    ],
)
def test_a_replayed_answer_is_the_recorded_stream_with_its_deltas_joined(name: str, generate: str):
    worker = json.loads((RECORDINGS / f"generate/{generate}.json").read_text())
    asked = asked_as(f"responses/{name}", worker["request"]["body"]["sampling_params"])
    out = responses.replay(worker["response"]["body"], asked)
    assert blanked(out) == joined(blanked(recorded(f"responses/{name}")))
    assert events(out)


def test_a_replayed_tool_call_is_the_recorded_stream_with_its_deltas_joined():
    asked = asked_as("responses/responses_tool_call_stream", {"temperature": 0.0, "max_tokens": 120})
    function = {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    said = {"content": None, "tool_calls": [{"id": "x", "type": "function", "function": function}]}
    usage = {"prompt_tokens": 142, "total_tokens": 189, "completion_tokens": 47}
    choice = {"index": 0, "finish_reason": "tool_calls", "stop_reason": None, "message": said}
    out = responses.replay({"model": "tiny", "usage": usage, "choices": [choice]}, asked)
    assert blanked(out) == joined(blanked(recorded("responses/responses_tool_call_stream")))
    assert events(out)


def joined(stream: bytes) -> bytes:
    """A recorded stream whose text arrives in one delta per item, numbered anew."""
    bodies: list[dict[str, Any]] = []
    for frame in stream.strip().split(b"\n\n"):
        body = json.loads(frame.split(b"\ndata: ", 1)[1])
        if body["type"].endswith(".delta") and bodies[-1]["type"] == body["type"]:
            bodies[-1]["delta"] += body["delta"]
        else:
            bodies.append(body)
    for i, body in enumerate(bodies):
        body["sequence_number"] = i
    return b"".join(
        b"event: "
        + body["type"].encode()
        + b"\ndata: "
        + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        + b"\n\n"
        for body in bodies
    )


def test_every_recorded_derender_answer_replays_to_the_response_that_it_is_as_a_whole():
    for path in sorted((RECORDINGS / "generate").glob("generate_derender*.json")):
        worker = json.loads(path.read_text())
        asked = Asked({"model": "tiny"}, worker["request"]["body"], "a1", 0)
        whole = responses.whole(worker["response"]["body"], asked)
        out = responses.replay(worker["response"]["body"], asked)
        streamed = events(out)[-1]["response"]
        for item in streamed["output"]:
            if item["type"] == "reasoning":
                item["status"] = None  # null in a whole answer, also in vLLM
        assert streamed == whole
        assert told(out).status == whole["status"]


def test_a_call_without_arguments_replays_without_a_delta():
    said = {"content": None, "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": ""}}]}
    out = responses.replay({"choices": [{"index": 0, "finish_reason": "tool_calls", "message": said}]}, ASKED)
    assert b".delta" not in out
    assert events(out)


def test_a_delta_costs_the_same_however_long_the_answer_is():
    shape = responses.Chunks(ASKED)
    shape.feed(chunk("a") * 1000)
    before = len(shape.feed(chunk("b")))
    shape.feed(chunk("word ") * 5000)
    assert len(shape.feed(chunk("b"))) == before
