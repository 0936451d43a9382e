"""Run by the vLLM environment's Python: our parser sessions beside vLLM's own derenderer, on the same synthetic tokens.

    python tests/e2e/parser_matrix.py MODEL

prints one JSON object: for each parser family, option and chunking, what our stream said and what the derender
service's code says, delta by delta; and both whole answers. The tokenizer is the tiny model's, with the tokens that a
family's parser looks for.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.scale_out.token_in_token_out.protocol import (
    DerenderStreamState,
    GenerateTokensResponse,
    GenerateTokensStreamResponse,
    ParseContext,
)
from vllm.renderers.online_derenderer import OnlineDerenderer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from coordinator.derender.vllm_detokenizer import Detokenized
from coordinator.derender.vllm_parsers import Parsers
from envelope.derender import derendered_chunk
from envelope.formats import Format

EOS = 2
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
    for name in ("get_weather", "get_time")
]
ROME, OSLO = '{"city": "Rome", "days": 2}', '{"city": "Oslo"}'
HERMES = (
    f'<tool_call>\n{{"name": "get_weather", "arguments": {ROME}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "get_time", "arguments": {OSLO}}}\n</tool_call>'
)
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ONE, ONE_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
DEEPSEEK = [BEGIN, END, ONE, ONE_END, SEP]
LISTED = f'[{{"name": "get_weather", "arguments": {ROME}}}, {{"name": "get_time", "arguments": {OSLO}}}]'

# name: tool parser, reasoning parser, tokens that the tokenizer lacks, what the model says
FAMILIES: dict[str, tuple[str, str | None, list[str], str]] = {
    "hermes": ("hermes", "qwen3", [], f"<think>\nhm\n</think>\n\nLook: {HERMES}"),
    "llama3_json": (
        "llama3_json",
        None,
        ["<|python_tag|>"],
        f'{{"name": "get_weather", "parameters": {ROME}}}; {{"name": "get_time", "parameters": {OSLO}}}',
    ),
    "pythonic": ("pythonic", None, [], '[get_weather(city="Rome", days=2), get_time(city="Oslo")]'),
    "deepseek": (
        "deepseek_v3",
        "deepseek_r1",
        DEEPSEEK,
        f"<think>hm</think>Look:{BEGIN}{ONE}function{SEP}get_weather\n```json\n{ROME}\n```{ONE_END}\n"
        f"{ONE}function{SEP}get_time\n```json\n{OSLO}\n```{ONE_END}{END}",
    ),
    "granite": (
        "granite",
        "granite",
        ["<|tool_call|>"],
        f"Here is my thought process: hm Here is my response: <|tool_call|>{LISTED}",
    ),
    "granite4": ("granite4", None, [], f"Look: {HERMES}"),
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
OPTIONS: dict[str, dict[str, Any]] = {
    "auto": {},
    "none": {"tool_choice": "none"},
    "no parallel calls": {"parallel_tool_calls": False},
    "reasoning left out": {"include_reasoning": False},
    "no thinking": {"chat_template_kwargs": {"enable_thinking": False}},
}
# Forced calls are JSON of another shape than what the model says unforced.
FORCED: dict[str, tuple[dict[str, Any], str]] = {
    "required": (
        {"tool_choice": "required"},
        f'[{{"name": "get_weather", "parameters": {ROME}}}, {{"name": "get_time", "parameters": {OSLO}}}]',
    ),
    "named": ({"tool_choice": NAMED}, ROME),
}


def main(model: str) -> None:
    found = {name: matrix(model, *family) for name, family in FAMILIES.items()}
    print(json.dumps(found))


def matrix(model: str, tool: str, reasoning: str | None, extra: list[str], text: str) -> dict[str, Any]:
    parsers = Parsers(tokenizer=tokenizer(model, extra), tool_parser=tool, reasoning_parser=reasoning)
    derenderer = derenderer_of(parsers)
    cases = {name: (options, text, "stop") for name, options in OPTIONS.items()}
    cases |= {name: (options, said, "stop") for name, (options, said) in FORCED.items()}
    cases |= {"cut in a call": ({}, text[: len(text) * 2 // 3], "length"), "cut at once": ({}, text[:9], "length")}
    return {name: case(parsers, derenderer, *each) for name, each in cases.items()}


def case(
    parsers: Parsers, derenderer: OnlineDerenderer, options: dict[str, Any], text: str, finish: str
) -> dict[str, Any]:
    ids = parsers.tokenizer.encode(text, add_special_tokens=False)
    prompt = parsers.tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    context = {"tools": TOOLS, "tool_choice": "auto", "chat_template_kwargs": {"enable_thinking": True}, **options}
    job = {"id": "x", "context": context, "prompt": prompt, "n": 1, "decoding": None}
    asked = ChatCompletionRequest(messages=[], **context)
    found: dict[str, Any] = {"whole": whole(parsers, derenderer, job, asked, ids, text, finish)}
    for size in (1, 3, len(ids)):
        pieces = [ids[at : at + size] for at in range(0, len(ids), size)]
        theirs = attempt(service, derenderer, asked, prompt, pieces, finish)
        found[f"text by {size if size < len(ids) else 'all'}"] = [attempt(ours, parsers, job, pieces, finish), theirs]
        tokens = {**job, "decoding": {"skip_special_tokens": False}}
        found[f"tokens by {size if size < len(ids) else 'all'}"] = [
            attempt(ours, parsers, tokens, pieces, finish),
            theirs,
        ]
    return found


def attempt(function: Any, *args: Any) -> Any:
    try:
        return function(*args)
    except Exception as error:  # a parser may raise over what no model would say; then both have to
        return type(error).__name__


def ours(parsers: Parsers, job: dict[str, Any], pieces: list[list[int]], finish: str) -> list[Any]:
    stream = parsers.stream(job)
    text_of = Detokenized(parsers.tokenizer, {**job, "decoding": {"skip_special_tokens": False}})
    said = []
    for choice in chunks(pieces, finish):
        given = dict(choice)
        if job["decoding"] is None:
            given["text"] = text_of.choice(dict(choice))["text"]
        made = stream.chunk({"request_id": "g", "choices": [given]})
        said.append(None if made is None else told(made["choices"][0]))
    return said


def service(
    derenderer: OnlineDerenderer, asked: ChatCompletionRequest, prompt: list[int], pieces: list[list[int]], finish: str
) -> list[Any]:
    state, said = DerenderStreamState(), []
    for choice in chunks(pieces, finish):
        chunk = {"request_id": "g", "output_mode": "tokens", "choices": [choice]}
        made, state = derenderer._derender_chat_stream_parsed(
            derenderer.parser, "tiny", GenerateTokensStreamResponse(**chunk), state, asked, len(prompt), prompt
        )
        said.append(told(derendered_chunk(Format.CHAT, chunk, made.model_dump(mode="json"))["choices"][0]))
    return said


def whole(
    parsers: Parsers,
    derenderer: OnlineDerenderer,
    job: dict[str, Any],
    asked: ChatCompletionRequest,
    ids: list[int],
    text: str,
    finish: str,
) -> list[Any]:
    ends = [*ids, EOS] if finish == "stop" else ids
    choice = {"index": 0, "token_ids": ends, "finish_reason": finish, "stop_reason": None, "logprobs": None}
    reply = {"request_id": "g", "output_mode": "tokens", "choices": [choice], "prompt_token_ids": job["prompt"]}
    (made,) = derenderer._derender_chat(GenerateTokensResponse(**reply), asked, job["prompt"])
    by_text = parsers.whole(job, {**reply, "choices": [{**choice, "text": text}]})
    by_tokens = parsers.whole({**job, "decoding": {"skip_special_tokens": False}}, reply)
    said = [(one["choices"][0]["message"], one["choices"][0]["finish_reason"]) for one in (by_text, by_tokens)]
    # What a worker itself makes of it, asked for output_mode: derender.
    output = SimpleNamespace(text=text, token_ids=ends, finish_reason=finish)
    request = ParseContext(**job["context"]).to_chat_request()
    ((inline, reason),) = derenderer._derender_text_choices([output], request, 0, job["prompt"])
    said.append((inline.model_dump(mode="json"), reason))
    said.append((made.message.model_dump(mode="json"), made.finish_reason))
    return [blanked(list(each)) for each in said]


def chunks(pieces: list[list[int]], finish: str) -> list[dict[str, Any]]:
    """The chunks of one choice; a stop comes with the token that is one, and a cut alone."""
    plain = {"index": 0, "finish_reason": None, "stop_reason": None, "logprobs": None}
    last = {**plain, "token_ids": [EOS] if finish == "stop" else [], "finish_reason": finish}
    return [*[{**plain, "token_ids": piece} for piece in pieces], last]


def told(choice: dict[str, Any]) -> list[Any]:
    delta = {name: value for name, value in (choice["delta"] or {}).items() if value}
    return [blanked(delta), choice["finish_reason"]]


def blanked(value: Any) -> Any:
    """A copy without the random ids of calls, and without what is null."""
    if isinstance(value, dict):
        return {key: blanked(item) for key, item in value.items() if key not in ("id", "type") and item is not None}
    return [blanked(item) for item in value] if isinstance(value, list) else value


def tokenizer(model: str, extra: list[str]) -> str:
    folder = tempfile.mkdtemp()
    made = AutoTokenizer.from_pretrained(model)
    made.add_tokens(extra, special_tokens=False)
    made.save_pretrained(folder)
    (Path(folder) / "config.json").write_text((Path(model) / "config.json").read_text())
    return folder


def derenderer_of(parsers: Parsers) -> OnlineDerenderer:
    """The derender service's own code, without the server around it."""
    derenderer = object.__new__(OnlineDerenderer)
    derenderer.renderer = SimpleNamespace(get_tokenizer=lambda: parsers.tokenizer)
    derenderer.model_config, derenderer.parser = parsers.model_config, parsers.parser_cls
    derenderer.enable_auto_tools, derenderer.use_harmony = True, False
    derenderer._eos_token_id, derenderer._model_eos_token_ids = EOS, frozenset([EOS])
    derenderer.chat_template, derenderer.chat_template_content_format = None, "auto"
    derenderer.default_chat_template_kwargs, derenderer.reasoning_effort_map = {}, {}
    return derenderer


if __name__ == "__main__":
    main(sys.argv[1])
