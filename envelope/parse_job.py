"""What parsing an answer depends on beside its text: the prompt, the request's context, how tokens become text.

It is told to whoever parses once per request, before the first chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from envelope.formats import Format
from envelope.generate import TOKENS
from envelope.json_codec import without
from envelope.parse_context import with_parse_context

if TYPE_CHECKING:
    from envelope.json_codec import Json

_STOP_STRINGS = frozenset(("stop", "include_stop_str_in_output"))

_DECODING = (
    "stop",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


def parse_job(api: Format, rendered: Json, body: Json, mode: str, leg_id: str) -> Json:
    """Return the job of a request.

    Args:
        mode: the worker's output mode. In ``tokens`` the text is to be made of the tokens too, and stop strings, which
            the worker does not look for, end it.
    """
    sampling: dict[str, Any] = rendered.get("sampling_params") or {}
    context = None
    if api is not Format.COMPLETIONS:  # vLLM runs no parser for them
        context = with_parse_context(rendered, api, body)["parse_context"]
    decoding = {name: sampling[name] for name in _DECODING if sampling.get(name) is not None}
    return {
        "id": leg_id,
        "prompt": rendered["token_ids"],
        "n": sampling.get("n") or 1,
        "context": context,
        "decoding": {"skip_special_tokens": True, **decoding} if mode == TOKENS else None,
    }


def without_stop_strings(leg: Json) -> Json:
    """Return a generate body for a worker that has no tokenizer, and refuses stop strings for that."""
    sampling = leg["sampling_params"]
    return {**leg, "sampling_params": without(sampling, _STOP_STRINGS)}


def for_no_tokenizer(leg: Json, eos_token_id: int | None) -> Json:
    """Return a generate body for a worker that has no tokenizer, with what ours knows.

    It knows of no end token but those of the model's ``generation_config.json``: its tokenizer's, which ends answers
    elsewhere, is told to it as a stop token.
    """
    leg = without_stop_strings(leg)
    kept = leg["sampling_params"]
    if eos_token_id is not None and not kept.get("ignore_eos"):
        stops = kept.get("stop_token_ids") or []
        kept["stop_token_ids"] = stops if eos_token_id in stops else [*stops, eos_token_id]
    return leg
