"""Stop strings in text that comes in pieces, found where vLLM's engine finds them, and the choice that one has ended.

Source: vLLM 0.33 ``v1/engine/detokenizer.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from envelope.json_codec import Json


class StopStrings:
    """Looks for stop strings, none of which is empty; keeps as much of the text as one could begin in."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._longest = max(map(len, stop))
        self._tail = ""

    def found(self, text: str) -> str | None:
        """Return the stop string that ends first in the next piece of text, or None; nothing is kept of the text.

        Of several that end with the same character it is the first in the list.
        """
        held, best = self._tail + text, None
        ends_at = len(held) + 1
        for stop in self._stop:
            at = held.find(stop, max(len(self._tail) - len(stop) + 1, 0))
            if at >= 0 and at + len(stop) < ends_at:
                best, ends_at = stop, at + len(stop)
        return best

    def passed(self, text: str) -> None:
        """Go on behind a piece of text."""
        held = self._tail + text
        self._tail = held[max(len(held) - self._longest + 1, 0) :]


def ended_by(choice: Json, count: int, stop: str) -> Json:
    """Return a choice of tokens as a stop string has ended it, with its first ``count`` tokens."""
    scores: Any = choice.get("logprobs")
    if scores is not None:
        scores = {**scores, "content": (scores.get("content") or [])[:count]}
    kept = choice["token_ids"][:count]
    return {**choice, "token_ids": kept, "logprobs": scores, "finish_reason": "stop", "stop_reason": stop}


def counted(reply: Json, prompt_tokens: int) -> Json:
    """Return a whole answer with the usage of the tokens that it has: the worker counts what came after them too."""
    made = sum(len(choice.get("token_ids") or ()) for choice in reply["choices"])
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + made, "completion_tokens": made}
    return {**reply, "usage": {**(reply.get("usage") or {}), **usage}}
