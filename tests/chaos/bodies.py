"""Right requests of every API, with about every field that somebody reads: what the fuzz tests start from."""

from __future__ import annotations

from typing import Any

_TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
_PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
_CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
_SCHEMA = {"name": "s", "schema": {"type": "object"}, "strict": True}

BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}),
    (
        "/v1/chat/completions",
        {
            "model": "tiny",
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": "4"},
            ],
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "tools": [_TOOL],
            "tool_choice": {"type": "function", "function": {"name": "add"}},
            "response_format": {"type": "json_schema", "json_schema": _SCHEMA},
            "max_tokens": 5,
            "max_completion_tokens": 6,
            "min_tokens": 1,
            "n": 1,
            "stop": ["###"],
            "stop_token_ids": [7],
            "logprobs": True,
            "top_logprobs": 2,
            "logit_bias": {"5": 1.5},
            "seed": 7,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 4,
            "reasoning_effort": "low",
            "chat_template_kwargs": {"enable_thinking": False},
            "cache_salt": "s",
            "priority": 1,
            "return_token_ids": True,
            "vllm_xargs": {"a": 1},
            "kv_transfer_params": {"do_remote_prefill": True},
            "user": "u",
            "metadata": {"k": "v"},
        },
    ),
    (
        "/v1/chat/completions",
        {"model": "tiny", "messages": [{"role": "user", "content": ["a", _PICTURE]}], "n": 2, "stream": False},
    ),
    ("/v1/completions", {"model": "tiny", "prompt": "hi", "max_tokens": 5, "echo": False, "logprobs": 2, "best_of": 1}),
    ("/v1/completions", {"model": "tiny", "prompt": [1, 2, 3], "stream": True, "stop": "x", "suffix": None, "seed": 1}),
    (
        "/v1/responses",
        {
            "model": "tiny",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "4"},
            ],
            "instructions": "be brief",
            "max_output_tokens": 5,
            "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}],
            "tool_choice": "auto",
            "text": {"format": {"type": "text"}},
            "reasoning": {"effort": "low"},
            "stream": True,
            "store": False,
            "metadata": {"k": "v"},
            "include": [],
            "top_logprobs": 1,
        },
    ),
    ("/v1/responses", {"model": "tiny", "input": "hi", "temperature": 0.1, "truncation": "disabled"}),
    (
        "/v1/messages",
        {
            "model": "tiny",
            "max_tokens": 5,
            "system": [{"type": "text", "text": "be brief"}],
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "add", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "4"}]},
            ],
            "tools": [{"name": "add", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "enabled", "budget_tokens": 2},
            "stop_sequences": ["###"],
            "stream": True,
        },
    ),
    ("/v1/messages", {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}),
    (
        "/inference/v1/generate",
        {
            "model": "tiny",
            "token_ids": [1, 2, 3],
            "sampling_params": {"max_tokens": 5, "n": 1, "extra_args": {"a": 1}, "structured_outputs": {"regex": "a"}},
            "output_mode": "text",
            "stream": True,
            "stream_options": {"include_usage": True},
            "features": None,
            "cache_salt": "s",
            "ec_transfer_params": {"h": {}},
        },
    ),
    (
        "/inference/v1/generate",
        {"token_ids": [1, 2, 3], "sampling_params": {}, "output_mode": "derender", "stream": True},
    ),
    ("/v1/messages/count_tokens", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}),
]
