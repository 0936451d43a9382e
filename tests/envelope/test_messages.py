"""Whole ``/v1/messages`` answers equal vLLM's own, field for field; see ``UNAVAILABLE`` for what cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import ErrorResponse as AnthropicError
from anthropic.types import Message, MessageTokensCount

from envelope import messages
from envelope.errors import (
    BadRequest,
    Forbidden,
    LegFailed,
    LegRejected,
    LegTimeout,
    NoWorker,
    TooLarge,
    UnknownPath,
)
from envelope.shape import Asked

RECORDINGS = Path(__file__).parent.parent / "data" / "recordings" / "vllm-0.33.0"

# Fields of vLLM's answer that generate's does not tell, and why.
UNAVAILABLE = {
    "id": "made of the leg's own id",
    "signature": "random in vLLM; here a hash of the leg's id",
}


def recorded(name: str) -> dict[str, Any]:
    return json.loads((RECORDINGS / f"{name}.json").read_text())


def asked(body: dict[str, Any], rendered: dict[str, Any] | None = None) -> Asked:
    return Asked(body=body, rendered=rendered, leg_id="a1", created=1790000000)


def comparable(message: dict[str, Any]) -> str:
    """The message as text, so that the order of keys counts, with what is unavailable blanked."""
    message = json.loads(json.dumps(message))
    message["id"] = "-"
    for block in message["content"]:
        if "signature" in block:
            block["signature"] = "-"
    return json.dumps(message)


def reply_for(message: dict[str, Any]) -> dict[str, Any]:
    """The derender answer behind a recorded message: the engine's side of the same tokens."""
    texts = {block["type"]: block for block in message["content"]}
    finish = {"max_tokens": "length", "tool_use": "tool_calls"}.get(message["stop_reason"], "stop")
    calls = [
        {
            "id": b["id"],
            "type": "function",
            "function": {"name": b["name"], "arguments": json.dumps(b["input"])},
        }
        for b in message["content"]
        if b["type"] == "tool_use"
    ]
    content = texts.get("text", {}).get("text") or None
    said: dict[str, Any] = {
        "role": "assistant",
        "content": content,
        "reasoning": texts.get("thinking", {}).get("thinking"),
    }
    if calls:
        said["tool_calls"] = calls
    return reply(
        said,
        finish_reason=finish,
        stop_reason=message.get("stop_sequence"),
        prompt=message["usage"]["input_tokens"],
        completion=message["usage"]["output_tokens"],
    )


def reply(
    message: dict[str, Any] | str,
    *,
    finish_reason: str = "stop",
    stop_reason: str | int | None = None,
    prompt: int = 9,
    completion: int = 3,
    details: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A generate answer: in derender mode for a message, in text mode for a string."""
    text = isinstance(message, str)
    return {
        "request_id": "generate-tokens-a1",
        "model": "tiny",
        "created": 1790000000,
        "usage": {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": details,
            "completion_tokens_details": None,
        },
        "kv_transfer_params": None,
        "output_mode": "text" if text else "derender",
        "choices": [
            {
                "index": 0,
                "finish_reason": finish_reason,
                "stop_reason": stop_reason,
                "token_ids": [5] * completion,
                "weight_versions": [{"version": "default", "start": 0, "end": completion}],
                "text" if text else "message": message,
                "logprobs": None,
            }
        ],
    }


def call(arguments: str, name: str = "get_weather") -> dict[str, Any]:
    return {"id": "chatcmpl-tool-1", "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*arguments: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [call(text) for text in arguments], **more}


def test_the_recorded_answer_is_rebuilt_from_the_recorded_derender_answer_of_the_same_prompt():
    """The one pair of recordings with equal tokens: messages_plain and generate_derender."""
    native = recorded("messages/messages_plain")
    generate = recorded("generate/generate_derender")
    rebuilt = messages.whole(
        generate["response"]["body"], asked(native["request"]["body"], generate["request"]["body"])
    )
    assert comparable(rebuilt) == comparable(native["response"]["body"])
    Message.model_validate(rebuilt)


@pytest.mark.parametrize("name", ["messages_plain", "messages_text", "messages_stop_sequence", "messages_tool_call"])
def test_every_recorded_answer_is_rebuilt_from_what_its_engine_said(name: str):
    native = recorded(f"messages/{name}")
    rebuilt = messages.whole(reply_for(native["response"]["body"]), asked(native["request"]["body"]))
    assert comparable(rebuilt) == comparable(native["response"]["body"])
    assert Message.model_validate(rebuilt).to_dict() == rebuilt


def test_every_recorded_derender_answer_is_a_message_to_the_sdk():
    for path in sorted((RECORDINGS / "generate").glob("generate_derender*.json")):
        answer = json.loads(path.read_text())["response"]["body"]
        Message.model_validate(messages.whole(answer, asked({"model": "tiny"})), strict=True)


def test_text_mode_is_one_text_block_markup_included():
    rebuilt = messages.whole(reply("so</think>\nHi"), asked({"model": "tiny"}))
    assert rebuilt["content"] == [{"type": "text", "text": "so</think>\nHi"}]


def test_thinking_text_and_calls_come_in_this_order():
    said = calling('{"city": "Rome"}', content="Sure.", reasoning="Hm.")
    kinds = [block["type"] for block in messages.whole(reply(said), asked({}))["content"]]
    assert kinds == ["thinking", "text", "tool_use"]


@pytest.mark.parametrize(
    ("finish", "stop", "said", "expected"),
    [
        ("stop", None, {"content": "Hi"}, ("end_turn", None)),
        ("stop", 151645, {"content": "Hi"}, ("end_turn", None)),
        ("stop", "END", {"content": "Hi"}, ("stop_sequence", "END")),
        ("length", None, {"content": "Hi"}, ("max_tokens", None)),
        ("length", None, calling('{"a": 1}'), ("max_tokens", None)),
        ("tool_calls", None, calling('{"a": 1}'), ("tool_use", None)),
        ("stop", None, calling('{"a": 1}'), ("tool_use", None)),  # a named tool: chat says stop
        ("tool_calls", "END", calling('{"a": 1}'), ("tool_use", None)),
        ("tool_calls", "END", calling('{"a": 1}', '{"a": "E'), ("stop_sequence", "END")),
        ("stop", None, calling('{"a": "E'), ("end_turn", None)),
        ("abort", None, {"content": "Hi"}, (None, None)),
        ("repetition", "repetition_detected", {"content": "Hi"}, (None, None)),
    ],
)
def test_stop_reason(finish: str, stop: Any, said: dict[str, Any], expected: tuple[str | None, str | None]):
    rebuilt = messages.whole(reply(said, finish_reason=finish, stop_reason=stop), asked({}))
    assert (rebuilt.get("stop_reason"), rebuilt.get("stop_sequence")) == expected
    assert None not in rebuilt.values()


@pytest.mark.parametrize("arguments", ['{"city": "Ro', "[1]", "nope"])
def test_a_call_whose_arguments_are_no_object_is_shown_as_text_and_never_as_a_call_with_made_up_input(
    arguments: str,
):
    rebuilt = messages.whole(reply(calling(arguments), finish_reason="length"), asked({}))
    assert rebuilt["content"] == [{"type": "text", "text": arguments}]


def test_a_call_without_arguments_has_an_empty_input():
    assert messages.whole(reply(calling("")), asked({}))["content"][0]["input"] == {}


def test_numbers_in_arguments_keep_every_digit():
    block = messages.whole(reply(calling('{"id": 123456789012345678901234567890, "x": 1.0}')), asked({}))["content"][0]
    assert block["input"] == {"id": 123456789012345678901234567890, "x": 1.0}


def test_a_call_without_an_id_gets_one_made_of_the_leg():
    said = {"content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}] * 2}
    ids = [block["id"] for block in messages.whole(reply(said), asked({}))["content"]]
    assert ids == ["chatcmpl-tool-a1-0", "chatcmpl-tool-a1-1"]


def test_tokens_from_the_cache_are_told_apart_from_input_tokens():
    details = {"cached_tokens": 4, "created_cache_tokens": 3, "multimodal_tokens": None}
    counted = messages.whole(reply("Hi", prompt=9, details=details), asked({}))["usage"]
    assert counted == {
        "input_tokens": 2,
        "output_tokens": 3,
        "cache_creation_input_tokens": 3,
        "cache_read_input_tokens": 4,
    }


def test_the_answer_is_the_same_each_time_and_its_arguments_stay_as_they_were():
    given, said = asked({"model": "tiny"}), reply(calling('{"a": 1}', reasoning="Hm."))
    before = json.dumps([given.body, said])
    assert messages.whole(said, given) == messages.whole(said, given)
    assert json.dumps([given.body, said]) == before


@pytest.mark.parametrize("broken", [{}, {"choices": []}, {"choices": [{"index": 0, "token_ids": [1]}]}])
def test_an_answer_with_nothing_in_it_is_the_workers_fault(broken: dict[str, Any]):
    with pytest.raises(LegFailed):
        messages.whole(broken, asked({}))


def test_count_tokens_equals_the_recorded_answer_for_the_rendered_prompt():
    native = recorded("messages/messages_count_tokens")
    # the same prompt, one user message without a system text, as another recording rendered it
    rendered = recorded("generate/generate_derender_reasoning")["request"]["body"]
    counted = messages.count_tokens(rendered)
    assert json.dumps(counted) == json.dumps(native["response"]["body"])
    MessageTokensCount.model_validate(counted)


def test_a_count_is_rendered_with_the_max_tokens_that_render_wants_and_the_prompt_unchanged():
    body = {"model": "tiny", "messages": [], "thinking": {"type": "enabled", "budget_tokens": 4096}}
    assert messages.count_request(body) == {"model": "tiny", "messages": [], "max_tokens": 1}
    assert body["thinking"]
    off = {"model": "tiny", "messages": [], "thinking": {"type": "disabled"}}
    assert messages.count_request(off) == {**off, "max_tokens": 1}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BadRequest("no"), "invalid_request_error"),
        (Forbidden("no"), "permission_error"),
        (UnknownPath("no"), "not_found_error"),
        (TooLarge("no"), "request_too_large"),
        (NoWorker("decode", "no"), "overloaded_error"),
        (LegTimeout("decode", "no"), "timeout_error"),
        (LegFailed("decode", "no"), "api_error"),
        (LegRejected("render", 422, {"message": "no"}), "invalid_request_error"),
    ],
)
def test_errors_have_anthropics_shape_and_the_type_of_their_status(error: Any, kind: str):
    body = json.loads(messages.error_body(error, "r1"))
    assert body["error"]["type"] == kind
    if kind != "request_too_large":  # in Anthropic's list of errors, and not in its SDK's types
        AnthropicError.model_validate({**body, "request_id": None})
    assert json.loads(messages.error_event(error, "r1").removeprefix(b"event: error\ndata: ")) == body


def test_the_workers_own_refusal_is_told_in_its_words_as_vllm_tells_it():
    native = recorded("errors/messages_error_unknown_model")["response"]
    rejected = LegRejected(
        "render", native["status"], {"message": native["body"]["error"]["message"], "type": "NotFoundError"}
    )
    assert json.loads(messages.error_body(rejected, "r1")) == native["body"]
