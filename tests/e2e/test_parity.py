"""What we rebuild from tokens is what the worker's own endpoint answers to the same request, key by key."""

from __future__ import annotations

import json
import re
import uuid
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.conftest import VLLM_VERSION
from tests.e2e.conversations import CONVERSATIONS, conversation
from tests.e2e.lineups import LINEUPS
from tests.e2e.wire import post

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.conftest import Coordinator, Workers
    from tests.e2e.wire import Reply

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(VLLM_VERSION == "0.32", reason="vLLM 0.32 has no derender"),
]

ASKED: dict[str, dict[str, Any]] = {name: talk.body() for name, talk in CONVERSATIONS.items()} | {
    "logprobs": CONVERSATIONS["accents"].body(logprobs=True, top_logprobs=2),
    "logprobs of the sampled token": CONVERSATIONS["plain"].body(logprobs=True, top_logprobs=0),
    "logprobs of reasoning": CONVERSATIONS["reasoning"].body(logprobs=True, top_logprobs=1),
    "n": CONVERSATIONS["reasoning"].body(n=2, temperature=1, top_k=1, logprobs=True),
    "cut short": CONVERSATIONS["numbers"].body(max_tokens=16),
    "min_tokens": CONVERSATIONS["plain"].body(min_tokens=30, max_tokens=40),
    "cut in the reasoning": CONVERSATIONS["reasoning"].body(max_tokens=5),
    "cut in a tool call": CONVERSATIONS["tool call"].body(max_tokens=12),
    "stop string": conversation("Say stop in the middle.").body(stop=["STOP", "never"]),
    "stop string kept": conversation("Say stop in the middle.").body(stop="STOP", include_stop_str_in_output=True),
    "stop string of two choices": conversation("Say stop in the middle.").body(
        stop=["STOP"], n=2, temperature=1, top_k=1, logprobs=True
    ),
    "stop string beside a prompt's logprobs": conversation("Say stop in the middle.").body(
        stop=["STOP"], prompt_logprobs=1, return_token_ids=True
    ),
    "stop string beside token ids": conversation("Say stop in the middle.").body(stop=["STOP"], return_token_ids=True),
    "end token as a stop token": CONVERSATIONS["plain"].body(stop_token_ids=[2], ignore_eos=True),
    "stop token": CONVERSATIONS["plain"].body(stop_token_ids=[2]),
    "named tool": CONVERSATIONS["tool call"].body(
        tool_choice={"type": "function", "function": {"name": "get_weather"}}
    ),
    "required tool": CONVERSATIONS["tool call"].body(tool_choice="required"),
    "no tool": CONVERSATIONS["tool call"].body(tool_choice="none"),
    "reasoning left out": CONVERSATIONS["reasoning"].body(include_reasoning=False),
    "no thinking by effort": CONVERSATIONS["plain"].body(reasoning_effort="none"),
    "token ids": CONVERSATIONS["plain"].body(return_token_ids=True),
    "json": CONVERSATIONS["json"].body(response_format={"type": "json_object"}),
    "penalties": CONVERSATIONS["numbers"].body(
        max_tokens=80, presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.2
    ),
    "logit_bias": CONVERSATIONS["plain"].body(logit_bias={"36": 50}, max_tokens=8),
    "json schema": CONVERSATIONS["json"].body(
        max_tokens=40,
        response_format={
            "type": "json_schema",
            "json_schema": {
                "name": "ok",
                "schema": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]},
            },
        },
    ),
    "one of two": CONVERSATIONS["plain"].body(structured_outputs={"choice": ["Paris", "The capital"]}),
    "prompt_logprobs": CONVERSATIONS["plain"].body(prompt_logprobs=1),
}
# What the generate route does not tell, or what is random.
ELSEWHERE = {"id", "created", "system_fingerprint", "completion_tokens_details", "created_cache_tokens"}


@pytest.fixture
def derender(workers: Workers, coordinator: Callable[[dict], Coordinator]) -> Coordinator:
    return coordinator(LINEUPS["derender"].config(workers.render.url, workers.prefill.url, workers.decode.url))


@pytest.fixture
def text(workers: Workers, coordinator: Callable[[dict], Coordinator]) -> Coordinator:
    return coordinator(LINEUPS["text"].config(workers.render.url, workers.prefill.url, workers.decode.url))


@pytest.mark.parametrize("case", ASKED)
def test_a_derendered_chat_answer_equals_the_worker_s_own(derender: Coordinator, workers: Workers, case: str) -> None:
    ours, alone = both(derender, workers, ASKED[case])
    assert comparable(ours.body) == comparable(alone.body)
    assert ours.status == alone.status == 200


@pytest.mark.parametrize("name", ["openai", "openai-ids"])
@pytest.mark.parametrize(
    "case", ["japanese reasoning", "logprobs", "two tool calls", "cut short", "stop string", "n", "prompt_logprobs"]
)
def test_an_answer_that_passes_through_equals_the_worker_s_own(
    workers: Workers, coordinator: Callable[[dict], Coordinator], case: str, name: str
) -> None:
    config = LINEUPS[name].config(workers.render.url, workers.prefill.url, workers.decode.url)
    ours, alone = both(coordinator(config), workers, ASKED[case])
    random = {"id", "created", "created_cache_tokens"}  # the last is of blocks that decode computed itself
    assert comparable(ours.body, without=random) == comparable(alone.body, without=random)


@pytest.mark.parametrize("case", ["plain", "logprobs", "reasoning", "two tool calls", "cut short", "stop string", "n"])
def test_a_derendered_stream_adds_up_to_the_worker_s_own(derender: Coordinator, workers: Workers, case: str) -> None:
    asked = ASKED[case] | {"stream": True, "stream_options": {"include_usage": True}}
    ours, alone = both(derender, workers, asked)
    assert summed(ours.events) == summed(alone.events)
    assert comparable(ours.events[-1]) == comparable(alone.events[-1]), "the chunk with the usage"


def test_a_text_stream_has_the_chunks_of_a_worker_without_parsers(text: Coordinator, workers: Workers) -> None:
    """With nothing to parse, each chunk equals the worker's; the plain answer has neither reasoning nor tool calls."""
    asked = ASKED["logprobs"] | {"stream": True, "stream_options": {"include_usage": True}}
    ours, alone = both(text, workers, asked)
    assert summed(ours.events) == summed(alone.events)
    assert [set(event) for event in ours.events[:1]] == [set(event) for event in alone.events[:1]]
    assert comparable(ours.events[0]) == comparable(alone.events[0]), "the chunk with the role"
    assert comparable(ours.events[-1]) == comparable(alone.events[-1]), "the chunk with the usage"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"logprobs": 2}, {"max_tokens": 40, "stop": ["17"]}, {"n": 2, "temperature": 1, "top_k": 1}],
    ids=["default", "logprobs", "stop", "n"],
)
def test_a_completion_equals_the_worker_s_own(
    text: Coordinator, workers: Workers, fields: dict[str, Any], stream: bool
) -> None:
    prompt = "<|im_start|>user\nCount to twenty.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    asked = {"model": "tiny", "prompt": prompt, "temperature": 0, "stream": stream} | fields
    ours, alone = both(text, workers, asked, "/v1/completions")
    if stream:
        texts = [["".join(t) for t in texts_by_index(r.events)] for r in (ours, alone)]
        assert texts[0] == texts[1]
        assert comparable(ours.events[0]).keys() == comparable(alone.events[0]).keys()
    else:
        assert comparable(ours.body) == comparable(alone.body)


def both(
    coordinator: Coordinator, workers: Workers, asked: dict[str, Any], path: str = "/v1/chat/completions"
) -> list[Reply]:
    """Return our answer and the worker's own; each request has a salt of its own, so that none finds a warm cache."""
    return [post(url + path, asked | {"cache_salt": uuid.uuid4().hex}) for url in (coordinator.url, workers.decode.url)]


def comparable(value: Any, without: set[str] = ELSEWHERE) -> Any:
    """Return a copy without some keys; the ids of tool calls keep their shape only."""
    if isinstance(value, dict):
        return {key: comparable(item, without) for key, item in value.items() if key not in without or "type" in value}
    if isinstance(value, list):
        return [comparable(item, without) for item in value]
    if isinstance(value, str):
        return re.sub(r"^chatcmpl-tool-[0-9a-f]{16}$", "chatcmpl-tool-X", value)
    return value


def summed(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Put a chat stream together: text, reasoning, logprobs, calls and the end of each choice."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for part in event["choices"]:
            whole = choices.setdefault(part["index"], {"content": "", "reasoning": "", "logprobs": [], "calls": {}})
            delta = part["delta"]
            whole["content"] += delta.get("content") or ""
            whole["reasoning"] += delta.get("reasoning") or ""
            whole["logprobs"] += (part.get("logprobs") or {}).get("content") or []
            for call in delta.get("tool_calls") or []:
                name, arguments = whole["calls"].get(call["index"], ("", ""))
                function = call["function"]
                whole["calls"][call["index"]] = (
                    name + (function.get("name") or ""),
                    arguments + (function.get("arguments") or ""),
                )
            if part.get("finish_reason"):
                assert "finish_reason" not in whole
                whole |= {key: part[key] for key in ("finish_reason", "stop_reason")}
    for whole in choices.values():
        whole["calls"] = {i: (name, json.loads(arguments)) for i, (name, arguments) in whole["calls"].items()}
    return choices


def texts_by_index(events: list[dict[str, Any]]) -> list[list[str]]:
    texts: dict[int, list[str]] = {}
    for event in events:
        for choice in event["choices"]:
            texts.setdefault(choice["index"], []).append(choice["text"])
    return [texts[index] for index in sorted(texts)]
