"""Any API's generation fields become sampling_params, and nothing that has a meaning is lost on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from envelope.formats import Format
from envelope.sampling import ENGINE_MAX_TOKENS, OUTPUT_CAPS, client_sampling, complete, output_cap

if TYPE_CHECKING:
    from collections.abc import Callable

CHAT, COMPLETIONS, RESPONSES, MESSAGES = Format.CHAT, Format.COMPLETIONS, Format.RESPONSES, Format.MESSAGES

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}

# One name and one meaning on every route.
SAME = {
    "n": 2,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.05,
    "presence_penalty": 0.25,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "seed": 2**53 + 1,
    "stop_token_ids": [7],
    "ignore_eos": True,
    "min_tokens": 1,
    "prompt_logprobs": 0,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True,
    "logit_bias": {"5": 1.5},
    "allowed_token_ids": [1, 2],
    "bad_words": ["no"],
    "thinking_token_budget": 64,
    "repetition_detection": {"max_pattern_size": 4},
    "structured_outputs": {"regex": "a+"},
    "stream_interval": 4,
    "watermarking": False,
    "routed_experts_prompt_start": 0,
}


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("api", [CHAT, RESPONSES, MESSAGES])
def test_a_field_that_is_the_same_everywhere_is_taken_as_it_is(
    pure: Callable[..., Any], api: Format, name: str
) -> None:
    assert pure(client_sampling, api, {name: SAME[name]}) == {name: SAME[name]}


def test_all_of_them_at_once_for_a_prompt_that_no_renderer_sees(pure: Callable[..., Any]) -> None:
    body = {"model": "m", "prompt": [1], "max_tokens": 9, "stop": "END", "logprobs": 3, "user": "u", **SAME}
    assert pure(client_sampling, COMPLETIONS, body) == {**SAME, "stop": ["END"], "logprobs": 3, "max_tokens": 9}


@pytest.mark.parametrize("api", [CHAT, RESPONSES, MESSAGES])
def test_null_is_as_good_as_absent(pure: Callable[..., Any], api: Format) -> None:
    names = (*SAME, "stop", "stop_sequences", "logprobs", "top_logprobs", "response_format", "vllm_xargs")
    caps = ("max_tokens", "max_completion_tokens", "max_output_tokens")
    assert pure(client_sampling, api, dict.fromkeys((*names, *caps))) == {}


# (api, what the client wrote, what the engine is told)
TRANSLATED = {
    "one stop is a list": (CHAT, {"stop": "END"}, {"stop": ["END"]}),
    "stops stay a list": (CHAT, {"stop": ["a", "b"]}, {"stop": ["a", "b"]}),
    "no stops": (CHAT, {"stop": []}, {"stop": []}),
    "messages has its own name for stops": (
        MESSAGES, {"stop_sequences": ["END"], "stop": "no", "max_tokens": 5}, {"stop": ["END"], "max_tokens": 5}),
    "chat logprobs": (CHAT, {"logprobs": True, "top_logprobs": 2}, {"logprobs": 2}),
    "chat logprobs of the token alone": (CHAT, {"logprobs": True}, {"logprobs": 0}),
    "chat logprobs, null candidates": (CHAT, {"logprobs": True, "top_logprobs": None}, {"logprobs": 0}),
    "chat logprobs of every token": (CHAT, {"logprobs": True, "top_logprobs": -1}, {"logprobs": -1}),
    "chat logprobs off": (CHAT, {"logprobs": False, "top_logprobs": 2}, {}),
    "chat logprobs of listed tokens take no count": (
        CHAT, {"logprobs": True, "top_logprobs": 0, "logprob_token_ids": [5, 6]}, {"logprob_token_ids": [5, 6]}),
    "completions logprobs of listed tokens": (
        COMPLETIONS, {"logprobs": 1, "logprob_token_ids": [5, 6], "max_tokens": 1},
        {"logprob_token_ids": [5, 6], "max_tokens": 1}),
    "no listed tokens": (CHAT, {"logprobs": True, "top_logprobs": 2, "logprob_token_ids": []}, {"logprobs": 2}),
    "completions logprobs": (COMPLETIONS, {"logprobs": 3, "max_tokens": 1}, {"logprobs": 3, "max_tokens": 1}),
    "completions logprobs 0": (COMPLETIONS, {"logprobs": 0, "max_tokens": 1}, {"logprobs": 0, "max_tokens": 1}),
    "a json object": (CHAT, {"response_format": {"type": "json_object"}},
                      {"structured_outputs": {"json_object": True}}),
    "a json schema": (
        CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA}}),
    "a json schema without one": (CHAT, {"response_format": {"type": "json_schema"}}, {}),
    "a structural tag is a text": (
        CHAT, {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
        {"structured_outputs": {"structural_tag": '{"type":"structural_tag","format":{"type":"any_text"}}'}}),
    "a response format wins over the constraint beside it, and leaves its options": (
        CHAT, {"response_format": {"type": "json_object"},
               "structured_outputs": {"json_object": False, "disable_any_whitespace": True}},
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}}),
    "plain text": (CHAT, {"response_format": {"type": "text"}}, {}),
    "a format that is no object": (CHAT, {"response_format": "json_object"}, {}),
    "extra arguments": (CHAT, {"vllm_xargs": {"k": "v", "i": 2**64}}, {"extra_args": {"k": "v", "i": 2**64}}),
    "a constraint of the wrong kind": (
        CHAT, {"response_format": {"type": "json_object"}, "structured_outputs": "x"},
        {"structured_outputs": {"json_object": True}}),
    "no extra arguments": (CHAT, {"vllm_xargs": {}}, {}),
    "extra arguments of the wrong kind": (CHAT, {"vllm_xargs": "k"}, {}),
}  # fmt: skip


@pytest.mark.parametrize(("api", "body", "params"), TRANSLATED.values(), ids=TRANSLATED)
def test_what_an_api_writes_in_its_own_way_is_translated(
    pure: Callable[..., Any], api: Format, body: dict[str, Any], params: dict[str, Any]
) -> None:
    assert pure(client_sampling, api, body) == params


@pytest.mark.parametrize("name", ["n", "top_k", "seed", "min_tokens", "prompt_logprobs", "thinking_token_budget"])
def test_an_integer_that_was_written_as_a_float_is_one(name: str) -> None:
    assert repr(client_sampling(CHAT, {name: 2.0})) == repr({name: 2})


def test_what_is_no_integer_is_left_for_the_worker_to_refuse() -> None:
    assert repr(client_sampling(CHAT, {"top_k": 2.5, "seed": "7", "temperature": 1.0, "max_tokens": 5.0})) == repr(
        {"temperature": 1.0, "top_k": 2.5, "seed": "7", "max_tokens": 5}
    )


CAPS = [
    (CHAT, {}, None),
    (CHAT, {"max_tokens": 5}, 5),
    (CHAT, {"max_completion_tokens": 5}, 5),
    (CHAT, {"max_completion_tokens": 5, "max_tokens": 9}, 5),
    (CHAT, {"max_completion_tokens": 9, "max_tokens": 5}, 9),
    (CHAT, {"max_completion_tokens": None, "max_tokens": 5}, 5),
    (CHAT, {"max_output_tokens": 5}, None),
    (CHAT, {"max_tokens": 16}, 16),
    (COMPLETIONS, {}, 16),
    (COMPLETIONS, {"max_tokens": None}, 16),
    (COMPLETIONS, {"max_tokens": 5}, 5),
    (COMPLETIONS, {"max_completion_tokens": 5}, 16),
    (COMPLETIONS, {"max_tokens": 3, "max_completion_tokens": 5}, 3),
    (RESPONSES, {}, None),
    (RESPONSES, {"max_output_tokens": 5, "max_tokens": 9}, 5),
    (RESPONSES, {"max_tokens": 9}, None),
    (MESSAGES, {"max_tokens": 5}, 5),
    (MESSAGES, {}, None),
    (Format.GENERATE, {"max_tokens": 5}, None),
    (CHAT, {"max_tokens": 5.0}, 5),
]


@pytest.mark.parametrize(("api", "body", "cap"), CAPS)
def test_the_output_cap_goes_by_the_api_s_own_names_in_their_order(
    pure: Callable[..., Any], api: Format, body: dict[str, Any], cap: int | None
) -> None:
    assert repr(pure(output_cap, api, body)) == repr(cap)
    if api in OUTPUT_CAPS:
        assert client_sampling(api, body) == ({} if cap is None else {"max_tokens": cap})


PYTHON = {"temperature": 1.0, "stop": [], "output_kind": 2, "skip_clone": True}


def test_the_engine_s_default_is_vllm_s() -> None:
    assert ENGINE_MAX_TOKENS == 16


# (api, the client's body, the renderer's sampling_params, what the worker is told of a cap)
SIXTEEN = {
    "chat asked for 16": (CHAT, {"max_tokens": 16}, PYTHON, 16),
    "chat, the other name": (CHAT, {"max_completion_tokens": 16}, PYTHON, 16),
    "completions said nothing": (COMPLETIONS, {}, PYTHON, 16),
    "completions said null": (COMPLETIONS, {"max_tokens": None}, PYTHON, 16),
    "responses asked for 16": (RESPONSES, {"max_output_tokens": 16}, PYTHON, 16),
    "messages asked for 16": (MESSAGES, {"max_tokens": 16}, PYTHON, 16),
    "no cap, and 16 were left of the context": (CHAT, {}, PYTHON, 16),
    "the server itself caps at 16": (CHAT, {"max_tokens": 100}, PYTHON, 16),
    "the renderer's cap wins": (CHAT, {"max_tokens": 5000}, {**PYTHON, "max_tokens": 2020}, 2020),
    "the renderer resolved a cap": (CHAT, {}, {**PYTHON, "max_tokens": 2020}, 2020),
    "a Rust renderer gives none, and the client did": (CHAT, {"max_tokens": 16}, {"temperature": 1.0}, 16),
    "a Rust renderer, completions": (COMPLETIONS, {}, {"temperature": 1.0}, 16),
    "a Rust renderer, and nobody gave one": (CHAT, {}, {"temperature": 1.0}, None),
    "a Rust renderer that writes null": (CHAT, {}, {"max_tokens": None}, None),
    "a renderer that gave nothing": (CHAT, {"max_tokens": 7}, {}, 7),
}


@pytest.mark.parametrize(("api", "body", "rendered", "cap"), SIXTEEN.values(), ids=SIXTEEN)
def test_a_cap_of_16_that_the_renderer_left_out_is_put_back(
    pure: Callable[..., Any], api: Format, body: dict[str, Any], rendered: dict[str, Any], cap: int | None
) -> None:
    assert pure(complete, rendered, api, body).get("max_tokens") == cap


@pytest.mark.parametrize(
    ("name", "api"),
    [("render_chat_max_tokens_16", CHAT), ("render_completion_default_max_tokens", COMPLETIONS)],
)
def test_the_recorded_renders_that_lost_their_cap_get_it_back(recorded: Any, name: str, api: Format) -> None:
    exchange = recorded(f"render/{name}")
    answer = exchange["response"]["body"]
    rendered = (answer[0] if isinstance(answer, list) else answer)["sampling_params"]
    assert "max_tokens" not in rendered
    assert complete(rendered, api, exchange["request"]["body"]) == {**rendered, "max_tokens": 16}


RENDERS = {
    "render_chat_plain": CHAT,
    "render_chat_no_max_tokens": CHAT,
    "render_chat_max_completion_tokens": CHAT,
    "render_chat_logprobs": CHAT,
    "render_chat_json_object": CHAT,
    "render_chat_json_schema": CHAT,
    "render_chat_stop_and_sampling": CHAT,
    "render_chat_tools_required": CHAT,
    "render_chat_transfer_params": CHAT,
    "render_completion_plain": COMPLETIONS,
    "render_completion_token_prompt": COMPLETIONS,
    "render_responses_plain": RESPONSES,
    "render_responses_tools_stream": RESPONSES,
    "render_messages_plain": MESSAGES,
    "render_messages_tools_stream": MESSAGES,
}


@pytest.mark.parametrize(("name", "api"), RENDERS.items())
def test_what_a_real_renderer_resolved_is_never_changed(recorded: Any, name: str, api: Format) -> None:
    exchange = recorded(f"render/{name}")
    answer = exchange["response"]["body"]
    rendered = (answer[0] if isinstance(answer, list) else answer)["sampling_params"]
    whole = complete(rendered, api, exchange["request"]["body"])
    assert {name: whole.get(name) for name in rendered} == rendered
    assert whole.keys() == rendered.keys(), "it left nothing out but the engine's defaults"


def test_what_a_python_renderer_took_off_on_purpose_stays_off(pure: Callable[..., Any]) -> None:
    rendered = {**PYTHON, "max_tokens": 9, "logprob_token_ids": [5], "seed": None}
    body = {"logprobs": True, "top_logprobs": 3, "logprob_token_ids": [5], "top_k": 7, "max_tokens": 9}
    assert pure(complete, rendered, CHAT, body) == {**PYTHON, "max_tokens": 9, "logprob_token_ids": [5]}


@pytest.mark.parametrize("name", ["render_chat_stop_and_sampling", "render_chat_logprobs", "render_completion_plain"])
def test_by_hand_it_comes_to_what_a_real_renderer_makes_of_the_same_body(recorded: Any, name: str) -> None:
    """Without a renderer's help: the fields that the client wrote, all of them, with the same values."""
    exchange = recorded(f"render/{name}")
    answer = exchange["response"]["body"]
    rendered = (answer[0] if isinstance(answer, list) else answer)["sampling_params"]
    made = client_sampling(RENDERS[name], exchange["request"]["body"])
    assert {key: rendered.get(key) for key in made} == made


def test_a_renderer_without_an_answer_to_a_field_gets_the_client_s(pure: Callable[..., Any]) -> None:
    rendered = {"temperature": 0.5, "seed": None, "top_k": 0}
    body = {"temperature": 0.9, "seed": 7, "top_k": 5, "stop": "END"}
    assert pure(complete, rendered, CHAT, body) == {"temperature": 0.5, "seed": 7, "top_k": 0, "stop": ["END"]}
