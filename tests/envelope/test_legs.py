"""The request body of every leg in every format: one token for prefill, all of it for decode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from envelope.connectors import KV_CONNECTORS
from envelope.features import check
from envelope.formats import Format
from envelope.json_codec import dumps, loads
from envelope.legs import (
    decode_for_generate_client,
    decode_generate,
    decode_openai,
    encode_generate,
    encode_openai,
    from_render,
    from_token_prompt,
    identified,
    mode_for,
    one_token,
    one_token_openai,
    prefill_generate,
    prefill_openai,
    prefill_reset,
    stream_options,
    unstreamed,
)

if TYPE_CHECKING:
    from collections.abc import Callable

CHAT, COMPLETIONS, RESPONSES, MESSAGES, GENERATE = Format

NIXL = KV_CONNECTORS["kv-nixl"].prefill
SHARED = KV_CONNECTORS["kv-shared-storage"].prefill

HANDOVER = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "e1", "remote_block_ids": [[1, 2]],
    "remote_request_id": "r1", "remote_host": "10.9.9.9", "remote_port": 5600, "big": 2**53 + 1, "x": 1.5,
}  # fmt: skip

HI = [{"role": "user", "content": "hi", "name": "x"}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]

# What costs work and is thrown away with prefill's answer, or is illegal beside a cap of one token.
EXTRAS = {
    "n": 2, "best_of": 3, "use_beam_search": True, "echo": True, "logprobs": True, "top_logprobs": 20,
    "prompt_logprobs": 5, "logprob_token_ids": [1], "return_tokens_as_token_ids": True, "min_tokens": 50,
    "stop": ["###"], "stop_sequences": ["###"], "stop_token_ids": [7], "include_stop_str_in_output": True,
    "bad_words": ["no"], "structured_outputs": {"regex": "a"}, "thinking_token_budget": 9,
    "repetition_detection": {"max_pattern_size": 4}, "stream_options": {"include_usage": True},
    "return_token_ids": True, "output_mode": "text", "chat_request": {"x": 1}, "parse_context": {"x": 1},
    "reasoning_ended": True, "reasoning_parser_kwargs": {}, "token_offsets": [[0, 1]],
}  # fmt: skip

# What shapes the prompt, its cache key or the choice of a model, so that both legs must have it.
SHAPES = {
    "model": "lora-7", "tools": TOOLS, "tool_choice": "required", "response_format": SCHEMA,
    "reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}, "documents": [{"text": "d"}],
    "mm_processor_kwargs": {"max_pixels": 10}, "cache_salt": "s", "priority": 3, "seed": 2**53 + 1,
    "temperature": 0.7, "logit_bias": {"5": 1.5}, "vllm_xargs": {"k": "v"}, "include_reasoning": False,
    "add_special_tokens": False, "truncate_prompt_tokens": 100, "brand_new": {"ids": [10**30]}, "nothing": None,
}  # fmt: skip

# api -> the prompt's own field, what the client capped, what prefill is sent instead
CAPPED: dict[str, tuple[Format, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "chat without a cap": (CHAT, {"messages": HI}, {}, {"max_tokens": 1, "ignore_eos": True}),
    "chat": (CHAT, {"messages": HI}, {"max_tokens": 50}, {"max_tokens": 1, "ignore_eos": True}),
    "chat, null caps": (CHAT, {"messages": HI}, {"max_tokens": None, "max_completion_tokens": None},
                        {"max_tokens": 1, "max_completion_tokens": None, "ignore_eos": True}),
    "chat, the newer cap": (CHAT, {"messages": HI}, {"max_completion_tokens": 50},
                            {"max_tokens": 1, "max_completion_tokens": 1, "ignore_eos": True}),
    "chat, all three caps": (
        CHAT, {"messages": HI}, {"max_tokens": 70, "max_completion_tokens": 50, "max_output_tokens": 9},
        {"max_tokens": 1, "max_completion_tokens": 1, "max_output_tokens": 1, "ignore_eos": True}),
    "chat that asked for one token": (CHAT, {"messages": HI}, {"max_tokens": 1, "ignore_eos": False},
                                      {"max_tokens": 1, "ignore_eos": True}),
    "completions": (COMPLETIONS, {"prompt": "hi"}, {}, {"max_tokens": 1, "ignore_eos": True}),
    "completions of tokens": (COMPLETIONS, {"prompt": [1, 2]}, {"max_tokens": 16},
                              {"max_tokens": 1, "ignore_eos": True}),
    "responses without a cap": (RESPONSES, {"input": "hi", "store": False}, {},
                                {"max_output_tokens": 1, "ignore_eos": True}),
    "responses": (RESPONSES, {"input": "hi", "store": False}, {"max_output_tokens": 50},
                  {"max_output_tokens": 1, "ignore_eos": True}),
    "messages": (MESSAGES, {"messages": HI, "system": "x"}, {"max_tokens": 50}, {"max_tokens": 1}),
}  # fmt: skip


THINKING = [
    ({"type": "enabled", "budget_tokens": 1024}, {}),
    ({"type": "disabled"}, {"thinking": {"type": "disabled"}}),
    ({"type": "adaptive"}, {"thinking": {"type": "adaptive"}}),
    (None, {"thinking": None}),
]


@pytest.mark.parametrize(("thinking", "sent"), THINKING)
def test_a_thinking_budget_above_one_token_is_not_sent(pure: Callable[..., Any], thinking: Any, sent: Any) -> None:
    """vLLM takes a budget only below max_tokens; the other kinds of thinking may shape the prompt, and stay."""
    body = {"messages": HI, "max_tokens": 4096, "thinking": thinking}
    assert pure(one_token_openai, MESSAGES, body) == {"messages": HI, "max_tokens": 1, "stream": False, **sent}
    assert one_token_openai(CHAT, {**body, "thinking": {"type": "enabled"}})["thinking"] == {"type": "enabled"}


@pytest.mark.parametrize("stream", [{}, {"stream": True}, {"stream": False}, {"stream": None}])
@pytest.mark.parametrize(("api", "prompt", "caps", "capped"), CAPPED.values(), ids=CAPPED)
def test_on_the_client_s_route_prefill_is_asked_for_one_token(
    pure: Callable[..., Any],
    api: Format,
    prompt: dict[str, Any],
    caps: dict[str, Any],
    capped: dict[str, Any],
    stream: dict[str, Any],
) -> None:
    """Whatever shapes the prompt stays, whatever makes more than one token of it goes."""
    body = {**prompt, **SHAPES, **EXTRAS, **caps, **stream}
    assert pure(one_token_openai, api, body) == {**prompt, **SHAPES, **capped, "stream": False}


def test_on_the_generate_route_one_token_is_all_that_is_said() -> None:
    assert one_token() == {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
    assert one_token() is not one_token()


RENDERED: dict[str, Any] = {
    "request_id": "chatcmpl-x", "token_ids": [1, 2, 3], "token_offsets": None,
    "features": {"mm_hashes": {"image": ["h"]}}, "content_parts": None,
    "sampling_params": {"temperature": 0.5, "n": 2, "stop": ["###"], "max_tokens": 9, "output_kind": 1},
    "model": "m", "reasoning_ended": False, "reasoning_parser_kwargs": {"chat_template_kwargs": {}},
    "return_token_ids": True, "output_mode": "tokens", "parse_context": {"tool_choice": "auto", "tools": TOOLS},
    "stream": True, "stream_options": {"include_usage": True}, "cache_salt": "s", "priority": 3,
}  # fmt: skip

RESET = {
    "request_id": "chatcmpl-x", "token_ids": [1, 2, 3], "features": {"mm_hashes": {"image": ["h"]}},
    "content_parts": None, "sampling_params": {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True},
    "model": "m", "output_mode": "tokens", "stream": False, "cache_salt": "s", "priority": 3,
}  # fmt: skip

# Whoever sent the mode, the chat request or the parse context, prefill sees none of it.
MODES = {
    "as rendered": {},
    "text": {"output_mode": "text"},
    "derender": {"output_mode": "derender", "stream": False},
    "null": {"output_mode": None, "parse_context": None},
    "the RFC's chat_request": {"output_mode": "derender", "chat_request": {"messages": HI}},
    "an empty context": {"parse_context": {}},
}


@pytest.mark.parametrize("sent", MODES.values(), ids=MODES)
def test_prefill_is_reset_to_tokens(pure: Callable[..., Any], sent: dict[str, Any]) -> None:
    assert pure(prefill_reset, {**RENDERED, **sent}) == RESET


def test_prefill_on_the_generate_route_asks_the_connector_at_both_places(pure: Callable[..., Any]) -> None:
    assert pure(prefill_generate, RENDERED, NIXL) == {
        **RESET,
        "sampling_params": {**one_token(), "extra_args": {"kv_transfer_params": NIXL}},
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }
    assert pure(prefill_generate, RENDERED, SHARED) == RESET


def test_a_generate_client_s_minimal_body_becomes_a_prefill(pure: Callable[..., Any]) -> None:
    assert pure(prefill_generate, {"token_ids": [1], "sampling_params": {"max_tokens": 9}}, SHARED) == {
        "token_ids": [1],
        "sampling_params": one_token(),
        "output_mode": "tokens",
        "stream": False,
    }


# (api, the client's body, the connector's ask, render's tokens, what prefill is sent)
PREFILLS = {
    "chat, shared storage": (CHAT, {"messages": HI}, SHARED, None,
                             {"messages": HI, "max_tokens": 1, "stream": False, "ignore_eos": True}),
    "chat, NIXL": (CHAT, {"messages": HI}, NIXL, None,
                   {"messages": HI, "max_tokens": 1, "stream": False, "ignore_eos": True, "kv_transfer_params": NIXL}),
    "chat, NIXL and tokens": (CHAT, {"messages": HI}, NIXL, [1, 2],
                              {"messages": HI, "max_tokens": 1, "stream": False, "ignore_eos": True,
                               "kv_transfer_params": {**NIXL, "prompt_token_ids": [1, 2]}}),
    "chat, shared storage and tokens": (CHAT, {"messages": HI}, SHARED, [1, 2],
                                        {"messages": HI, "max_tokens": 1, "stream": False, "ignore_eos": True,
                                         "kv_transfer_params": {"prompt_token_ids": [1, 2]}}),
    "completions, tokens are the prompt": (COMPLETIONS, {"prompt": "hi"}, NIXL, [1, 2],
                                           {"prompt": [1, 2], "max_tokens": 1, "stream": False, "ignore_eos": True,
                                            "kv_transfer_params": NIXL}),
    "responses": (RESPONSES, {"input": "hi", "store": False}, NIXL, [1],
                  {"input": "hi", "store": False, "max_output_tokens": 1, "stream": False, "ignore_eos": True,
                   "kv_transfer_params": {**NIXL, "prompt_token_ids": [1]}}),
    "messages": (MESSAGES, {"messages": HI, "max_tokens": 9}, NIXL, None,
                 {"messages": HI, "max_tokens": 1, "stream": False, "kv_transfer_params": NIXL}),
}  # fmt: skip


@pytest.mark.parametrize(("api", "body", "kv", "token_ids", "leg"), PREFILLS.values(), ids=PREFILLS)
def test_prefill_on_the_client_s_route(
    pure: Callable[..., Any], api: Format, body: Any, kv: Any, token_ids: Any, leg: Any
) -> None:
    assert pure(prefill_openai, api, body, kv, token_ids) == leg


FULL = {"messages": HI, **SHAPES, **EXTRAS, "max_tokens": 16, "stream": True}

DECODES = {
    "as it was sent": (CHAT, FULL, None, None, FULL),
    "nothing handed over": (CHAT, FULL, {}, None, FULL),
    "with a hand-over": (CHAT, FULL, HANDOVER, None, {**FULL, "kv_transfer_params": HANDOVER}),
    "with tokens": (CHAT, FULL, None, [1], {**FULL, "kv_transfer_params": {"prompt_token_ids": [1]}}),
    "with both": (CHAT, FULL, HANDOVER, [1], {**FULL, "kv_transfer_params": {**HANDOVER, "prompt_token_ids": [1]}}),
    "completions with both": (COMPLETIONS, {"prompt": "hi", "max_tokens": None}, HANDOVER, [1],
                              {"prompt": [1], "max_tokens": None, "kv_transfer_params": HANDOVER}),
    "completions with tokens": (COMPLETIONS, {"prompt": "hi"}, None, [1], {"prompt": [1]}),
    "responses": (RESPONSES, {"input": "hi"}, HANDOVER, None, {"input": "hi", "kv_transfer_params": HANDOVER}),
    "messages": (MESSAGES, {"messages": HI, "max_tokens": 9}, HANDOVER, [1],
                 {"messages": HI, "max_tokens": 9, "kv_transfer_params": {**HANDOVER, "prompt_token_ids": [1]}}),
}  # fmt: skip


@pytest.mark.parametrize(("api", "body", "kv", "token_ids", "leg"), DECODES.values(), ids=DECODES)
def test_decode_on_the_client_s_route_is_the_client_s_body_enriched(
    pure: Callable[..., Any], api: Format, body: Any, kv: Any, token_ids: Any, leg: Any
) -> None:
    assert pure(decode_openai, api, body, kv, token_ids) == leg


def test_no_number_changes_on_its_way_through_a_leg() -> None:
    """Cases V01 and L13: the client's and the worker's integers, and 1.0 is not 1."""
    raw = b'{"seed":9007199254740993,"a":[9223372036854775808,18446744073709551616,%d],"f":1.0,"g":1}' % 10**30
    body = loads(raw)
    for leg in (decode_openai(CHAT, body, HANDOVER, None), one_token_openai(CHAT, body)):
        assert dumps({name: leg[name] for name in body}) == raw
    assert b'"big":9007199254740993,"x":1.5' in dumps(decode_openai(CHAT, body, HANDOVER, None))


DECODED = {key: value for key, value in RENDERED.items() if key not in ("stream_options", "stream", "output_mode")}
EXTRA_ARGS = {**RENDERED["sampling_params"], "extra_args": {"kv_transfer_params": HANDOVER}}

# (mode, hand-over, the client's stream, its stream_options, what decode is sent beside the rendered request)
TOKENS_IN = {
    "text": ("text", None, False, None, {"output_mode": "text", "stream": False}),
    "text, streamed": ("text", None, True, None, {"output_mode": "text", "stream": True}),
    "text, streamed with usage": ("text", None, True, {"include_usage": True},
                                  {"output_mode": "text", "stream": True, "stream_options": {"include_usage": True}}),
    "options without a stream are dropped": ("text", None, False, {"include_usage": True},
                                             {"output_mode": "text", "stream": False}),
    "derender": ("derender", None, False, None, {"output_mode": "derender", "stream": False}),
    "derender is never streamed": ("derender", None, True, {"include_usage": True},
                                   {"output_mode": "derender", "stream": False}),
    "a hand-over stands at both places": ("derender", HANDOVER, False, None,
                                          {"output_mode": "derender", "stream": False,
                                           "kv_transfer_params": HANDOVER, "sampling_params": EXTRA_ARGS}),
    "an empty one at none": ("text", {}, False, None, {"output_mode": "text", "stream": False}),
}  # fmt: skip


@pytest.mark.parametrize(("mode", "kv", "stream", "options", "more"), TOKENS_IN.values(), ids=TOKENS_IN)
def test_decode_on_the_generate_route_is_the_rendered_request(
    pure: Callable[..., Any], mode: str, kv: Any, stream: bool, options: Any, more: dict[str, Any]
) -> None:
    """All that only render knows travels on: features, parse_context, reasoning_ended, cache_salt, priority."""
    leg = pure(decode_generate, RENDERED, mode, kv, stream=stream, stream_options=options)
    assert leg == {**DECODED, **more}


OWN = {"token_ids": [1], "sampling_params": {"n": 2, "brand_new": 1}, "stream": True, "output_mode": "text",
       "stream_options": {"include_usage": True}, "parse_context": {"x": 1}, "brand_new": None}  # fmt: skip

FOR_GENERATE = {
    "text is streamed": (OWN, OWN),
    "no mode": ({"token_ids": [1], "sampling_params": {}}, {"token_ids": [1], "sampling_params": {}}),
    "tokens are streamed": ({**OWN, "output_mode": "tokens"}, {**OWN, "output_mode": "tokens"}),
    "derender is not": (
        {**OWN, "output_mode": "derender"},
        {**{key: value for key, value in OWN.items() if key != "stream_options"}, "output_mode": "derender",
         "stream": False}),
    "derender unstreamed keeps all": ({**OWN, "output_mode": "derender", "stream": False},
                                      {**OWN, "output_mode": "derender", "stream": False}),
}  # fmt: skip


@pytest.mark.parametrize(("body", "leg"), FOR_GENERATE.values(), ids=FOR_GENERATE)
def test_a_generate_client_keeps_every_field_it_sent(pure: Callable[..., Any], body: Any, leg: Any) -> None:
    assert pure(decode_for_generate_client, body, None) == leg
    params = {**leg["sampling_params"], "extra_args": {"kv_transfer_params": HANDOVER}}
    assert pure(decode_for_generate_client, body, HANDOVER) == {
        **leg,
        "kv_transfer_params": HANDOVER,
        "sampling_params": params,
    }


def test_render_s_answer_is_completed_and_cleaned(pure: Callable[..., Any]) -> None:
    rendered = {
        **RENDERED, "kv_transfer_params": {"x": 1}, "cache_salt": None, "priority": None,
        "sampling_params": {"temperature": 0.5, "output_kind": 2, "extra_args": {"k": "v", "kv_transfer_params": {}}},
    }  # fmt: skip
    body = {"model": "other", "messages": HI, "cache_salt": "s", "priority": 0, "return_token_ids": False}
    assert pure(from_render, rendered, CHAT, body) == {
        **RENDERED, "cache_salt": "s", "priority": 0,
        "sampling_params": {"temperature": 0.5, "output_kind": 2, "extra_args": {"k": "v"}, "max_tokens": 16},
    }  # fmt: skip


def test_a_renderer_that_tells_little_gets_the_client_s_words(pure: Callable[..., Any]) -> None:
    body = {"model": "m", "max_completion_tokens": 5, "stop": "END", "cache_salt": "s", "priority": 3,
            "return_token_ids": True, "messages": HI}  # fmt: skip
    for rendered in ({"token_ids": [1]}, {"token_ids": [1], "sampling_params": None}):
        assert pure(from_render, rendered, CHAT, body) == {
            "token_ids": [1], "sampling_params": {"stop": ["END"], "max_tokens": 5}, "model": "m", "cache_salt": "s",
            "priority": 3, "return_token_ids": True,
        }  # fmt: skip


@pytest.mark.parametrize("name", ["render_chat_max_tokens_16", "render_chat_transfer_params", "render_chat_tools_auto"])
def test_a_recorded_render_becomes_a_decode_with_nothing_lost(recorded: Any, name: str) -> None:
    exchange = recorded(f"render/{name}")
    rendered, body = exchange["response"]["body"], exchange["request"]["body"]
    leg = decode_generate(from_render(rendered, CHAT, body), "derender", HANDOVER, stream=False, stream_options=None)
    for key in ("token_ids", "parse_context", "reasoning_ended", "reasoning_parser_kwargs", "cache_salt", "priority"):
        assert leg[key] == rendered[key]
    assert leg["sampling_params"]["max_tokens"] == body["max_tokens"]
    assert leg["kv_transfer_params"] == HANDOVER
    assert "ec_transfer_params" not in leg


def test_a_prompt_of_tokens_needs_no_renderer(pure: Callable[..., Any]) -> None:
    body = {"model": "m", "prompt": [[1, 2]], "max_tokens": 5, "temperature": 0.0, "cache_salt": "s", "priority": None,
            "stream": True, "user": "u"}  # fmt: skip
    assert pure(from_token_prompt, COMPLETIONS, body) == {
        "model": "m",
        "cache_salt": "s",
        "token_ids": [1, 2],
        "sampling_params": {"temperature": 0.0, "max_tokens": 5},
    }
    assert pure(from_token_prompt, COMPLETIONS, {"prompt": [1]}) == {
        "token_ids": [1],
        "sampling_params": {"max_tokens": 16},
    }


@pytest.mark.parametrize("configured", ["text", "derender"])
@pytest.mark.parametrize("api", Format)
def test_completions_are_always_made_of_text(api: Format, configured: str) -> None:
    assert mode_for(api, configured) == ("text" if api is COMPLETIONS else configured)


USAGE = {"include_usage": True}

# (api, what the client asked, whether the numbers are needed here, what decode is asked)
STREAM_OPTIONS = [
    (CHAT, {}, False, None),
    (CHAT, {"stream_options": USAGE}, False, USAGE),
    (CHAT, {"stream_options": {"include_usage": False, "continuous_usage_stats": True}}, True,
     {"include_usage": True, "continuous_usage_stats": True}),
    (CHAT, {}, True, USAGE),
    (CHAT, {"stream_options": "x"}, True, USAGE),
    (COMPLETIONS, {"stream_options": USAGE}, False, USAGE),
    (COMPLETIONS, {"stream_options": None}, True, USAGE),
    (RESPONSES, {"stream_options": {"include_obfuscation": False}}, False, None),
    (RESPONSES, {"stream_options": {"include_obfuscation": False}}, True, USAGE),
    (MESSAGES, {}, False, None),
    (MESSAGES, {}, True, USAGE),
]  # fmt: skip


@pytest.mark.parametrize(("api", "body", "counted", "options"), STREAM_OPTIONS)
def test_usage_is_asked_for_where_the_client_or_the_envelope_needs_it(
    pure: Callable[..., Any], api: Format, body: Any, counted: bool, options: Any
) -> None:
    assert pure(stream_options, api, body, counted=counted) == options


PNG = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}}
OPTIONS = {"mm_processor_kwargs": {"max_pixels": 10}, "media_io_kwargs": {"video": {"num_frames": 4}}}


def test_an_encode_leg_on_the_chat_route_is_one_part_and_what_changes_its_hash(pure: Callable[..., Any]) -> None:
    body = {
        **EXTRAS, **SHAPES, **OPTIONS, "stream": True, "max_completion_tokens": 50,
        "messages": [*HI, {"role": "user", "content": [{"type": "text", "text": "and?"}, PNG]}],
    }  # fmt: skip
    alone = {"messages": [{"role": "user", "content": [PNG]}], "max_tokens": 1, "stream": False, "ignore_eos": True}
    kept = {"model": "lora-7", "cache_salt": "s", "priority": 3, **OPTIONS}
    assert pure(encode_openai, body, PNG) == {**alone, **kept}
    assert pure(encode_openai, {"messages": HI, "model": None, "cache_salt": None}, PNG) == alone


def test_an_encode_leg_on_the_generate_route_is_one_item_behind_the_first_token(pure: Callable[..., Any]) -> None:
    rendered = {
        "request_id": "chatcmpl-1", "token_ids": [5, 6, 91, 91, 7, 91, 91, 91], "model": "m", "cache_salt": "s",
        "priority": 0, "sampling_params": {"max_tokens": 50, "stop": ["x"]}, "parse_context": {}, "stream": True,
        "reasoning_ended": True, **OPTIONS,
        "features": {
            "mm_hashes": {"image": ["h1", "h2"]},
            "mm_placeholders": {"image": [{"offset": 2, "length": 2}, {"offset": 5, "length": 3}]},
            "kwargs_data": {"image": ["T1", "T2"]},
            "mm_metadata": None,
        },
    }  # fmt: skip
    second = check(rendered["features"], 8)[1]
    assert pure(encode_generate, rendered, second) == {
        "token_ids": [5, 91, 91, 91],
        "features": {
            "mm_hashes": {"image": ["h2"]},
            "mm_placeholders": {"image": [{"offset": 1, "length": 3}]},
            "kwargs_data": {"image": ["T2"]},
            "mm_metadata": None,
        },
        "sampling_params": one_token(),
        "output_mode": "tokens",
        "stream": False,
        "model": "m",
        "cache_salt": "s",
        "priority": 0,
        **OPTIONS,
    }


def test_what_changes_media_stays_on_a_generate_leg() -> None:
    rendered = {"token_ids": [1], "sampling_params": {}}
    assert from_render(rendered, CHAT, {"messages": HI, **OPTIONS}).items() >= OPTIONS.items()


@pytest.mark.parametrize("api", list(Format))
def test_a_leg_says_its_id_where_the_header_does_not(pure: Callable[..., Any], api: Format) -> None:
    """vLLM's responses route takes it from the body alone."""
    sent = pure(identified, api, {"model": "m"}, "req-1")
    assert sent == ({"model": "m", "request_id": "resp_req-1"} if api is RESPONSES else {"model": "m"})


@pytest.mark.parametrize("stream", [True, False])
def test_an_own_request_is_asked_for_whole_and_else_as_it_is(pure: Callable[..., Any], stream: bool) -> None:
    """Prefill samples decode's first token, so what shapes it stays."""
    body = {"messages": HI, "max_tokens": 5, "n": 1, "stop": ["x"], "stream": stream, "logprobs": True}
    options = {"stream_options": {"include_usage": True}}
    assert pure(unstreamed, {**body, **options}) == {**body, "stream": False}
