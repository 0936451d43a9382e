"""An answer passes through or is rebuilt, and a client that asked for a stream gets one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coordinator.context import Answer, RequestContext
from coordinator.shapes import (
    ENVELOPES,
    EVENT_STREAM,
    JSON,
    PARSED,
    asked,
    error_body,
    error_event,
    stream_shape,
    whole_answer,
)
from envelope import chat, completions, messages, responses
from envelope.errors import BadRequest, LegFailed
from envelope.formats import Format
from envelope.json_codec import dumps
from envelope.passthrough import PassThrough
from envelope.shape import Asked
from envelope.sse import data_of, event_name, split

CHAT, COMPLETIONS, RESPONSES, MESSAGES, GENERATE = Format

CREATED = 1790000000

REPLY = {
    "request_id": "generate-tokens-req-1", "model": "m", "created": 7, "output_mode": "text",
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
    "choices": [{"index": 0, "finish_reason": "stop", "stop_reason": None, "token_ids": [5], "text": "hello",
                 "logprobs": None}],
}  # fmt: skip

HANDOVER = {"remote_host": "10.9.9.9"}

BODIES: dict[Format, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"model": "m", "prompt": "hi"},
    RESPONSES: {"model": "m", "input": "hi"},
    MESSAGES: {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
}


def context(api: Format = CHAT, *, stream: bool = False) -> RequestContext:
    body = {**BODIES.get(api, {}), "stream": stream}
    return RequestContext("req", "req-1", api, body, (), {}, stream, rendered={"token_ids": [1, 2, 3]})


def answer(body: Any, fmt: Format = CHAT, **options: Any) -> Answer:
    return Answer(dumps(body), fmt, body=body, **options)


def test_every_api_that_can_be_rebuilt_has_its_envelope() -> None:
    assert {CHAT: chat, COMPLETIONS: completions, RESPONSES: responses, MESSAGES: messages} == ENVELOPES


def test_a_rebuilt_answer_depends_on_the_request_and_the_clock_alone() -> None:
    ctx = context()
    assert asked(ctx, CREATED) == Asked(ctx.body, {"token_ids": [1, 2, 3]}, "req-1", CREATED)


# --- whole answers -------------------------------------------------------------------------------------------------


def test_an_answer_passes_through_byte_for_byte() -> None:
    raw = b'{"choices": [], "kv_transfer_params": null, "n": 9007199254740993}'
    passed = whole_answer(context(), Answer(raw, CHAT, body=json.loads(raw)), CREATED)
    assert passed == (raw, JSON)


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
def test_a_hand_over_in_it_is_taken_out_unless_the_file_exposes_it(name: str) -> None:
    """It names hosts and ports."""
    body = {"choices": [], name: HANDOVER, "n": 2**53 + 1}
    hidden, _ = whole_answer(context(), answer(body), CREATED)
    assert json.loads(hidden) == {"choices": [], name: None, "n": 2**53 + 1}
    exposed, _ = whole_answer(context(), answer(body, expose_transfer_params=True), CREATED)
    assert exposed == dumps(body)


def test_a_body_that_is_no_object_passes_through() -> None:
    assert whole_answer(context(), answer([REPLY]), CREATED) == (dumps([REPLY]), JSON)


@pytest.mark.parametrize("api", BODIES)
def test_a_wrapped_answer_is_the_client_s_own_envelope(api: Format) -> None:
    body, kind = whole_answer(context(api), answer(REPLY, GENERATE, wrap=True), CREATED)
    envelope = ENVELOPES[api]
    assert (json.loads(body), kind) == (envelope.whole(REPLY, asked(context(api), CREATED)), JSON)


@pytest.mark.parametrize("api", BODIES)
def test_a_wrapped_answer_for_a_streaming_client_is_its_api_s_event_stream(api: Format) -> None:
    ctx = context(api, stream=True)
    body, kind = whole_answer(ctx, answer(REPLY, GENERATE, wrap=True), CREATED)
    assert (body, kind) == (ENVELOPES[api].replay(REPLY, asked(ctx, CREATED)), EVENT_STREAM)
    assert split(body)[-1].endswith(b"\n\n")


def test_an_unwrapped_answer_for_a_streaming_client_is_one_event_and_the_end() -> None:
    body, kind = whole_answer(
        context(stream=True), answer({**REPLY, "kv_transfer_params": HANDOVER}, GENERATE), CREATED
    )
    first, last = split(body)
    assert (json.loads(data_of(first) or b""), data_of(last)) == ({**REPLY, "kv_transfer_params": None}, b"[DONE]")
    assert kind == EVENT_STREAM


def test_an_answer_that_cannot_be_rebuilt_is_the_worker_s_failure() -> None:
    with pytest.raises(LegFailed):
        whole_answer(context(), answer({"choices": []}, GENERATE, wrap=True), CREATED)


# --- streams -------------------------------------------------------------------------------------------------------


class Live:
    """A stream that has begun; only its being no bytes matters here."""

    headers = ()
    first_event = b""

    async def read(self) -> bytes:
        return b""

    async def aclose(self) -> None: ...


@pytest.mark.parametrize("api", BODIES)
def test_a_wrapped_stream_has_its_api_s_shape(api: Format) -> None:
    shape = stream_shape(context(api, stream=True), Answer(Live(), GENERATE, wrap=True), CREATED)
    assert type(shape) is ENVELOPES[api].Chunks


@pytest.mark.parametrize(("exposed", "shown"), [(False, None), (True, HANDOVER)])
def test_any_other_stream_passes_through_without_its_hand_over(exposed: bool, shown: Any) -> None:
    shape = stream_shape(context(stream=True), Answer(Live(), CHAT, expose_transfer_params=exposed), CREATED)
    assert isinstance(shape, PassThrough)
    event = b"data: " + dumps({"choices": [{"index": 0, "delta": {"content": "x"}}], "kv_transfer_params": HANDOVER})
    assert json.loads(data_of(shape.feed(event + b"\n\n")) or b"")["kv_transfer_params"] == shown


SPEAKING = [(api, envelope.Chunks, "text", "a") for api, envelope in ENVELOPES.items()]
SPEAKING += [
    (api, shape, "delta", delta) for api, shape in PARSED.items() for delta in ({"reasoning": "a"}, {"content": "a"})
]


@pytest.mark.parametrize(("api", "shape", "member", "said"), SPEAKING)
def test_every_frame_with_content_is_told_of(api: Format, shape: Any, member: str, said: Any) -> None:
    """Not the first alone: the gaps between them are measured."""
    stream = shape(asked(context(api, stream=True), CREATED))
    choice = {"index": 0, "finish_reason": None, "token_ids": [5], member: said}
    told = []
    for _ in range(4):
        assert stream.feed(b"data: " + dumps({"request_id": "r", "choices": [choice]}) + b"\n\n")
        told.append(stream.content_seen)
        stream.content_seen = False
    assert told == [True] * 4


# --- failures ------------------------------------------------------------------------------------------------------

NO = BadRequest("no", param="n")


@pytest.mark.parametrize("api", [None, CHAT, COMPLETIONS, RESPONSES, GENERATE])
def test_an_error_is_openai_s_object_on_every_route_but_one(api: Format | None) -> None:
    error = {"message": "no (request id r1)", "type": "BadRequestError", "param": "n", "code": 400}
    assert json.loads(error_body(api, NO, "r1")) == {"error": error}


def test_on_messages_it_is_anthropic_s() -> None:
    error = {"type": "invalid_request_error", "message": "no (request id r1)"}
    body = json.loads(error_body(MESSAGES, NO, "r1"))
    assert (body["type"], body["error"]) == ("error", error)


@pytest.mark.parametrize("api", [CHAT, COMPLETIONS, GENERATE])
def test_in_a_stream_the_error_is_one_event(api: Format) -> None:
    event = error_event(api, None, NO, "r1")
    assert (data_of(event), event_name(event)) == (error_body(api, NO, "r1"), None)


@pytest.mark.parametrize("api", [RESPONSES, MESSAGES])
def test_in_a_stream_of_named_events_the_error_has_a_name_too(api: Format) -> None:
    assert event_name(error_event(api, None, NO, "r1")) == "error"


def test_a_shape_that_knows_how_far_its_events_have_come_tells_of_the_failure_itself() -> None:
    class Knows(PassThrough):
        def fail(self, error: Any, request_id: str) -> bytes:
            return f"{error.message} {request_id}".encode()

    assert error_event(CHAT, Knows(CHAT), NO, "r1") == b"no r1"
    assert error_event(CHAT, PassThrough(CHAT), NO, "r1") == error_event(CHAT, None, NO, "r1")
