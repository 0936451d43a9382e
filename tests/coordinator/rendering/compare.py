"""Two render answers made comparable: what stands for the same is written the same way."""

from __future__ import annotations

from typing import Any

# vLLM's dump leaves out what is its default object, so that an equal value is there in one answer and not in another.
ENGINE_DEFAULTS: dict[str, Any] = {
    "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "temperature": 1.0,
    "top_p": 1.0, "top_k": 0, "min_p": 0.0, "stop": [], "stop_token_ids": [], "bad_words": [], "ignore_eos": False,
    "max_tokens": 16, "min_tokens": 0, "include_stop_str_in_output": False, "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "output_text_buffer_length": 0, "routed_experts_prompt_start": 0,
    "skip_reading_prefix_cache": False,
}  # fmt: skip


def normal(answer: Any) -> dict[str, Any]:
    """Return a render answer with every default written out."""
    if isinstance(answer, list):
        (answer,) = answer
    params = {key: value for key, value in answer["sampling_params"].items() if value is not None}
    return {**answer, "sampling_params": {**ENGINE_DEFAULTS, **params}}
