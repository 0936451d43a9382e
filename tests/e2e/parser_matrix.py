"""Run by the vLLM environment's Python: our parser sessions beside vLLM's own derenderer, on the same synthetic tokens.

    python tests/e2e/parser_matrix.py MODEL

prints one JSON object: for each parser family, option and chunking, what our stream said, what a worker's own chat
route would have sent and, but for stop strings, which it refuses in streams, what the derender service's code says,
delta by delta; and all whole answers. The tokenizer is the tiny model's, with the tokens that a family's
parser looks for.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mistral_common
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.stream_processor import ChatStreamProcessor
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.scale_out.token_in_token_out.protocol import (
    DerenderStreamState,
    GenerateTokensResponse,
    GenerateTokensStreamResponse,
    ParseContext,
)
from vllm.renderers.online_derenderer import OnlineDerenderer
from vllm.sampling_params import SamplingParams
from vllm.tokenizers.mistral import MistralTokenizer
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from coordinator.derender.vllm_parsers import Parsers
from envelope.derender import derendered_chunk, text_body
from envelope.formats import Format
from steps.stop_search import StopSearch

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
    # Of these, the version of the tokenizer takes the place of the tokens that it lacks.
    "mistral v3": (
        "mistral",
        None,
        ["v3"],
        f'Look:[TOOL_CALLS][{{"name": "get_weather", "arguments": {ROME}}}, '
        f'{{"name": "get_time", "arguments": {OSLO}}}]',
    ),
    "mistral v13": (
        "mistral",
        "mistral",
        ["v13"],
        f"[THINK]hm[/THINK]Look:[TOOL_CALLS]get_weather[ARGS]{ROME}[TOOL_CALLS]get_time[ARGS]{OSLO}",
    ),
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

# "Oslo" is inside of the second call of every family, "Rome" of the first.
STOPS: dict[str, dict[str, Any]] = {
    "stop string": {"stop": ["never", "Oslo"]},
    "stop string kept": {"stop": ["Oslo"], "include_stop_str_in_output": True},
    "stop string that never comes": {"stop": ["Milan"]},
}


def main(model: str) -> None:
    found = {name: matrix(model, *family) for name, family in FAMILIES.items()}
    print(json.dumps(found))


def matrix(model: str, tool: str, reasoning: str | None, extra: list[str], text: str) -> dict[str, Any]:
    folder = mistral_s(extra[0]) if tool == "mistral" else tokenizer(model, extra)
    parsers = Parsers(tokenizer=folder, tool_parser=tool, reasoning_parser=reasoning)
    derenderer = derenderer_of(parsers)
    cases = {name: (options, text, "stop", {}) for name, options in OPTIONS.items()}
    cases |= {name: (options, said, "stop", {}) for name, (options, said) in FORCED.items()}
    cases |= {
        "cut in a call": ({}, text[: len(text) * 2 // 3], "length", {}),
        "cut at once": ({}, text[:9], "length", {}),
        "reasoning never closed": ({}, re.split(r"</think>|\[/THINK\]", text)[0], "stop", {}),
    }
    early = ids_of(parsers, text[: text.index("Rome") + 6])
    late = {"stop": ["Rome", "slo"], "min_tokens": len(early)}
    cases |= {
        name: ({}, text, "stop", stops) for name, stops in (STOPS | {"stop strings, one too early": late}).items()
    }
    found = {name: case(parsers, derenderer, *each) for name, each in cases.items()}
    return found | {"two choices": several(parsers, derenderer, [text, text[: len(text) // 2]])}


def ids_of(parsers: Parsers, text: str) -> list[int]:
    """The tokens of what a model says; Mistral's tokenizers take no text for one of their control tokens."""
    if not isinstance(parsers.tokenizer, MistralTokenizer):
        return list(parsers.tokenizer.encode(text, add_special_tokens=False))
    controls, ids = parsers.tokenizer.get_vocab(), list[int]()
    for piece in re.split(r"(\[/?[A-Z_]+\])", text):
        one = [controls[piece]] if piece in controls else parsers.tokenizer.encode(piece, add_special_tokens=False)
        ids += one
    return ids


def case(
    parsers: Parsers,
    derenderer: OnlineDerenderer,
    options: dict[str, Any],
    text: str,
    finish: str,
    stops: dict[str, Any],
) -> dict[str, Any]:
    ids = ids_of(parsers, text)
    job, asked = job_of(parsers, options), ChatCompletionRequest(messages=[], **context_of(options), **stops)
    tokens = {**job, "decoding": {"skip_special_tokens": False, **stops}}
    found: dict[str, Any] = {"whole": whole(parsers, derenderer, job, tokens, asked, ids, finish)}
    for size in (1, 3, len(ids)):
        made = chunks([ids[at : at + size] for at in range(0, len(ids), size)], finish)
        texts = engine(parsers, tokens, made)
        theirs = [attempt(coupled, parsers, asked, job, texts)]
        if not stops:
            theirs.append(attempt(service, derenderer, asked, job["prompt"], made))
        by = size if size < len(ids) else "all"
        found[f"text by {by}"] = [attempt(ours, parsers, job, texts), *theirs]
        found[f"tokens by {by}"] = [attempt(ours, parsers, tokens, made), *theirs]
    return found


def several(parsers: Parsers, derenderer: OnlineDerenderer, texts: list[str]) -> dict[str, Any]:
    """One stream whose choices come by turns, beside each of them alone by the service."""
    job = {**job_of(parsers, {}), "n": len(texts)}
    asked = ChatCompletionRequest(messages=[], **context_of({}))
    tokens = {**job, "decoding": {"skip_special_tokens": False}}
    found: dict[str, Any] = {}
    every = [ids_of(parsers, text) for text in texts]
    for size in (1, 3, len(every[0])):
        each = [chunks([ids[at : at + size] for at in range(0, len(ids), size)], "stop") for ids in every]
        worded = [engine(parsers, tokens, made) for made in each]
        theirs = [attempt(service, derenderer, asked, job["prompt"], made) for made in each]
        by = size if size < len(every[0]) else "all"
        found[f"text by {by}"] = [by_turns(parsers, job, worded), theirs]
        found[f"tokens by {by}"] = [by_turns(parsers, tokens, each), theirs]
    return found


def by_turns(parsers: Parsers, job: dict[str, Any], each: list[list[dict[str, Any]]]) -> list[list[Any]]:
    """What each choice says in one stream of ours."""
    stream, said = parsers.stream(job), [list[Any]() for _ in each]
    for turn in range(max(map(len, each))):
        for index, made in enumerate(each):
            if turn < len(made):
                choice = {**made[turn], "index": index}
                parsed = stream.chunk({"request_id": "g", "choices": [choice]})
                assert parsed is not None and parsed["choices"][0]["index"] == index
                said[index].append(told(parsed["choices"][0]))
    return said


def context_of(options: dict[str, Any]) -> dict[str, Any]:
    return {"tools": TOOLS, "tool_choice": "auto", "chat_template_kwargs": {"enable_thinking": True}, **options}


def job_of(parsers: Parsers, options: dict[str, Any]) -> dict[str, Any]:
    prompt = parsers.tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    return {"id": "x", "context": context_of(options), "prompt": prompt, "n": 1, "decoding": None}


def attempt(function: Any, *args: Any) -> Any:
    try:
        return function(*args)
    except Exception as error:  # a parser may raise over what no model would say; then both have to
        return type(error).__name__


def ours(parsers: Parsers, job: dict[str, Any], made: list[dict[str, Any]]) -> list[Any]:
    stream = parsers.stream(job)
    parsed = [stream.chunk({"request_id": "g", "choices": [choice]}) for choice in made]
    return [told(chunk["choices"][0]) for chunk in parsed if chunk is not None]


def engine(parsers: Parsers, job: dict[str, Any], made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The chunks of a worker with a tokenizer: with their text, up to the stop string that ends them."""
    request = SimpleNamespace(
        request_id="x",
        prompt_token_ids=job["prompt"],
        prompt_embeds=None,
        sampling_params=SamplingParams(max_tokens=None, **job["decoding"]),
    )
    detokenizer, worded = IncrementalDetokenizer.from_new_request(parsers.tokenizer, request), []
    for choice in made:
        before = len(detokenizer.output_token_ids)
        stop = detokenizer.update(list(choice["token_ids"]), choice["finish_reason"] == "stop")
        finish = "stop" if stop else choice["finish_reason"]
        text = detokenizer.get_next_output_text(finish is not None, True)
        worded.append(
            {
                **choice,
                "token_ids": detokenizer.output_token_ids[before:],
                "finish_reason": finish,
                "stop_reason": stop,
                "text": text,
            }
        )
        if stop:
            break
    return worded


def coupled(
    parsers: Parsers, asked: ChatCompletionRequest, job: dict[str, Any], worded: list[dict[str, Any]]
) -> list[Any]:
    """What a worker's chat route sends of them."""
    auto, cls = parsers.auto_tools, parsers.parser_cls
    parser = cls(
        parsers.tokenizer,
        asked.tools,
        chat_template_kwargs=asked.chat_template_kwargs or {},
        model_config=parsers.model_config,
    )
    processor, said = ChatStreamProcessor(asked, parser, enable_auto_tools=auto, parser_cls=cls), []
    for choice in worded:
        step = processor.step(choice["text"], choice["token_ids"], choice["finish_reason"], job["prompt"])
        delta = None if step.delta is None else step.delta.model_dump(mode="json")
        said.append(told({**choice, "delta": delta, "finish_reason": step.finish_reason}))
    return said


def service(
    derenderer: OnlineDerenderer, asked: ChatCompletionRequest, prompt: list[int], made: list[dict[str, Any]]
) -> list[Any]:
    state, said = DerenderStreamState(), []
    for choice in made:
        chunk = {"request_id": "g", "output_mode": "tokens", "choices": [choice]}
        parsed, state = derenderer._derender_chat_stream_parsed(
            derenderer.parser, "tiny", GenerateTokensStreamResponse(**chunk), state, asked, len(prompt), prompt
        )
        said.append(told(derendered_chunk(Format.CHAT, chunk, parsed.model_dump(mode="json"))["choices"][0]))
    return said


class Texts:
    """The service's text of tokens. Implements ``steps.stop_search.Texts``."""

    def __init__(self, derenderer: OnlineDerenderer, rendered: dict[str, Any]) -> None:
        self._derenderer, self._rendered = derenderer, rendered

    async def text(self, token_ids: list[int], finish: dict[str, Any], state: Any) -> tuple[str, Any]:
        body = text_body(token_ids, finish, state, self._rendered)
        made, after = await self._derenderer.derender_completion_stream(
            "tiny",
            GenerateTokensStreamResponse(**body["generate_chunk"]),
            None if state is None else DerenderStreamState(**state),
            None,
            CompletionRequest(**body["completion_request"]),
            body["prompt_token_ids"],
        )
        return made.choices[0].text, after.model_dump(mode="json")


def whole(
    parsers: Parsers,
    derenderer: OnlineDerenderer,
    job: dict[str, Any],
    tokens: dict[str, Any],
    asked: ChatCompletionRequest,
    ids: list[int],
    finish: str,
) -> list[Any]:
    ends = [*ids, EOS] if finish == "stop" else ids
    choice = {"index": 0, "token_ids": ends, "finish_reason": finish, "stop_reason": None, "logprobs": None}
    reply = {"request_id": "g", "output_mode": "tokens", "choices": [choice], "prompt_token_ids": job["prompt"]}
    (worded,) = engine(parsers, tokens, [choice])
    by_text = parsers.whole(job, {**reply, "choices": [worded]})["choices"][0]
    by_tokens = parsers.whole(tokens, reply)["choices"][0]
    said = [
        (one["message"], one["finish_reason"], one["stop_reason"], one["token_ids"]) for one in (by_text, by_tokens)
    ]
    # What a worker itself makes of it, asked for output_mode: derender.
    output = SimpleNamespace(**worded)
    request = ParseContext(**job["context"]).to_chat_request()
    ((inline, reason),) = derenderer._derender_text_choices([output], request, 0, job["prompt"])
    said.append((inline.model_dump(mode="json"), reason, worded["stop_reason"], worded["token_ids"]))
    rendered = {"token_ids": job["prompt"], "sampling_params": tokens["decoding"]}
    if asked.stop:
        reply = asyncio.run(StopSearch(Texts(derenderer, rendered), tokens["decoding"]).whole(reply, 0))
    (made,) = derenderer._derender_chat(GenerateTokensResponse(**reply), asked, job["prompt"])
    cut = reply["choices"][0]["token_ids"]
    said.append((made.message.model_dump(mode="json"), made.finish_reason, made.stop_reason, cut))
    if not asked.include_reasoning:
        said = [(*one[:-1], None) for one in said]
    return [blanked(list(each)) for each in said]


def chunks(pieces: list[list[int]], finish: str) -> list[dict[str, Any]]:
    """The chunks of one choice; a stop comes with the token that is one, and a cut alone."""
    plain = {"index": 0, "finish_reason": None, "stop_reason": None, "logprobs": None}
    last = {**plain, "token_ids": [EOS] if finish == "stop" else [], "finish_reason": finish}
    return [*[{**plain, "token_ids": piece} for piece in pieces], last]


def told(choice: dict[str, Any]) -> list[Any]:
    delta = {name: value for name, value in (choice["delta"] or {}).items() if value}
    return [blanked(delta), choice["finish_reason"], choice["stop_reason"]]


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


def mistral_s(version: str) -> str:
    """A folder with a tokenizer in Mistral's own format: its newest public one, said to be of a version."""
    folder = Path(tempfile.mkdtemp())
    tekken = json.loads((Path(mistral_common.__file__).parent / "data" / "tekken_240911.json").read_text())
    # With fewer tokens it is read sooner: vLLM's parser looks at each control token whenever it is made.
    tekken["config"] |= {"version": version, "default_num_special_tokens": 64, "default_vocab_size": 20_000}
    if version != "v3":
        named = Tekkenizer.DEPRECATED_SPECIAL_TOKENS
        told = [*(str(one["token_str"]) for one in named), "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"]
        tekken["special_tokens"] = [
            {"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(told)
        ]
    (folder / "tekken.json").write_text(json.dumps(tekken))
    return str(folder)


def derenderer_of(parsers: Parsers) -> OnlineDerenderer:
    """The derender service's own code, without the server around it."""
    derenderer = object.__new__(OnlineDerenderer)
    derenderer.renderer = SimpleNamespace(get_tokenizer=lambda: parsers.tokenizer)
    derenderer.model_config, derenderer.parser = parsers.model_config, parsers.parser_cls
    derenderer.enable_auto_tools, derenderer.use_harmony = True, False
    derenderer._eos_token_id, derenderer._model_eos_token_ids = EOS, frozenset([EOS])
    derenderer.chat_template, derenderer.chat_template_content_format = None, "auto"
    derenderer.default_chat_template_kwargs, derenderer.reasoning_effort_map = {}, {}

    async def detokenize(*args: Any, **kwargs: Any) -> Any:
        return derenderer._detokenize_delta(*args, **kwargs)

    derenderer._detokenize_delta_async = detokenize
    return derenderer


if __name__ == "__main__":
    main(sys.argv[1])
