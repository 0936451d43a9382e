"""Requests that the render service and the coordinator must render alike: each field that either looks at, and more.

``tests/data/rendered.json`` has vLLM 0.33's answers to them; ``tests/e2e/test_render_in_process.py`` asks a live one.
"""

from __future__ import annotations

from typing import Any

HI = [{"role": "user", "content": "Say hello in French."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "strict": True}}
BARE = {"type": "function", "function": {"name": "now"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALLED = [
    {"role": "user", "content": "Weather in Oslo and Rome?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "Two calls.",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}},
            {"id": "b", "type": "function", "function": {"name": "get_weather", "arguments": "not JSON"}},
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "sunny, 3 C"},
    {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "rain"}, {"type": "text", "text": "x"}]},
]


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "chat", {"model": "tiny", "messages": HI, **fields}


def text(prompt: Any = "Once upon", **fields: Any) -> tuple[str, dict[str, Any]]:
    return "completions", {"model": "tiny", "prompt": prompt, **fields}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": chat(),
    "no model": ("chat", {"messages": HI}),
    "greedy": chat(temperature=0, top_p=0.5, top_k=3, min_p=0.1),
    "nearly greedy": chat(temperature=0.001),
    "sampling": chat(temperature=0.7, top_p=0.9, top_k=-1, min_p=0.05, seed=7, n=3),
    "as text": chat(temperature="0.5", n="2", stream="true", seed=2.0),
    "penalties": chat(presence_penalty=0.5, frequency_penalty=-1, repetition_penalty=1.2),
    "seed of none": chat(seed=-1),
    "seed zero": chat(seed=0),
    "stop": chat(stop="END", include_stop_str_in_output=False),
    "stops": chat(stop=["a", "longer"], stop_token_ids=[5, 5, 6], include_stop_str_in_output=True),
    "stops held back": chat(stop=["a", "longer"], stop_token_ids=None),
    "bad words": chat(bad_words=["x", "y", "x"]),
    "logit bias": chat(logit_bias={"5": 200, "7": -3.5}),
    "allowed": chat(allowed_token_ids=[1, 2, 3], ignore_eos=True, min_tokens=2, max_tokens=9),
    "max_tokens": chat(max_tokens=5),
    "max_tokens of 16": chat(max_tokens=16),
    "max_completion_tokens": chat(max_completion_tokens=7, max_tokens=900),
    "max_tokens of the context": chat(max_tokens=4096),
    "logprobs": chat(logprobs=True),
    "top logprobs": chat(logprobs=True, top_logprobs=3),
    "all logprobs": chat(logprobs=True, top_logprobs=-1),
    "no logprobs": chat(logprobs=False, top_logprobs=0),
    "logprobs of ids": chat(logprobs=True, logprob_token_ids=[3, 4]),
    "prompt logprobs": chat(prompt_logprobs=2),
    "echo": chat(echo=True, logprobs=True, top_logprobs=2),
    "special tokens": chat(skip_special_tokens=True, spaces_between_special_tokens=False),
    "budget": chat(thinking_token_budget=64),
    "budget of none": chat(thinking_token_budget=-1),
    "repetition": chat(repetition_detection={"max_pattern_size": 4, "min_count": 3}),
    "interval": chat(stream=True, stream_interval=4),
    "xargs": chat(vllm_xargs={"a": 1, "b": ["x", 2]}),
    "stream": chat(stream=True),
    "stream with usage": chat(stream=True, stream_options={"include_usage": True}),
    "salt and priority": chat(cache_salt="s", priority=3, return_token_ids=True, user="u", metadata={"a": "b"}),
    "offsets": chat(return_token_offsets=True),
    "json object": chat(response_format={"type": "json_object"}),
    "text format": chat(response_format={"type": "text"}),
    "json schema": chat(response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}),
    "regex": chat(structured_outputs={"regex": "a+", "disable_any_whitespace": True}),
    "choice": chat(structured_outputs={"choice": ["a", "b"]}),
    "grammar": chat(structured_outputs={"grammar": 'root ::= "a"', "whitespace_pattern": " "}),
    "json": chat(structured_outputs={"json": SCHEMA, "unknown": 1}),
    "format over structure": chat(structured_outputs={"json": SCHEMA},
                                  response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": {}}}),
    "tools": chat(tools=[WEATHER]),
    "tools named bare": chat(tools=[BARE, WEATHER]),
    "tools none": chat(tools=[WEATHER], tool_choice="none"),
    "tools null": chat(tools=[WEATHER], tool_choice=None),
    "no tools, none": chat(tool_choice="none"),
    "tools required": chat(tools=[WEATHER, ADD], tool_choice="required"),
    "tools required, one": chat(tools=[WEATHER, BARE], tool_choice="required", parallel_tool_calls=False),
    "tool named": chat(tools=[WEATHER, ADD], tool_choice=named("add")),
    "tools strict": chat(tools=[ADD, WEATHER]),
    "tools strict, one": chat(tools=[ADD], parallel_tool_calls=False),
    "tools one at a time": chat(tools=[WEATHER], parallel_tool_calls=False),
    "tools with json": chat(tools=[WEATHER], response_format={"type": "json_object"}),
    "tools forced over json": chat(tools=[WEATHER], tool_choice="required", response_format={"type": "json_object"}),
    "tools loaded later": chat(tools=[{**WEATHER, "defer_loading": True}]),
    "tools with more": chat(tools=[{**WEATHER, "extra": 1}]),
    "thinking off": chat(chat_template_kwargs={"enable_thinking": False}),
    "thinking on": chat(chat_template_kwargs={"enable_thinking": True}),
    "thinking unsaid": chat(chat_template_kwargs={"enable_thinking": None, "unknown": "x"}),
    "tokenize": chat(chat_template_kwargs={"tokenize": True}),
    "effort none": chat(reasoning_effort="none"),
    "effort low": chat(reasoning_effort="low"),
    "effort against kwargs": chat(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}),
    "reasoning hidden": chat(include_reasoning=False),
    "documents": chat(documents=[{"title": "t", "text": "x"}]),
    "no generation prompt": chat(add_generation_prompt=False),
    "continued": ("chat", {"messages": [*HI, {"role": "assistant", "content": "Bon"}],
                           "add_generation_prompt": False, "continue_final_message": True}),
    "continued thought": ("chat", {"messages": [*HI, {"role": "assistant", "content": "<think>a"}],
                                   "add_generation_prompt": False, "continue_final_message": True}),
    "special tokens added": chat(add_special_tokens=True),
    "tool results": chat(messages=CALLED, tools=[WEATHER]),
    "tool results after text": chat(messages=[*CALLED, {"role": "assistant", "content": "So."}, *HI], tools=[WEATHER]),
    "calls without text": chat(messages=[*HI, {"role": "assistant", "tool_calls": []}, *HI]),
    "system": chat(messages=[{"role": "system", "content": "Be terse."}, *HI]),
    "system later": chat(messages=[*HI, {"role": "system", "content": "Be terse."}, *HI]),
    "developer": chat(messages=[{"role": "developer", "content": "Be terse."}, *HI]),
    "billing": chat(messages=[{"role": "system", "content": "x-anthropic-billing-header: a=1\nBe terse."}, *HI]),
    "parts": chat(messages=[{"role": "user", "content": [{"type": "text", "text": "Say"}, {"type": "text", "text": "hi",
                             "cache_control": {"type": "ephemeral"}}]}]),
    "parts of many kinds": chat(messages=[{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
                                          {"role": "user", "content": ["plain", {"type": "text", "text": "x"}]}]),
    "named users": chat(messages=[{"role": "user", "name": "ann", "content": "Hi"}]),
    "unknown role": chat(messages=[{"role": "critic", "content": "Hmm"}, *HI]),
    "old reasoning": chat(messages=[*HI, {"role": "assistant", "content": "a", "reasoning_content": "t"}, *HI]),
    "unicode": chat(messages=[{"role": "user", "content": "漢字 é 🙂 \u2028 <|im_end|> <think>"}]),
    "long": chat(messages=[{"role": "user", "content": "there " * 1500}]),
    "text": text(),
    "text max_tokens": text(max_tokens=32),
    "text null max_tokens": text(max_tokens=None),
    "text in a list": text(["Once upon"]),
    "text of special tokens": text("<|im_start|>user\nhi<|im_end|>", add_special_tokens=False),
    "text logprobs": text(logprobs=2),
    "text logprobs as a flag": text(logprobs=True),
    "text echo": text(echo=True, logprobs=1, max_tokens=0),
    "text prompt logprobs": text(prompt_logprobs=1, temperature=0),
    "text ids' logprobs": text(logprobs=1, logprob_token_ids=[4]),
    "text n": text(n=2, stop=["."], seed=1, stream=True, stream_options={"include_usage": True}),
    "text json": text(response_format={"type": "json_object"}),
    "text offsets": text(return_token_offsets=True, skip_special_tokens=False),
    "ids": text([5, 6, 7]),
    "ids in a list": text([[5, 6, 7]], max_tokens=9, seed=3, min_tokens=2, stop_token_ids=[9], stop=["x"], logprobs=1),
    "ids offsets": text([5, 6], return_token_offsets=True, stream=True, temperature=0.3),
    "ids, special tokens": text([1, 85], add_special_tokens=False, echo=True, logprobs=0),
    "ids, prompt logprobs": text([5, 6], prompt_logprobs=1, return_token_ids=True, cache_salt="s", priority=2),
    "ids of the context": text([5] * 4095, max_tokens=4000),
    "least and most": chat(min_tokens=3, max_completion_tokens=3, stop_token_ids=[7], ignore_eos=True, seed=1),
}  # fmt: skip


def anthropic(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "messages", {"model": "tiny", "messages": HI, "max_tokens": 40, **fields}


SEARCH = {"name": "search", "description": "Look it up.", "input_schema": {"properties": {"q": {"type": "string"}}}}
NOW = {"name": "now", "input_schema": {"type": "object"}, "strict": True}
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "Weather?"}, {"type": "text", "text": "In Oslo."}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "A call.", "signature": "x"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "a", "name": "search", "input": {"q": "Oslo"}},
            {"type": "tool_use", "id": "b", "name": "now", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "sun"}, {"type": "text"}]},
            {"type": "tool_result", "tool_use_id": "b", "content": "12:00", "is_error": False},
            {"type": "text", "text": "Go on."},
        ],
    },
]

REQUESTS |= {
    "messages": anthropic(),
    "messages, streamed": anthropic(stream=True),
    "messages, sampling": anthropic(temperature=0.3, top_p=0.8, top_k=4, stop_sequences=["END", "."], metadata={}),
    "messages, xargs": anthropic(vllm_xargs={"a": 1}, cache_salt="s"),
    "messages, system": anthropic(system="Be terse."),
    "messages, system blocks": anthropic(system=[
        {"type": "text", "text": "x-anthropic-billing-header: a"}, {"type": "text", "text": "Be terse."},
        {"type": "text", "text": " Please.", "cache_control": {"type": "ephemeral"}}]),
    "messages, system later": anthropic(messages=[*HI, {"role": "system", "content": "Now briefly."}, *HI]),
    "messages, system later in blocks": anthropic(
        messages=[*HI, {"role": "system", "content": [{"type": "text", "text": "Now"}]},
                  {"role": "system", "content": "x-anthropic-billing-header: b"}, *HI]),
    "messages, blocks": anthropic(messages=BLOCKS, tools=[SEARCH, NOW]),
    "messages, assistant's result": anthropic(messages=[*HI, {"role": "assistant", "content": [
        {"type": "tool_result", "tool_use_id": "a", "content": "x"}, {"type": "text", "text": ""}]}, *HI]),
    "messages, nothing said": anthropic(messages=[*HI, {"role": "assistant", "content": []},
                                                  {"role": "user", "content": []}, *HI]),
    "messages, tools": anthropic(tools=[SEARCH]),
    "messages, no tools": anthropic(tools=[]),
    "messages, tools loaded later": anthropic(tools=[{**SEARCH, "defer_loading": True}]),
    "messages, any tool": anthropic(tools=[SEARCH, NOW], tool_choice={"type": "any"}),
    "messages, one tool at a time": anthropic(tools=[SEARCH],
                                              tool_choice={"type": "auto", "disable_parallel_tool_use": True}),
    "messages, named tool": anthropic(tools=[SEARCH, NOW], tool_choice={"type": "tool", "name": "now"}),
    "messages, tools none": anthropic(tools=[SEARCH], tool_choice={"type": "none"}),
    "messages, tools changed": anthropic(
        tools=[SEARCH, {**NOW, "defer_loading": True}],
        messages=[*HI, {"role": "system", "content": [
            {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "search"}},
            {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "now"}},
            {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {**SEARCH, "name": "find"}}},
        ]}, *HI]),
    "messages, thinking": anthropic(thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2000),
    "messages, thinking off": anthropic(thinking={"type": "disabled"}),
    "messages, thinking adaptive": anthropic(thinking={"type": "adaptive"}, output_config={"effort": "high"}),
    "messages, format": anthropic(output_config={"format": {"type": "json_schema", "schema": SCHEMA}}),
    "messages, kwargs": anthropic(chat_template_kwargs={"enable_thinking": False}),
}  # fmt: skip

# What vLLM refuses must be refused here as well, with the same status.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "too long": chat(messages=[{"role": "user", "content": "there " * 4200}]),
    "far too long": chat(messages=[{"role": "user", "content": "x" * 400_000}]),
    "cap over the context": chat(max_tokens=4097),
    "completion cap over the context": chat(max_completion_tokens=5000, max_tokens=1),
    "text cap over the context": text(max_tokens=5000),
    "beams": chat(use_beam_search=True),
    "temperature": chat(temperature=2.5),
    "top_p": chat(top_p=0),
    "top_k": chat(top_k=-2),
    "min_p": chat(min_p=1.5),
    "presence": chat(presence_penalty=3),
    "repetition": chat(repetition_penalty=0),
    "n of none": chat(n=0),
    "n, greedy": chat(n=2, temperature=0),
    "empty stop": chat(stop=[""]),
    "many stops": chat(stop=["a", "b", "c", "d", "e"]),
    "empty bad word": chat(bad_words=[""]),
    "bias of a word": chat(logit_bias={"word": 1}),
    "min above max": chat(min_tokens=9, max_tokens=3),
    "empty tools": chat(tools=[]),
    "choice without tools": chat(tool_choice="required"),
    "unknown tool": chat(tools=[WEATHER], tool_choice=named("other")),
    "wrong choice": chat(tools=[WEATHER], tool_choice="sometimes"),
    "both formats of logprobs": chat(top_logprobs=2),
    "ids without logprobs": chat(logprob_token_ids=[1]),
    "prompt logprobs, streamed": chat(stream=True, prompt_logprobs=1),
    "two constraints": chat(structured_outputs={"regex": "a", "choice": ["b"]}),
    "no constraint": chat(structured_outputs={}),
    "constraint and tool": chat(structured_outputs={"regex": "a"}, tools=[WEATHER], tool_choice=named("get_weather")),
    "schema without schema": chat(response_format={"type": "json_schema"}),
    "template": chat(chat_template="{{ messages }}"),
    "template in kwargs": chat(chat_template_kwargs={"chat_template": "x"}),
    "continued and prompted": chat(continue_final_message=True),
    "continued and cut by the template": (
        "chat", {"messages": [*HI, {"role": "assistant", "content": "<think>a</think>b"}],
                 "add_generation_prompt": False, "continue_final_message": True}),
    "no messages": chat(messages=[]),
    "message without role": chat(messages=[{"content": "x"}]),
    "custom tool call": chat(messages=[{"role": "assistant", "tool_calls": [{"id": "a", "type": "custom",
                             "custom": {"name": "x", "input": "y"}}]}]),
    "unknown part": chat(messages=[{"role": "user", "content": [{"type": "poem", "poem": "x"}]}]),
    "effort": chat(reasoning_effort="enormous"),
    "budget": chat(thinking_token_budget=-2),
    "interval": chat(stream_interval=0),
    "type": chat(temperature="hot"),
    "empty text": text(""),
    "no ids": text([]),
    "ids over the context": text([5] * 4097),
    "ids all over the context": text([5] * 4096),
    "ids cap over the context": text([5], max_tokens=5000),
    "messages without a cap": ("messages", {"model": "tiny", "messages": HI}),
    "messages without a model": ("messages", {"messages": HI, "max_tokens": 5}),
    "messages, cap of none": anthropic(max_tokens=0),
    "messages, cap over the context": anthropic(max_tokens=5000),
    "messages, small budget": anthropic(thinking={"type": "enabled", "budget_tokens": 5}),
    "messages, no budget": anthropic(thinking={"type": "enabled"}),
    "messages, large budget": anthropic(thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=1024),
    "messages, nameless tool": anthropic(tools=[SEARCH], tool_choice={"type": "tool"}),
    "messages, unknown block": anthropic(messages=[{"role": "user", "content": [{"type": "poem"}]}]),
    "messages, unknown role": anthropic(messages=[{"role": "tool", "content": "x"}]),
    "messages, change by a user": anthropic(messages=[{"role": "user", "content": [
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "search"}}]}]),
    "messages, change in system": anthropic(system=[
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "search"}}]),
    "messages, change of nothing": anthropic(messages=[{"role": "system", "content": [{"type": "tool_addition"}]}]),
    "messages, removal of a definition": anthropic(messages=[{"role": "system", "content": [
        {"type": "tool_removal", "tool": {"type": "tool_definition", "definition": SEARCH}}]}]),
    "messages, change of an unknown tool": anthropic(messages=[*HI, {"role": "system", "content": [
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "other"}}]}]),
    "messages, many stops": anthropic(stop_sequences=["a", "b", "c", "d", "e"]),
    "ids' logprobs, echoed": text(logprobs=1, logprob_token_ids=[4], echo=True, max_tokens=0),
}  # fmt: skip
