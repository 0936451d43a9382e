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
from coordinator.sim.chat_run import Run, prepared_run
from coordinator.sim.engine import Output
from coordinator.sim.parsers import parse
from coordinator.sim.refusals import Refusal, failed
from coordinator.sim.render import response_id
from coordinator.sim.responses_items import ItemWriter, call_item, message_item, reasoning_item
from coordinator.sim.stream_parser import StreamParser

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Mapping

    from coordinator.sim.core import Core, Generation
    from coordinator.sim.parsers import Parsed


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
    items = list(_items(parse(output.text, run.parsing), output, parsers=core.settings.parsers))
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
        "ec_transfer_params": None if generation is None else generation.encodings,
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


def _items(parsed: Parsed, output: Output, *, parsers: bool) -> Iterator[dict[str, Any]]:
    """Yield the items of a whole answer; only the last one can have been cut short."""
    last = "incomplete" if output.finish_reason == "length" else "completed"
    if parsed.reasoning:
        yield reasoning_item(f"rs_{secrets.token_hex(8)}", parsed.reasoning, None)
    if parsed.content or not parsers:
        status = "completed" if parsed.tool_calls else last
        item = message_item(f"msg_{secrets.token_hex(8)}", parsed.content or "", status)
        yield item if parsed.content else {**item, "content": []}
    for call in parsed.tool_calls:
        function = call["function"]
        status = last if call is parsed.tool_calls[-1] else "completed"
        yield call_item(f"fc_{secrets.token_hex(8)}", call["id"], function["name"], function["arguments"], status)


async def _frames(run: Run) -> AsyncGenerator[Frame, None]:
    numbers = _Numbers()
    for kind in ("response.created", "response.in_progress"):
        yield numbers.frame({"response": _response(run, []), "type": kind})
    parser = StreamParser(run.parsing)
    items = ItemWriter()
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
