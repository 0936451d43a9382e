"""Token counts as vLLM shows them; which keys are there depends on the route and on the kind of answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coordinator.sim.core import Generation


def counts(prompt: int, completion: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


def prompt_details(generation: Generation, *, in_stream: bool = False) -> dict[str, Any] | None:
    """Return the cache's share, which a server shows with ``--enable-prompt-tokens-details`` alone.

    Args:
        in_stream: keys that are null are left out.
    """
    if not generation.settings.prompt_tokens_details:
        return None
    details = {"cached_tokens": generation.cached, "created_cache_tokens": generation.newly_cached}
    return details if in_stream else {**details, "multimodal_tokens": None}


def full(
    prompt: int, completion: int, *, prompt_details: dict[str, Any] | None, details: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the object of a whole answer, null keys included."""
    return {
        **counts(prompt, completion),
        "prompt_tokens_details": prompt_details,
        "completion_tokens_details": details,
    }


def set_only(
    prompt: int, completion: int, *, prompt_details: dict[str, Any] | None, details: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the object of a stream's last chunk: without the keys that are null."""
    whole = full(prompt, completion, prompt_details=prompt_details, details=details)
    return {key: value for key, value in whole.items() if value is not None}
