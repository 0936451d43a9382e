"""``POST /v1/messages``: Anthropic's shapes, whole and streamed, on top of a chat run.

Source: recordings ``messages/``, ``kv_load_failure/messages*``.
"""

from __future__ import annotations

import json
import secrets
from typing import TYPE_CHECKING, Any

from coordinator.sim import conversations
from coordinator.sim.answers import Answer, Call, Frame, Stream, Whole
from coordinator.sim.chat_run import Run, prepared_run
from coordinator.sim.engine import Output
from coordinator.sim.parsers import parse
from coordinator.sim.refusals import SCHEMA, Refusal, failed
from coordinator.sim.stream_parser import StreamParser

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from coordinator.sim.core import Core
    from coordinator.sim.parsers import Parsed
    from coordinator.sim.stream_parser import Delta

_ERROR_TYPES = {400: "invalid_request_error", 403: "permission_error", 404: "not_found_error"}


async def messages(core: Core, call: Call) -> Answer:
    """
    Raises:
        Refusal: in a stream, only what is checked before the stream is opened.
    """
    try:
        if core.settings.tokens_only:
            raise failed("", late=False)
        run = prepared_run(core, call, conversations.prepare_messages(call.body, core.settings))
        if call.wants_stream:
            return Stream(_frames(run))
        return Whole(await _whole(run))
    except Refusal as refusal:
        if refusal.type == SCHEMA:
            raise
        raise AnthropicRefusal(refusal.message, type=refusal.type, status=refusal.status) from refusal


class AnthropicRefusal(Refusal):
    """A refusal in Anthropic's shape."""

    def body(self) -> dict[str, Any]:
        kind = _ERROR_TYPES.get(self.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}


async def _whole(run: Run) -> dict[str, Any]:
    generation = run.admit()
    (output,) = await generation.outputs()
    parsed = parse(output.text, run.parsing)
    answer: dict[str, Any] = {
        "id": run.job.id,
        "type": "message",
        "role": "assistant",
        "content": list(_blocks(parsed)) or [{"type": "text", "text": ""}],
        "model": run.core.settings.model,
    }
    answer |= _ending(output, called=bool(parsed.tool_calls))
    answer["usage"] = _usage(run, len(output.token_ids))
    if generation.handover is not None:
        answer["kv_transfer_params"] = generation.handover
    if generation.encodings is not None:
        answer["ec_transfer_params"] = generation.encodings
    return answer


def _blocks(parsed: Parsed) -> Iterator[dict[str, Any]]:
    if parsed.reasoning:
        yield {"type": "thinking", "thinking": parsed.reasoning, "signature": secrets.token_hex(16)}
    if parsed.content:
        yield {"type": "text", "text": parsed.content}
    for call in parsed.tool_calls:
        function = call["function"]
        arguments = json.loads(function["arguments"])
        yield {"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments}


def _ending(output: Output, *, called: bool) -> dict[str, Any]:
    """Return the stop reason, and the stop sequence if one matched; ``aborted`` has none."""
    if output.finish_reason == "length":
        return {"stop_reason": "max_tokens"}
    if isinstance(output.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": output.stop_reason}
    if output.finish_reason != "stop":
        return {}
    return {"stop_reason": "tool_use" if called else "end_turn"}


def _usage(run: Run, made: int) -> dict[str, int]:
    return {"input_tokens": len(run.job.prompt_ids), "output_tokens": made}


async def _frames(run: Run) -> AsyncGenerator[Frame, None]:
    parser = StreamParser(run.parsing)
    blocks = _BlockWriter()
    output = Output(0)
    try:
        generation = run.admit()
        yield _frame({"type": "message_start", "message": _empty_message(run)})
        async for delta in generation.parsed(parser, output):
            for event in blocks.feed(delta):
                yield _frame(event)
    except Refusal as refusal:
        yield Frame(AnthropicRefusal(refusal.message, status=refusal.status).body(), event="error")
        return
    for event in blocks.close():
        yield _frame(event)
    ending = {"stop_reason": None, "stop_sequence": None, **_ending(output, called=parser.called)}
    usage = _usage(run, len(output.token_ids))
    yield _frame({"type": "message_delta", "delta": ending, "usage": usage})
    yield _frame({"type": "message_stop"})


def _frame(event: dict[str, Any]) -> Frame:
    return Frame(event, event=event["type"])


def _empty_message(run: Run) -> dict[str, Any]:
    return {
        "id": run.job.id,
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": run.core.settings.model,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(run, 0),
    }


class _BlockWriter:
    """Opens and closes content blocks as the kind of delta changes."""

    def __init__(self) -> None:
        self._open: str | None = None
        self._index = -1

    def feed(self, delta: Delta) -> Iterator[dict[str, Any]]:
        if delta.reasoning:
            yield from self._begin("thinking", {"type": "thinking", "thinking": ""})
            yield self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.content:
            yield from self._begin("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": delta.content})
        for entry in delta.tools:
            function = entry["function"]
            if "id" in entry:
                block = {"type": "tool_use", "id": entry["id"], "name": function["name"], "input": {}}
                yield from self._begin(entry["id"], block)
            if "arguments" in function:
                yield self._delta({"type": "input_json_delta", "partial_json": function["arguments"]})

    def close(self) -> Iterator[dict[str, Any]]:
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": secrets.token_hex(16)})
        yield {"type": "content_block_stop", "index": self._index}
        self._open = None

    def _begin(self, kind: str, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if self._open == kind:
            return
        yield from self.close()
        self._open = kind
        self._index += 1
        yield {"type": "content_block_start", "content_block": block, "index": self._index}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "delta": delta, "index": self._index}
