"""``POST /v1/responses``: whole and streamed.

There is no error event here: a stream whose engine request fails or is refused is cut after
``response.in_progress``.

Source: recordings ``responses/``, ``kv_load_failure/responses*``, ``errors/responses_*``.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from coordinator.sim import conversations
from coordinator.sim.answers import Answer, Call, Cut, Frame, Stream, Whole
from coordinator.sim.chat import Run, prepared_run
from coordinator.sim.engine import Output
from coordinator.sim.parsers import StreamParser, parse
from coordinator.sim.refusals import Refusal, failed
from coordinator.sim.render import response_id

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from coordinator.sim.core import Core, Generation
    from coordinator.sim.parsers import Delta, Parsed


async def responses(core: Core, call: Call) -> Answer:
    """
    Raises:
        Refusal: in a stream, only what is checked before the stream is opened.
    """
    if core.settings.tokens_only:
        raise failed("", late=False)
    prepared = conversations.prepare_responses(call.body, core.settings)
    run = prepared_run(core, call, prepared, id=f"{response_id(call)}_0")
    if call.wants_stream:
        return Stream(_frames(run))
    generation = run.admit()
    (output,) = await generation.outputs()
    items = list(_items(parse(output.text, run.parsing)))
    return Whole(_response(run, items, output=output, generation=generation))


def _response(
    run: Run, items: list[dict[str, Any]], *, output: Output | None = None, generation: Generation | None = None
) -> dict[str, Any]:
    """Return the response object; without an output it is in progress."""
    body, sampling = run.call.body, run.prepared.sampling
    context = run.prepared.context or {}
    incomplete = output is not None and output.finish_reason == "length"
    choice = context.get("tool_choice")
    return {
        "id": run.job.id.removesuffix("_0"),
        "created_at": run.call.created,
        "incomplete_details": {"reason": "max_output_tokens"} if incomplete else None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata"),
        "model": run.core.settings.model,
        "object": "response",
        "output": items,
        "parallel_tool_calls": context.get("parallel_tool_calls"),
        "temperature": sampling.temperature,
        "tool_choice": body["tool_choice"] if isinstance(choice, dict) else choice,
        "tools": [_tool(tool) for tool in body.get("tools") or ()],
        "top_p": sampling.top_p,
        "background": False,
        "max_output_tokens": sampling.max_tokens,
        "max_tool_calls": None,
        "previous_response_id": None,
        "prompt": None,
        "prompt_cache_options": None,
        "prompt_cache_key": None,
        "prompt_cache_retention": None,
        "reasoning": body.get("reasoning"),
        "safety_identifier": None,
        "service_tier": "auto",
        "status": "in_progress" if output is None else ("incomplete" if incomplete else "completed"),
        "text": body.get("text"),
        "top_logprobs": body.get("top_logprobs"),
        "truncation": "disabled",
        "usage": None if output is None else _usage(run, output, generation),
        "user": body.get("user"),
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "kv_transfer_params": None if generation is None else generation.handover,
        "ec_transfer_params": None,
        "input_messages": None,
        "output_messages": None,
    }


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": tool.get("name"),
        "parameters": tool.get("parameters"),
        "strict": tool.get("strict"),
        "type": "function",
        "allowed_callers": None,
        "async": None,
        "defer_loading": None,
        "description": tool.get("description"),
        "output_schema": None,
    }


def _usage(run: Run, output: Output, generation: Generation | None) -> dict[str, Any]:
    prompt, made = len(run.job.prompt_ids), len(output.token_ids)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": generation.cached if generation else 0,
            "cache_write_tokens": 0,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": made,
        "output_tokens_details": {
            "reasoning_tokens": run.thought(output.token_ids),
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": prompt + made,
    }


def _items(parsed: Parsed) -> Iterator[dict[str, Any]]:
    if parsed.reasoning:
        yield _reasoning_item(f"rs_{secrets.token_hex(8)}", parsed.reasoning, None)
    if parsed.content:
        yield _message_item(f"msg_{secrets.token_hex(8)}", parsed.content, "completed")
    for call in parsed.tool_calls:
        function = call["function"]
        yield _call_item(f"fc_{secrets.token_hex(8)}", call["id"], function["name"], function["arguments"], "completed")


def _reasoning_item(id: str, text: str, status: str | None) -> dict[str, Any]:
    return {
        "id": id,
        "summary": [],
        "type": "reasoning",
        "content": [{"text": text, "type": "reasoning_text"}] if text else None,
        "encrypted_content": None,
        "status": status,
    }


def _message_item(id: str, text: str, status: str) -> dict[str, Any]:
    part: dict[str, Any] = {"annotations": [], "text": text, "type": "output_text", "logprobs": None}
    return {
        "id": id,
        "content": [part] if status != "in_progress" else [],
        "role": "assistant",
        "status": status,
        "type": "message",
        "phase": None,
    }


def _call_item(id: str, call_id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
    return {
        "arguments": arguments,
        "call_id": call_id,
        "name": name,
        "type": "function_call",
        "id": id,
        "async": None,
        "caller": None,
        "namespace": None,
        "status": status,
    }


async def _frames(run: Run) -> AsyncIterator[Frame]:
    numbers = _Numbers()
    for kind in ("response.created", "response.in_progress"):
        yield numbers.frame({"response": _response(run, []), "type": kind})
    parser = StreamParser(run.parsing)
    items = _ItemWriter()
    output = Output(0)
    try:
        generation = run.admit()
        async for delta in generation.parsed(parser, output):
            for event in items.feed(delta):
                yield numbers.frame(event)
    except Refusal as refusal:
        raise Cut from refusal
    status = "incomplete" if output.finish_reason == "length" else "completed"
    for event in items.close(status):
        yield numbers.frame(event)
    response = _response(run, items.done, output=output, generation=generation)
    yield numbers.frame({"response": response, "type": f"response.{status}"})


class _Numbers:
    """Numbers events; keys are in alphabetical order, as pydantic's OpenAI models have them."""

    def __init__(self) -> None:
        self._next = 0

    def frame(self, event: dict[str, Any]) -> Frame:
        numbered = {**event, "sequence_number": self._next}
        self._next += 1
        last = ("text", "type", "name")
        ordered = {key: numbered[key] for key in sorted(numbered) if key not in last}
        ordered |= {key: numbered[key] for key in last if key in numbered}
        return Frame(ordered, event=event["type"])


class _ItemWriter:
    """Opens and closes output items as the kind of delta changes."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._kind = ""
        self._id = ""
        self._text = ""
        self._call: dict[str, Any] = {}

    def feed(self, delta: Delta) -> Iterator[dict[str, Any]]:
        if delta.reasoning:
            yield from self._begin("reasoning")
            yield self._add("reasoning_text", delta.reasoning)
        if delta.content:
            yield from self._begin("message")
            yield {**self._add("output_text", delta.content), "logprobs": []}
        for entry in delta.tools:
            if "id" in entry:
                yield from self._begin("call", entry)
            arguments = entry["function"].get("arguments")
            if arguments:
                event = self._add("function_call_arguments", arguments)
                del event["content_index"]
                yield event

    def close(self, status: str) -> Iterator[dict[str, Any]]:
        if not self._kind:
            return
        place: dict[str, Any] = {"item_id": self._id, "output_index": len(self.done)}
        if self._kind == "call":
            name = self._call["function"]["name"]
            kind = "response.function_call_arguments.done"
            yield {**place, "arguments": self._text, "type": kind, "name": name}
        else:
            place["content_index"] = 0
            if self._kind == "reasoning":
                yield {**place, "text": self._text, "type": "response.reasoning_text.done"}
                part: dict[str, Any] = {"text": self._text, "type": "reasoning_text"}
            else:
                yield {**place, "text": self._text, "logprobs": [], "type": "response.output_text.done"}
                part = {"annotations": [], "text": self._text, "type": "output_text", "logprobs": None}
            yield {**place, "part": part, "type": "response.content_part.done"}
        item = self._item(status)
        yield {"item": item, "output_index": len(self.done), "type": "response.output_item.done"}
        self.done.append(item)
        self._kind = ""

    def _begin(self, kind: str, entry: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        if self._kind == kind and entry is None:
            return
        yield from self.close("completed")
        prefix = {"reasoning": "rs", "message": "msg", "call": "fc"}[kind]
        self._kind, self._id, self._text = kind, f"{prefix}_{secrets.token_hex(8)}", ""
        self._call = entry or {}
        index = len(self.done)
        yield {"item": self._item("in_progress"), "output_index": index, "type": "response.output_item.added"}
        if kind == "call":
            return
        part: dict[str, Any] = {"text": "", "type": "reasoning_text"}
        if kind == "message":
            part = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
        yield {
            "content_index": 0,
            "item_id": self._id,
            "output_index": index,
            "part": part,
            "type": "response.content_part.added",
        }

    def _add(self, what: str, delta: str) -> dict[str, Any]:
        self._text += delta
        return {
            "content_index": 0,
            "delta": delta,
            "item_id": self._id,
            "output_index": len(self.done),
            "type": f"response.{what}.delta",
        }

    def _item(self, status: str) -> dict[str, Any]:
        if self._kind == "reasoning":
            return _reasoning_item(self._id, self._text, status)
        if self._kind == "message":
            return _message_item(self._id, self._text, status)
        return _call_item(self._id, self._call["id"], self._call["function"]["name"], self._text, status)
