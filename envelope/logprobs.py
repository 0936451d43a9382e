"""Log probabilities of a text-mode generate answer, cut and shaped as each API sends them.

A generate answer holds, per position, every candidate that the engine returned: the sampled token first, then
the top k, k + 1 in all when the sampled token is outside the top k. Each API cuts that list by its own rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envelope.json_codec import Json


def chat_limit(body: Json) -> int | None:
    """Return how many candidates a chat answer keeps; None is all of them.

    Source: vLLM ``chat_top_logprobs_limit``.
    """
    k = body.get("top_logprobs")
    return None if k == -1 or body.get("logprob_token_ids") else int(k or 0)  # 2.0 is 2


def completion_limit(body: Json) -> int | None:
    """Return how many candidates a completion keeps; None is all of them.

    Source: vLLM ``completion_top_logprobs_limit``; one more than asked for, as OpenAI's API has it.
    """
    k = body.get("logprobs")
    return None if k == -1 or body.get("logprob_token_ids") else int(k or 0) + 1


def cut(logprobs: Json | None, limit: int | None) -> Json | None:
    """Return chat logprobs with at most ``limit`` candidates for each position."""
    if logprobs is None or limit is None:
        return logprobs
    content = [
        {**position, "top_logprobs": (position.get("top_logprobs") or [])[:limit]}
        for position in logprobs.get("content") or ()
    ]
    return {**logprobs, "content": content}


def to_completion(logprobs: Json | None, limit: int | None, offset: int = 0) -> Json | None:
    """Return chat logprobs in the shape of ``/v1/completions``.

    Args:
        offset: where the first token begins, in characters of all tokens before it.
    """
    if logprobs is None:
        return None
    offsets, values, tokens, tops = [], [], [], []
    for position in logprobs.get("content") or ():
        token = position["token"]
        offsets.append(offset)
        values.append(position["logprob"])
        tokens.append(token)
        tops.append(_by_token(position, limit))
        offset += len(token)
    return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}


def end_offset(logprobs: Json | None, offset: int) -> int:
    """Return where the token after those of completion logprobs begins; ``offset`` if they hold none."""
    if not logprobs or not logprobs["tokens"]:
        return offset
    return int(logprobs["text_offset"][-1]) + len(logprobs["tokens"][-1])


def _by_token(position: Json, limit: int | None) -> dict[str, Any]:
    candidates = (position.get("top_logprobs") or [])[:limit]
    return {candidate["token"]: candidate["logprob"] for candidate in candidates}
