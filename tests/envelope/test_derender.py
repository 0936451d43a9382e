"""Bodies of the derender routes, and their answers, held against recorded exchanges of the real service."""

from __future__ import annotations

from typing import Any

import pytest

from envelope import chat, completions
from envelope.derender import chunk_body, derender_path, derendered, derendered_chunk, request_of, text_body, whole_body
from envelope.errors import LegFailed
from envelope.formats import Format
from envelope.shape import Asked

CHAT, COMPLETIONS, RESPONSES, MESSAGES = Format.CHAT, Format.COMPLETIONS, Format.RESPONSES, Format.MESSAGES

TOOLS = [{"type": "function", "function": {"name": "f"}}]
SAMPLING = {"stop": ["x"], "min_tokens": 2, "temperature": 0.5, "max_tokens": 9, "skip_special_tokens": False}
DECODING = {"stop": ["x"], "min_tokens": 2, "skip_special_tokens": False}
CONTEXT = {"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": True, "include_reasoning": True,
           "chat_template_kwargs": {"enable_thinking": True}, "history_tool_call_cnt": 2}  # fmt: skip
RENDERED = {"token_ids": [1, 2, 3], "sampling_params": SAMPLING, "parse_context": CONTEXT}


def test_each_api_goes_to_the_route_that_makes_its_kind_of_answer() -> None:
    assert {api: derender_path(api) for api in (CHAT, COMPLETIONS, RESPONSES, MESSAGES)} == {
        CHAT: "/v1/chat/completions/derender",
        COMPLETIONS: "/v1/completions/derender",
        RESPONSES: "/v1/chat/completions/derender",
        MESSAGES: "/v1/chat/completions/derender",
    }


def test_the_request_tells_what_the_service_reads_and_neither_messages_nor_media(pure: Any) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}],
            "tools": TOOLS, "logprobs": True, "top_logprobs": 2, "stream": True, "max_tokens": 9}  # fmt: skip
    request = pure(request_of, CHAT, RENDERED, body)
    (history,) = request.pop("messages")
    assert len(history["tool_calls"]) == 2, "as many calls as the conversation holds: some parsers number on from there"
    assert request == {
        **DECODING, "tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": True, "include_reasoning": True,
        "chat_template_kwargs": {"enable_thinking": True}, "logprobs": True, "top_logprobs": 2,
        "return_token_ids": True,
    }  # fmt: skip


def test_without_tools_there_is_no_choice_of_them(pure: Any) -> None:
    context = {**CONTEXT, "tools": None, "tool_choice": "none", "history_tool_call_cnt": 0}
    request = pure(request_of, MESSAGES, {**RENDERED, "parse_context": context}, {"messages": []})
    assert request == {"messages": [], **DECODING, "parallel_tool_calls": True, "include_reasoning": True,
                       "chat_template_kwargs": {"enable_thinking": True}, "return_token_ids": True}  # fmt: skip


def test_a_responses_client_s_context_is_made_of_its_body(pure: Any) -> None:
    body = {"input": "hi", "tools": [{"type": "function", "name": "f"}], "top_logprobs": 2}
    request = pure(request_of, RESPONSES, {"token_ids": [1], "sampling_params": {}}, body)
    assert request["tools"] == TOOLS
    assert "top_logprobs" not in request, "its logprobs are cut by its own rule"


def test_a_completion_is_asked_for_without_its_prompt(pure: Any) -> None:
    rendered = {"token_ids": [1], "sampling_params": SAMPLING}
    request = pure(request_of, COMPLETIONS, rendered, {"prompt": "long", "logprobs": 2, "echo": False})
    assert request == {"prompt": "prompt", **DECODING, "logprobs": 2}


@pytest.mark.parametrize("api", [CHAT, COMPLETIONS])
def test_a_whole_body_holds_the_choices_that_have_tokens(pure: Any, api: Format) -> None:
    """Of stop tokens the service knows which one is named: to a worker without a tokenizer the end is one."""
    reply = {"request_id": "g", "model": "tiny", "usage": {}, "kv_transfer_params": {"x": 1}, "choices": [
        {"index": 1, "token_ids": [5], "finish_reason": "stop", "stop_reason": 5, "logprobs": None, "routed": 1},
        {"index": 0, "token_ids": [], "finish_reason": "abort", "stop_reason": None, "logprobs": None},
    ]}  # fmt: skip
    generated = {"request_id": "g", "output_mode": "tokens",
                 "choices": [{"index": 1, "token_ids": [5], "finish_reason": "stop"}]}  # fmt: skip
    body = pure(whole_body, api, reply, RENDERED, {"r": 1})
    of_chat = {"generate_response": generated, "prompt_tokens": 3, "prompt_token_ids": [1, 2, 3],
               "chat_request": {"r": 1}}  # fmt: skip
    of_text = {"generate_responses": [generated], "prompt_tokens": [3], "prompt_token_ids": [[1, 2, 3]],
               "completion_request": {"r": 1}}  # fmt: skip
    assert body == (of_chat if api is CHAT else of_text)


WHOLE = ["derender_chat_plain", "derender_chat_reasoning", "derender_chat_tool_call", "derender_chat_logprobs",
         "derender_chat_stop_string"]  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_a_derendered_answer_is_rebuilt_with_what_the_service_said(pure: Any, recorded: Any, name: str) -> None:
    exchange = recorded(f"derender/{name}")
    generated, answer = exchange["request"]["body"]["generate_response"], exchange["response"]["body"]
    reply = pure(derendered, CHAT, generated, answer)
    assert reply["output_mode"] == "derender"
    asked = Asked({"model": "tiny", **exchange["request"]["body"]["chat_request"]}, None, "a1", 0)
    (ours,), (theirs,) = chat.whole(reply, asked)["choices"], answer["choices"]
    for key in ("finish_reason", "stop_reason", "logprobs"):
        assert ours[key] == theirs[key], key
    assert ours["message"] == theirs["message"]


@pytest.mark.parametrize("name", ["derender_completion_plain", "derender_completion_logprobs"])
def test_a_derendered_completion_is_the_service_s_own(pure: Any, recorded: Any, name: str) -> None:
    exchange = recorded(f"derender/{name}")
    body, answer = exchange["request"]["body"], exchange["response"]["body"]
    reply = pure(derendered, COMPLETIONS, body["generate_responses"][0], answer)
    asked = Asked({"model": "tiny", **(body.get("completion_request") or {})}, None, "a1", 0)
    (ours,), theirs = completions.whole(reply, asked)["choices"], answer["choices"][0]
    for key in ("text", "finish_reason", "stop_reason", "logprobs"):
        assert ours[key] == theirs[key], key


def test_a_choice_that_ended_without_a_token_says_nothing() -> None:
    aborted = {"index": 0, "token_ids": [], "finish_reason": "abort", "stop_reason": None}
    reply = derendered(CHAT, {"choices": [aborted]}, {"choices": []})
    assert reply["choices"][0]["message"]["content"] == ""
    assert reply["choices"][0]["finish_reason"] == "abort"
    reply = derendered(COMPLETIONS, {"choices": [aborted]}, {"choices": []})
    assert (reply["choices"][0]["text"], reply["choices"][0]["stop_reason"]) == ("", None)


@pytest.mark.parametrize(
    "answer", [{}, {"choices": []}, {"choices": [{}]}, {"choices": [{"index": 0}, {"index": 1}]}, {"choices": None}]
)
def test_an_answer_of_the_service_that_does_not_fit_is_a_failed_leg(answer: Any) -> None:
    with pytest.raises(LegFailed) as caught:
        reply = derendered(CHAT, {"choices": [{"index": 0, "token_ids": [5]}]}, answer)
        chat.whole(reply, Asked({}, None, "a1", 0))
    assert caught.value.leg in ("derender", "decode")


STREAMS = ["derender_chat_stream_plain", "derender_chat_stream_reasoning", "derender_chat_stream_tool_call"]


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_of_calls_is_the_recorded_one_and_adds_up(pure: Any, recorded: Any, name: str) -> None:
    content = reasoning = ""
    for step in recorded(f"derender/{name}")["steps"]:
        request, answer = step["request"], step["response"]
        if not request["generate_chunk"]["choices"]:
            continue
        rendered = {"token_ids": request["prompt_token_ids"]}
        chunk, asked = request["generate_chunk"], request["chat_request"]
        body = pure(chunk_body, CHAT, chunk, request["stream_state"], rendered, asked)
        for key in ("stream_state", "prompt_tokens", "prompt_token_ids", "chat_request"):
            assert body[key] == request[key], key
        (choice,) = pure(derendered_chunk, CHAT, request["generate_chunk"], answer["chunk"])["choices"]
        delta = choice["delta"] or {}
        assert "role" not in delta
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning") or ""
    assert reasoning or content.startswith("Sure.")  # of the tool call, the recording has the first calls and the last
    assert choice["finish_reason"] is not None


def test_a_completion_s_chunk_is_one_of_text() -> None:
    chunk = {"request_id": "g", "choices": [{"index": 0, "token_ids": [5], "finish_reason": None, "stop_reason": None}]}
    made = {"choices": [{"index": 0, "text": "hi", "finish_reason": None, "stop_reason": None, "logprobs": None}]}
    (choice,) = derendered_chunk(COMPLETIONS, chunk, made)["choices"]
    assert (choice["text"], choice["logprobs"]) == ("hi", None)


def test_text_alone_is_asked_for_as_it_was_recorded(pure: Any, recorded: Any) -> None:
    """The prompt goes with the first call alone, as the state has what the service needs of it."""
    for number, step in enumerate(recorded("derender/derender_completion_stream_plain")["steps"]):
        asked = step["request"]
        if not asked["generate_chunk"]["choices"]:
            continue
        (choice,) = asked["generate_chunk"]["choices"]
        sampling = {"stop": ["###"], "min_tokens": 2, "stop_token_ids": [9], "skip_special_tokens": False, "seed": 1}
        rendered = {"token_ids": asked["prompt_token_ids"], "sampling_params": sampling}
        finish = {name: choice[name] for name in ("finish_reason", "stop_reason")}
        body = pure(text_body, choice["token_ids"], finish, asked["stream_state"], rendered)
        assert body.keys() <= asked.keys()
        assert body["stream"] is True and body["stream_state"] == asked["stream_state"]
        assert body["prompt_token_ids"] == (asked["prompt_token_ids"] if number == 0 else None)
        (ours,) = body["generate_chunk"]["choices"]
        shown = ("index", "token_ids", "finish_reason", "stop_reason")
        assert ours == {name: choice[name] for name in shown if choice[name] is not None}
        assert body["completion_request"] == {
            "prompt": "prompt", "min_tokens": 2, "stop_token_ids": [9], "skip_special_tokens": False,
        }  # fmt: skip
