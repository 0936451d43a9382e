"""What the tiny model was trained to say, and what an SDK makes of an answer, in one shape to compare."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.e2e.servers import MODEL, MODEL_NAME

if TYPE_CHECKING:
    from collections.abc import Iterable

    from openai.types.chat import ChatCompletionChunk, ChatCompletionMessage


class Said(NamedTuple):
    """One choice: its text, parsed or not, and why it ended.

    The newlines that stand between the parts of the model's output are left out: the parsers keep some of them.
    """

    content: str
    reasoning: str
    tool_calls: tuple[tuple[str, str], ...]
    finish_reason: str | None


class Conversation(NamedTuple):
    request: dict[str, Any]
    expect: dict[str, Any]

    def ask(self, **fields: Any) -> dict[str, Any]:
        """Return the request as the SDK's ``create`` takes it: greedy, and with a cache of its own.

        With a new salt no block of the prompt is cached, so each has to come from prefill.
        """
        body = self.request | {"model": MODEL_NAME, "temperature": 0, "max_tokens": 600}
        extra = {"chat_template_kwargs": body.pop("chat_template_kwargs"), "cache_salt": uuid.uuid4().hex}
        return body | {"extra_body": extra | fields.pop("extra_body", {})} | fields

    def body(self, **fields: Any) -> dict[str, Any]:
        """Return the same request as a JSON body."""
        asked = self.ask(**fields)
        return asked.pop("extra_body") | asked

    def answer(self, *, parsed: bool) -> Said:
        """Return what the model was trained to answer, as the worker's parsers leave it, or as raw text."""
        if not parsed:
            return Said(self.expect["text"].strip("\n"), "", (), "stop")
        calls = tuple(_call(c["name"], json.dumps(c["arguments"])) for c in self.expect["tool_calls"])
        content, reasoning = self.expect["content"].strip("\n"), self.expect["reasoning"] or ""
        return Said(content, reasoning, calls, "tool_calls" if calls else "stop")


def conversation(last_message: str, *, thinking: bool = False) -> Conversation:
    """Return the conversation that ends in ``last_message``."""
    (found,) = (
        c
        for c in json.loads((MODEL / "conversations.json").read_text())
        if c["request"]["messages"][-1]["content"] == last_message
        and c["request"]["chat_template_kwargs"]["enable_thinking"] is thinking
    )
    return Conversation(found["request"], found["expect"])


CONVERSATIONS = {
    "plain": conversation("What is the capital of France?"),
    "accents": conversation("Say hello in French."),
    "japanese": conversation("Say hello in Japanese."),
    "emoji": conversation("Send me some emoji."),
    "json": conversation("Give me JSON."),
    "escapes": conversation("Escape test."),
    "empty": conversation("Say nothing."),
    "numbers": conversation("Count to twenty."),
    "reasoning": conversation("What is 2 + 2?", thinking=True),
    "japanese reasoning": conversation("Say hello in Japanese.", thinking=True),
    "empty after reasoning": conversation("Say nothing.", thinking=True),
    "tool call": conversation("What is the weather in 東京?"),
    "tool call after reasoning": conversation("What is the weather in Oslo?", thinking=True),
    "tool call after text": conversation("Add 631 and 526."),
    "two tool calls": conversation("Compare the weather in Quito and Lagos."),
    "tool result": conversation("cloudy, -19 C"),
}


def said(message: ChatCompletionMessage, finish_reason: str | None) -> Said:
    calls = tuple(_call(c.function.name, c.function.arguments) for c in message.tool_calls or ())
    reasoning = getattr(message, "reasoning", None) or ""  # a field of vLLM's, so not typed in the SDK
    return Said((message.content or "").strip("\n"), reasoning.strip(), calls, finish_reason)


def joined(chunks: Iterable[ChatCompletionChunk]) -> dict[int, Said]:
    """Put the deltas of a stream together, by index of the choice."""
    parts: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            part = parts.setdefault(choice.index, {"content": "", "reasoning": "", "calls": {}, "finish": None})
            part["content"] += choice.delta.content or ""
            part["reasoning"] += getattr(choice.delta, "reasoning", None) or ""
            for call in choice.delta.tool_calls or ():
                name_arguments = part["calls"].setdefault(call.index, ["", ""])
                name_arguments[0] += call.function.name or ""
                name_arguments[1] += call.function.arguments or ""
            part["finish"] = choice.finish_reason or part["finish"]
    return {
        index: Said(
            part["content"].strip("\n"),
            part["reasoning"].strip(),
            tuple(_call(*part["calls"][i]) for i in sorted(part["calls"])),
            part["finish"],
        )
        for index, part in parts.items()
    }


def _call(name: str, arguments: str) -> tuple[str, str]:
    return name, json.dumps(json.loads(arguments), sort_keys=True, ensure_ascii=False)
