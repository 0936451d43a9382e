"""The parts of an Anthropic message: content blocks, stop reason, token counts, ids.

Source: vLLM 0.33 ``entrypoints/anthropic/serving.py``.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from envelope.json_codec import JSONDecodeError, loads
from envelope.rebuild import answer_id

if TYPE_CHECKING:
    from envelope.json_codec import Json
    from envelope.shape import Asked
    from envelope.turn import Turn


def message_id(asked: Asked) -> str:
    """Return the id of the answer; vLLM serves this API by its chat code and keeps chat's prefix."""
    return answer_id(None, asked, "chatcmpl-")


def signature(asked: Asked) -> str:
    """Return a thinking block's signature: 32 hex digits that sign nothing, as vLLM's, which are random."""
    return hashlib.blake2b(asked.leg_id.encode(), digest_size=16).hexdigest()


def blocks(turn: Turn, asked: Asked) -> list[Json]:
    """Return the content blocks of a turn; none at all when it is empty."""
    found: list[Json] = []
    if turn.reasoning:
        found.append({"type": "thinking", "thinking": turn.reasoning, "signature": signature(asked)})
    if turn.text:
        found.append({"type": "text", "text": turn.text})
    return found + [_call_block(call, i, asked) for i, call in enumerate(turn.calls)]


def call_id(call: Json, index: int, asked: Asked) -> str:
    return call.get("id") or f"chatcmpl-tool-{asked.leg_id}-{index}"


def parsed_input(call: Json) -> Json | None:
    """Return a tool call's arguments as an object, or None when they are none: the call was cut short."""
    try:
        value = loads(call["function"].get("arguments") or "{}")
    except JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def stop_reason(turn: Turn) -> tuple[str | None, str | None]:
    """Return (``stop_reason``, ``stop_sequence``).

    A stop string wins over tool calls only when it cut one short: such a call must not be run.

    Source: vLLM ``_to_anthropic_stop_reason``.
    """
    usable = [parsed_input(call) is not None for call in turn.calls]
    return stop_reason_of(turn.finish, turn.stop, called=any(usable), complete=bool(usable) and all(usable))


def stop_reason_of(
    finish: str | None, stop: str | int | None, *, called: bool = False, complete: bool = False
) -> tuple[str | None, str | None]:
    """Return (``stop_reason``, ``stop_sequence``) for generate's ``finish_reason`` and ``stop_reason``."""
    if finish == "length":
        return "max_tokens", None
    if finish not in ("stop", "tool_calls"):  # abort, repetition: Anthropic has no word for them
        return None, None
    if complete:
        return "tool_use", None
    if isinstance(stop, str):
        return "stop_sequence", stop
    return ("tool_use" if called else "end_turn"), None


def token_counts(usage: Json) -> Json:
    """Return Anthropic's usage: what came from the cache is told apart from ``input_tokens``."""
    details: dict[str, Any] = usage.get("prompt_tokens_details") or {}
    cached, written = details.get("cached_tokens"), details.get("created_cache_tokens")
    prompt = usage.get("prompt_tokens") or 0
    found = {
        "input_tokens": max(0, prompt - (cached or 0) - (written or 0)),
        "output_tokens": usage.get("completion_tokens") or 0,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": cached,
    }
    return {key: value for key, value in found.items() if value is not None}


def _call_block(call: Json, index: int, asked: Asked) -> Json:
    """Return a tool_use block.

    Arguments that are no JSON object stay readable as text: with a made-up input, the call could be run.
    """
    arguments = parsed_input(call)
    if arguments is None:
        return {"type": "text", "text": call["function"]["arguments"]}
    name = call["function"]["name"]
    return {"type": "tool_use", "id": call_id(call, index, asked), "name": name, "input": arguments}
