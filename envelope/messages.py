"""Anthropic's ``/v1/messages``, rebuilt from generate's answers: whole, streamed, counted, and failed.

Three things cannot be equalled: ``signature`` is made of the leg's id (vLLM's is random; neither signs
anything), blocks that the worker added to its prefix cache are counted as input tokens like the rest, and a stream that
is rebuilt from text has no thinking or tool blocks, because text is not parsed.

Source: vLLM 0.33 ``entrypoints/anthropic``; recorded in ``messages/`` of the 0.33 recordings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from envelope import usage
from envelope.messages_blocks import blocks, message_id, stop_reason, token_counts
from envelope.messages_parsed import ParsedChunks
from envelope.messages_stream import Chunks, error_body, error_event, replay
from envelope.rebuild import model_name
from envelope.turn import turn_of

if TYPE_CHECKING:
    from envelope.json_codec import Json
    from envelope.shape import Asked

__all__ = ["Chunks", "ParsedChunks", "count_request", "count_tokens", "error_body", "error_event", "replay", "whole"]


def whole(reply: Json, asked: Asked) -> Json:
    """Return a whole generate answer as a message.

    Null keys are left out, as vLLM does: ``stop_sequence`` unless one matched, ``stop_reason`` of an answer
    that was aborted.

    Raises:
        LegFailed: the answer has no choices, or nothing in its choice.
    """
    turn = turn_of(reply)
    reason, sequence = stop_reason(turn)
    message: dict[str, Any] = {
        "id": message_id(asked),
        "type": "message",
        "role": "assistant",
        # An empty answer is one empty block: some clients read the first block unasked.
        "content": blocks(turn, asked) or [{"type": "text", "text": ""}],
        "model": model_name(reply, asked),
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": token_counts(usage.of_reply(reply, asked.rendered)),
    }
    return {key: value for key, value in message.items() if value is not None}


def count_request(body: Json) -> Json:
    """Return the body that ``/v1/messages/render`` takes for a client's ``count_tokens`` body.

    Render wants ``max_tokens``, which a count does not have. A thinking budget must lie below it and changes
    no prompt, so it is left out.
    """
    request = {**body, "max_tokens": 1}
    thinking = body.get("thinking")
    if isinstance(thinking, dict) and thinking.get("type") == "enabled":
        del request["thinking"]
    return request


def count_tokens(rendered: Json) -> Json:
    """Return the answer of ``/v1/messages/count_tokens`` for a rendered request."""
    tokens = usage.prompt_length(rendered)
    return {"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}}
