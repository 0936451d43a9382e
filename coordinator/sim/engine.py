"""The engine: prompt token ids and sampling parameters in, steps of one token each out.

It is deterministic, and as strict as the real one about when a choice ends: EOS, a stop token, a stop string or
``max_tokens``, whichever comes first.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from coordinator.sim import replies
from coordinator.sim.logprobs import TokenLogprobs, made_up
from coordinator.sim.tokenizer import EOS, Detokenizer, Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from coordinator.sim.sampling import Sampling


@dataclass(slots=True)
class Step:
    """What one choice gained.

    Attributes:
        text: the delta; with stop strings it lags the tokens, and the last step brings the rest.
    """

    index: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class Output:
    """One finished choice: its steps put together."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, step: Step) -> None:
        self.token_ids += step.token_ids
        self.text += step.text
        if step.logprobs is not None:
            self.logprobs = (self.logprobs or []) + step.logprobs
        self.finish_reason = step.finish_reason or self.finish_reason
        self.stop_reason = step.stop_reason if step.stop_reason is not None else self.stop_reason


def run(
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    *,
    seen: Sequence[str] = (),
    reasoning_ended: bool | None = None,
    wrong_kv: bool = False,
) -> Iterator[list[Step]]:
    """Yield rounds: one step of each choice that has not ended, in order of index.

    Args:
        seen: the prompt's media, which the answer begins with.
        reasoning_ended: a grammar binds from the first token on; None looks at the prompt.
        wrong_kv: answer as a model that attends to another prompt's cache: with text that is plainly wrong.
    """
    prompt = replies.read_prompt(tokenizer.decode(prompt_ids))
    if reasoning_ended and sampling.structured_outputs:
        prompt = replace(prompt, thinking=False)
    choices = [
        _Choice(tokenizer, index, sampling, _said(tokenizer, prompt, sampling, index, seen, wrong_kv=wrong_kv))
        for index in range(sampling.n)
    ]
    while choices:
        yield [choice.step() for choice in choices]
        choices = [choice for choice in choices if not choice.ended]


def _said(
    tokenizer: Tokenizer,
    prompt: replies.Prompt,
    sampling: Sampling,
    index: int,
    seen: Sequence[str],
    *,
    wrong_kv: bool,
) -> Iterator[int]:
    """Yield the tokens that the model would go on saying for ever; who asks decides when to stop."""
    reply = replies.looking(replies.reply_to(prompt), seen)
    if wrong_kv:
        reply = replies.Reply("", replies.WRONG_KV)
    elif index > 0 and reply.content and not sampling.structured_outputs:
        reply = replies.Reply(reply.reasoning, f"({index + 1}) {reply.content}", reply.calls, reply.endless)
    text, tail = written(reply, prompt, sampling.structured_outputs)
    said = tokenizer.encode(text)
    yield from said
    if not reply.endless:
        padding = sampling.min_tokens - len(said) - 1
        yield from tokenizer.encode(" and so on" * max(padding, 0))[: max(padding, 0)]
        yield EOS
    again = tokenizer.encode(tail) or [EOS]
    while True:
        yield from again


def written(reply: replies.Reply, prompt: replies.Prompt, structured: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return a reply as Qwen3 writes it (thought, content, hermes tool calls), and what it says if it must go on.

    A grammar binds from the end of the thought on, so the blank line that follows it is not there.
    """
    thought = f"<think>\n{reply.reasoning}\n</think>" if prompt.thinking and prompt.chat else ""
    constrained = _constrained(reply, prompt, structured) if structured else None
    if constrained is not None:
        return thought + constrained, constrained
    calls = "\n".join(_hermes(name, arguments) for name, arguments in reply.calls)
    body = reply.content + calls
    return (thought and thought + "\n\n") + body, body


def _hermes(name: str, arguments: Mapping[str, Any]) -> str:
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def _constrained(reply: replies.Reply, prompt: replies.Prompt, structured: Mapping[str, Any]) -> str | None:
    """Return text that the grammar allows; None if it allows anything that we would say."""
    if structured.get("structural_tag"):
        return _forced_calls(reply, prompt, json.loads(structured["structural_tag"])["format"])
    if structured.get("choice"):
        return str(structured["choice"][0])
    if structured.get("json") is not None:
        schema = structured["json"]
        return json.dumps(example(json.loads(schema) if isinstance(schema, str) else schema), ensure_ascii=False)
    if structured.get("json_object"):
        return '{"ok": true}'
    return None


def _forced_calls(reply: replies.Reply, prompt: replies.Prompt, tags: Mapping[str, Any]) -> str:
    """Call a tool that the tag names: the one that the model wants anyhow, or the first with made-up arguments."""
    schemas = {
        json.loads(tag["begin"].partition("\n")[2].partition(",")[0] + "}")["name"]: tag["content"]["json_schema"]
        for tag in tags["tags"]
        if tag["begin"].startswith("<tool_call>\n")
    }
    calls = [call for call in reply.calls if call[0] in schemas]
    if not calls:
        name, schema = next(iter(schemas.items()))
        if not isinstance(schema, dict):
            schema = next((tool.get("parameters") for tool in prompt.tools if tool["name"] == name), None) or {}
        calls = [(name, example(schema))]
    if tags.get("stop_after_first"):
        calls = calls[:1]
    return "\n".join(_hermes(name, arguments) for name, arguments in calls)


def example(schema: Mapping[str, Any]) -> Any:
    """Return the simplest value that a JSON schema allows, as far as common keywords go."""
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    for several in ("anyOf", "oneOf"):
        if schema.get(several):
            return example(schema[several][0])
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        properties = schema.get("properties", {})
        return {name: example(properties[name]) for name in schema.get("required", properties) if name in properties}
    if kind == "array":
        return [example(schema.get("items", {}))] * int(schema.get("minItems", 1))
    simple: dict[str, Any] = {"integer": 1, "number": 1, "boolean": True, "null": None}
    return simple.get(kind, "Oslo")


class _Choice:
    """One sequence: takes tokens until one of them ends it."""

    def __init__(self, tokenizer: Tokenizer, index: int, sampling: Sampling, said: Iterator[int]) -> None:
        self.ended = False
        self._tokenizer = tokenizer
        self._index = index
        self._sampling = sampling
        self._said = said
        self._detokenizer = Detokenizer(tokenizer, skip_special=sampling.skip_special_tokens)
        self._raw = Detokenizer(tokenizer, skip_special=False)
        self._count = 0
        self._text = ""
        self._shown = 0

    def step(self) -> Step:
        sampling = self._sampling
        token = next(self._said)
        self._count += 1
        logprobs = None
        if sampling.logprobs is not None:
            text = self._raw.feed(token)
            logprobs = [
                made_up(
                    self._tokenizer,
                    token,
                    self._count,
                    sampling.logprobs,
                    text=text,
                    surprising=not sampling.greedy,
                )
            ]
        finish, stop_reason = self._finish_of(token)
        matched = ""
        if finish != "stop" or sampling.include_stop_str_in_output:
            matched = self._take_text(token)
        if matched:
            finish, stop_reason = "stop", matched
        self.ended = finish is not None
        return Step(self._index, [token], self._show(), logprobs, finish, stop_reason)

    def _finish_of(self, token: int) -> tuple[str | None, str | int | None]:
        sampling = self._sampling
        if self._count >= sampling.min_tokens:
            if token == EOS and not sampling.ignore_eos:
                return "stop", None
            if token in sampling.stop_token_ids:
                return "stop", token
        return ("length", None) if self._count == sampling.max_tokens else (None, None)

    def _take_text(self, token: int) -> str:
        """Add a token's text; return the stop string that it completes, having cut the text there."""
        sampling = self._sampling
        if not sampling.detokenize:
            return ""
        before = len(self._text)
        self._text += self._detokenizer.feed(token)
        if self._count < sampling.min_tokens:
            return ""
        for stop in sampling.stop:
            at = self._text.find(stop, max(before - len(stop) + 1, 0))
            if at >= 0:
                self._text = self._text[: at + len(stop) * sampling.include_stop_str_in_output]
                return stop
        return ""

    def _show(self) -> str:
        held = 0 if self.ended else self._sampling.output_text_buffer_length
        upto = max(len(self._text) - held, self._shown)
        delta = self._text[self._shown : upto]
        self._shown = upto
        return delta
