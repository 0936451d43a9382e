"""Token counts, as every envelope starts from them.

A usage object as vLLM sends it: ``prompt_tokens``, ``total_tokens``, ``completion_tokens`` and, where the
server was told to count them, ``prompt_tokens_details`` and ``completion_tokens_details``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from envelope.token_ids import Counted, TokenIds

if TYPE_CHECKING:
    from envelope.json_codec import Json

_DETAILS = ("prompt_tokens_details", "completion_tokens_details")


def counts(prompt_tokens: int, completion_tokens: int) -> Json:
    """Return a usage object with the three counts, in vLLM's order of keys."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }


def with_details(usage: Json) -> Json:
    """Return a copy with both details keys, null where absent: the form of a whole answer."""
    return {**usage, **{key: usage.get(key) for key in _DETAILS}}


def without_nulls(usage: Json) -> Json:
    """Return a copy without null keys, at both levels: the form of a stream's last chunk."""
    kept = {key: value for key, value in usage.items() if value is not None}
    return {key: without_nulls(value) if isinstance(value, dict) else value for key, value in kept.items()}


def of_reply(reply: Json, rendered: Json | None) -> Json:
    """Return the usage of a whole generate answer.

    Workers before 0.26 send none; then the rendered prompt and the output are counted by their tokens.
    """
    usage = reply.get("usage")
    if isinstance(usage, dict):
        return with_details(usage)
    output = sum(_length(choice.get("token_ids")) for choice in reply.get("choices") or ())
    return with_details(counts(prompt_length(rendered), output))


def prompt_length(rendered: Json | None) -> int:
    """Return how many tokens the prompt has; 0 when nothing was rendered."""
    return _length(rendered.get("token_ids")) if rendered else 0


def _length(tokens: Any) -> int:
    return len(tokens) if isinstance(tokens, (list, TokenIds, Counted)) else 0
