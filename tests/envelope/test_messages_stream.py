"""Streamed ``/v1/messages`` answers: vLLM's own events, in its order, however the worker's bytes are cut."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from envelope import messages
from envelope.errors import LegFailed
from envelope.shape import Asked, Shape

RECORDINGS = Path(__file__).parent.parent / "data" / "recordings" / "vllm-0.33.0"

RENDERED = {"model": "tiny", "token_ids": [1] * 16}
ASKED = Asked(body={"model": "tiny", "stream": True}, rendered=RENDERED, leg_id="a1", created=1790000000)

ERROR = {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}


def recorded(name: str) -> bytes:
    return (RECORDINGS / f"{name}.sse").read_bytes()


def blanked(stream: bytes) -> bytes:
    """The stream without what is random on either side: the message's and the calls' ids, the signature."""
    return re.sub(rb'"(id|signature)":"[^"]*"', rb'"\1":"-"', stream)


def chunk(text: str, tokens: int = 1, **more: Any) -> bytes:
    choice = {"index": 0, "finish_reason": None, "stop_reason": None, "token_ids": [5] * tokens, "text": text}
    usage = more.pop("usage", None)
    return event({"request_id": "g", "usage": usage, "output_mode": "text", "choices": [{**choice, **more}]})


def counted(prompt: int, completion: int, **more: Any) -> bytes:
    usage = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        **more,
    }
    return event({"request_id": "g", "usage": usage, "output_mode": "text", "choices": []})


def event(data: Any) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"

# What generate sends in text mode for the tokens of the recorded streams that need no parsing.
TEXT = b"".join([*[chunk("\n")] * 5, chunk("\n", finish_reason="length"), counted(16, 6), DONE])
STOPPED = b"".join([chunk(""), chunk(""), chunk("", finish_reason="stop", stop_reason="\n\n\n"), counted(16, 3), DONE])


def sent(stream: bytes, shape: Shape | None = None) -> bytes:
    shape = shape or messages.Chunks(ASKED)
    out = shape.feed(stream)
    shape.close()
    return out


def told(stream: bytes) -> anthropic.types.Message:
    """What the official SDK makes of a stream."""

    def answer(_: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=stream)

    with (
        httpx2.Client(transport=httpx2.MockTransport(answer)) as http,
        anthropic.Anthropic(api_key="-", base_url="http://test", http_client=http, max_retries=0) as client,
        client.messages.stream(model="tiny", max_tokens=9, messages=[{"role": "user", "content": "Hi"}]) as live,
    ):
        return live.get_final_message()


@pytest.mark.parametrize(
    ("name", "generate"), [("messages_text_stream", TEXT), ("messages_stop_sequence_stream", STOPPED)]
)
def test_text_chunks_become_the_recorded_stream_byte_for_byte(name: str, generate: bytes):
    assert blanked(sent(generate)) == blanked(recorded(f"messages/{name}"))


def test_the_recorded_text_stream_becomes_one_text_block():
    shape = messages.Chunks(ASKED)
    message = told(sent(recorded("generate/generate_text_stream_usage"), shape))
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "\n" * 8}]
    assert (message.stop_reason, message.usage.input_tokens, message.usage.output_tokens) == (
        "max_tokens",
        28,
        8,
    )
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
def test_every_recorded_text_stream_is_a_message_to_the_sdk(name: str):
    stream = recorded(f"generate/{name}")
    texts = [c["text"] for c in choices_in(stream)]
    tokens = sum(len(c["token_ids"]) for c in choices_in(stream))
    message = told(sent(stream))
    assert "".join(block.text for block in message.content if block.type == "text") == "".join(texts)
    assert message.usage.output_tokens == tokens


def choices_in(stream: bytes) -> list[dict[str, Any]]:
    lines = [line[6:] for line in stream.split(b"\n") if line.startswith(b"data: {")]
    return [choice for line in lines for choice in json.loads(line)["choices"]]


@pytest.mark.parametrize("stream", [TEXT, STOPPED, chunk("héllo\u2028 \U0001f600", finish_reason="stop") + DONE])
def test_one_byte_at_a_time_gives_the_same_bytes(stream: bytes):
    shape = messages.Chunks(ASKED)
    assert b"".join(shape.feed(stream[i : i + 1]) for i in range(len(stream))) == sent(stream)
    shape.close()


@settings(max_examples=60)
@given(
    texts=st.lists(st.text(max_size=8), max_size=6),
    cuts=st.lists(st.integers(0, 2000), max_size=8),
    line_end=st.sampled_from([b"\n", b"\r\n", b"\r"]),
)
@example(texts=["a"], cuts=[-2], line_end=b"\r\n")  # inside the last line end
def test_any_text_cut_anywhere_arrives_whole(texts: list[str], cuts: list[int], line_end: bytes):
    stream = b"".join([*map(chunk, texts), chunk("", finish_reason="stop"), DONE]).replace(b"\n", line_end)
    shape = messages.Chunks(ASKED)
    at = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    out = b"".join(shape.feed(stream[a:b]) for a, b in pairwise(at))
    shape.close()
    assert out == sent(stream)
    deltas = [json.loads(line[6:]) for line in out.split(b"\n") if line.startswith(b'data: {"type":"content_block_d')]
    assert "".join(delta["delta"]["text"] for delta in deltas) == "".join(texts)


def test_an_event_is_sent_as_soon_as_it_is_whole_and_the_first_one_with_the_start():
    shape = messages.Chunks(ASKED)
    first = shape.feed(chunk("a"))
    assert [line for line in first.split(b"\n") if line.startswith(b"event")] == [
        b"event: message_start",
        b"event: content_block_start",
        b"event: content_block_delta",
    ]
    assert shape.feed(chunk("b")).count(b"event: ") == 1


def test_content_is_seen_with_the_first_text_and_not_with_the_start():
    shape = messages.Chunks(ASKED)
    assert shape.feed(chunk("")).startswith(b"event: message_start")
    assert not shape.content_seen
    shape.feed(chunk("a"))
    assert shape.content_seen


def test_message_start_counts_the_prompt_as_the_worker_does_else_as_it_was_rendered():
    usage = {"prompt_tokens": 7, "total_tokens": 8, "completion_tokens": 1}
    assert b'"usage":{"input_tokens":7,"output_tokens":0}' in messages.Chunks(ASKED).feed(chunk("a", usage=usage))
    assert b'"usage":{"input_tokens":16,"output_tokens":0}' in messages.Chunks(ASKED).feed(chunk("a"))


def test_without_a_usage_chunk_the_tokens_that_came_are_counted():
    out = sent(chunk("a", tokens=2) + chunk("", tokens=0, finish_reason="stop") + DONE)
    assert b'"usage":{"input_tokens":16,"output_tokens":2}}' in out


def test_what_came_from_the_cache_is_told_at_the_end():
    stream = chunk("a", finish_reason="stop") + counted(16, 1, prompt_tokens_details={"cached_tokens": 9}) + DONE
    assert b'"usage":{"input_tokens":7,"output_tokens":1,"cache_read_input_tokens":9}}' in sent(stream)


def test_comments_keep_the_clients_connection_alive_too():
    stream = chunk("a", finish_reason="stop") + DONE
    assert sent(b": keep-alive\n\n" + stream) == b": keep-alive\n\n" + sent(stream)


def test_what_follows_the_end_mark_and_what_holds_no_data_is_dropped():
    stream = chunk("a", finish_reason="stop") + DONE
    assert sent(b"data:\n\n" + stream + chunk("b") + DONE) == sent(stream)


def test_json_that_is_not_quite_json_is_understood():
    scores = {"content": [{"token": "a", "logprob": float("nan")}]}
    assert sent(chunk("a", finish_reason="stop", logprobs=scores) + DONE)


@pytest.mark.parametrize(
    "stream",
    [b"", chunk("a"), chunk("a") + DONE, chunk("a", finish_reason="stop"), chunk("a") + chunk("b")[:40]],
)
def test_a_stream_that_is_cut_short_is_a_failure_and_gets_no_message_stop(stream: bytes):
    shape = messages.Chunks(ASKED)
    out = shape.feed(stream)
    with pytest.raises(LegFailed):
        shape.close()
    assert b"message_stop" not in out


@pytest.mark.parametrize(
    "stream", [b"data: {nonsense\n\n", b"data: [1]\n\n", event({"choices": [1]}), event({"choices": [{"index": 0}]})]
)
def test_an_event_that_cannot_be_understood_is_a_failure(stream: bytes):
    with pytest.raises(LegFailed):
        messages.Chunks(ASKED).feed(stream)


def test_an_event_above_the_cap_is_a_failure():
    with pytest.raises(LegFailed):
        messages.Chunks(ASKED, max_event_bytes=64).feed(chunk("a" * 100))


def test_a_workers_error_closes_the_block_and_is_told_as_vllm_tells_it():
    shape = messages.Chunks(ASKED)
    out = shape.feed(chunk("a") + event({"error": ERROR}) + DONE)
    shape.close()
    native = recorded("kv_load_failure/messages_stream")
    assert out.endswith(b'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n' + last(native))
    assert shape.error == "Internal server error"
    with pytest.raises(anthropic.APIStatusError, match="Internal server error"):
        told(out)


def last(stream: bytes) -> bytes:
    return stream.rstrip(b"\n").rsplit(b"\n\n", 1)[-1] + b"\n\n"


def test_a_failure_of_ours_closes_the_block_and_is_told_once():
    shape = messages.Chunks(ASKED)
    shape.feed(chunk("a"))
    failure = LegFailed("decode", "cut")
    out = shape.fail(failure, "r1")
    assert out.startswith(b"event: content_block_stop\n")
    assert out.endswith(messages.error_event(failure, "r1"))
    assert shape.fail(failure, "r1") == shape.feed(chunk("b")) == b""
    shape.close()


@pytest.mark.parametrize(
    ("name", "generate"),
    [
        ("messages_plain_stream", "generate_derender"),
    ],
)
def test_a_replayed_answer_is_the_recorded_stream_with_its_deltas_joined(name: str, generate: str):
    answer = json.loads((RECORDINGS / f"generate/{generate}.json").read_text())["response"]["body"]
    assert blanked(messages.replay(answer, ASKED)) == joined(blanked(recorded(f"messages/{name}")))


def joined(stream: bytes) -> bytes:
    """A recorded stream whose text arrives in one delta per block."""
    out: list[bytes] = []
    for frame in stream.strip().split(b"\n\n"):
        name, data = frame.split(b"\ndata: ", 1)
        body = json.loads(data)
        (field,) = set(body.get("delta") or {}) & {"text", "thinking", "partial_json"} or {None}
        if field and out and (before := json.loads(out[-1].split(b"\ndata: ", 1)[1])).get("delta", {}).get(field):
            body["delta"][field] = before["delta"][field] + body["delta"][field]
            out.pop()
        dumped = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        out.append(name + b"\ndata: " + dumped + b"\n\n")
    return b"".join(out)


def test_a_replayed_tool_call_is_the_recorded_stream_with_its_deltas_joined():
    native = joined(blanked(recorded("messages/messages_tool_call_stream")))
    arguments = next(
        body["delta"]["partial_json"]
        for body in (json.loads(frame.split(b"\ndata: ", 1)[1]) for frame in native.strip().split(b"\n\n"))
        if body.get("delta", {}).get("partial_json")
    )
    function = {"name": "get_weather", "arguments": arguments}
    said = {"content": "", "tool_calls": [{"id": "x", "type": "function", "function": function}]}
    assert blanked(messages.replay(answer(said, "stop", 177, 119), ASKED)) == native


def answer(message: dict[str, Any], finish: str, prompt: int, completion: int) -> dict[str, Any]:
    usage = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
    choice = {"index": 0, "finish_reason": finish, "stop_reason": None, "message": message}
    return {"model": "tiny", "usage": usage, "output_mode": "derender", "choices": [choice]}


def test_every_recorded_derender_answer_replays_to_the_message_that_it_is_as_a_whole():
    for path in sorted((RECORDINGS / "generate").glob("generate_derender*.json")):
        reply = json.loads(path.read_text())["response"]["body"]
        whole = messages.whole(reply, ASKED)
        heard = told(messages.replay(reply, ASKED)).to_dict()
        if whole["content"] == [{"type": "text", "text": ""}]:
            whole["content"] = []  # an empty answer streams no block, also in vLLM
        assert {key: heard[key] for key in whole} == whole


def test_an_unfinished_call_replays_as_text():
    said = {"content": None, "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": '{"a": "E'}}]}
    message = told(messages.replay(answer(said, "length", 9, 3), ASKED))
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": '{"a": "E'}]


def test_a_call_without_arguments_replays_without_a_delta():
    said = {"content": None, "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": ""}}]}
    stream = messages.replay(answer(said, "tool_calls", 9, 3), ASKED)
    assert b"content_block_delta" not in stream
    assert [block.to_dict()["input"] for block in told(stream).content] == [{}]


def test_a_delta_costs_the_same_however_long_the_answer_is():
    shape = messages.Chunks(ASKED)
    shape.feed(chunk("a"))
    size = len(shape.feed(chunk("b")))
    for _ in range(500):
        shape.feed(chunk("word "))
    assert len(shape.feed(chunk("b"))) == size
    assert not any(isinstance(value, (list, str, bytes)) and len(value) > 99 for value in vars(shape).values())
