"""Answers that are almost right: an honest status or a broken stream, never a 500, silence, or a false end."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.chaos.front import SHAPES, Answer, answers, fronted, leaks, post, say, wrong
from tests.chaos.mutate import bytes_mutant, json_mutant, text_of
from tests.chaos.report import LINES
from tests.chaos.stage import Lines
from tests.chaos.test_fuzz_front import counted

if TYPE_CHECKING:
    import random

_LIMITS = {"first_byte_timeout": "300ms", "idle_timeout": "300ms"}
_CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
_TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
_ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", _CHAT),
    ("/v1/chat/completions", {**_CHAT, "logprobs": True, "top_logprobs": 2, "tools": _TOOLS, "return_token_ids": True}),
    ("/v1/chat/completions", {**_CHAT, "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"model": "tiny", "prompt": "hi", "logprobs": 1, "echo": True}),
    ("/v1/completions", {"model": "tiny", "prompt": "hi", "stream": True}),
    ("/v1/responses", {"model": "tiny", "input": "hi"}),
    ("/v1/responses", {"model": "tiny", "input": "hi", "stream": True}),
    ("/v1/messages", {"model": "tiny", "max_tokens": 5, "messages": _CHAT["messages"]}),
    ("/v1/messages", {"model": "tiny", "max_tokens": 5, "messages": _CHAT["messages"], "stream": True}),
    ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}, "output_mode": "text", "stream": True}),
    ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}, "output_mode": "derender"}),
]
_ENDS = (b"data: [DONE]", b"data:[DONE]", b"message_stop", b"response.completed", b"response.incomplete",
         b"response.failed")  # fmt: skip


def false(answer: Answer) -> str:
    """Return what no answer may be, or ""."""
    if why := wrong(answer):
        return why
    if answer.status != 200 or not answer.whole:
        return ""
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        return "" if any(end in answer.body for end in _ENDS) else f"a proper end without an end mark {answer.body!r}"
    try:
        json.loads(answer.body)
    except ValueError:
        return f"a 200 that is no JSON: {answer.body[:200]!r}"
    return ""


@pytest.mark.parametrize("how", ["values", "bytes"])
@pytest.mark.parametrize("shape", SHAPES)
async def test_an_answer_that_is_almost_right_is_told_for_what_it_is(
    rng: random.Random, full: bool, shape: str, how: str
) -> None:
    """Each value of an answer, and each byte of its head, its framing and its events, may be anything."""
    count, lines, faults = counted(full, 100, 6_000), Lines(), list[str]()
    said: list[bytes] = []

    def twist_body(leg: str, body: Any) -> Any:
        if leg != target or rng.random() < 0.4:
            return body
        twisted = json_mutant(body, rng)
        said.append(text_of(twisted))
        return twisted

    def twist_raw(leg: str, raw: bytes) -> bytes:
        if leg != target:
            return raw
        said.append(bytes_mutant(raw, rng))
        return said[-1]

    with lines.listening():
        async with fronted(shape, **_LIMITS) as (at, parrot):
            if how == "values":
                parrot.twist_body = twist_body
            else:
                parrot.twist_raw = twist_raw
            for _ in range(count):
                target = rng.choice(("render", "prefill", "decode", "decode"))
                path, body = rng.choice(_ASKED)
                said.clear()
                try:
                    got = answers(await say(at, post(path, text_of(body), "Connection: close")))
                except TimeoutError:
                    faults.append(f"no answer to {path} {body} when {target} said {said}")
                    continue
                whys = [why for answer in got if (why := false(answer))]
                whys += [f"{kind}: {what}" for kind, what in (await leaks(at, lines)).items()]
                faults += [f"{why}\n  {path} {body}\n  {target} said {said}" for why in whys]
    LINES.append(f"answers to {shape}, {how}: {count} inputs, {len(faults)} wrong")
    assert faults == []
