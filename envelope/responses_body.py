"""The ``response`` object of ``/v1/responses``: what it echoes of the request, its status, its token counts.

vLLM takes the sampling fields from what it sampled with, so they come from the rendered request, where an
absent key means the engine's default.

Source: vLLM 0.33 ``ResponsesResponse.from_request``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from envelope.rebuild import answer_id
from envelope.responses_tools import echoed_choice, echoed_tools, filled

if TYPE_CHECKING:
    from envelope.json_codec import Json
    from envelope.shape import Asked

_ENGINE_MAX_TOKENS = 16  # render leaves out what equals the engine's default, and this is it

_FORMAT_KEYS = {
    "json_schema": ("name", "schema", "type", "description", "strict"),
    "text": ("type",),
    "json_object": ("type",),
}
_REASONING_KEYS = ("context", "effort", "generate_summary", "mode", "summary")


def response_id(asked: Asked) -> str:
    """Return the id of the answer: the client's ``request_id``, as vLLM has it, or one made of the leg's."""
    own = asked.body.get("request_id")
    return own if isinstance(own, str) and own else answer_id(None, asked, "resp_")


def response_object(
    asked: Asked, *, model: str, created: int, status: str, output: list[Json], usage: Json | None
) -> Json:
    """Return the response object, with vLLM's keys in vLLM's order.

    Args:
        status: ``in_progress``, ``completed``, ``incomplete`` or ``failed``.
        usage: as ``token_counts`` gives it; None while the answer is under way.
    """
    body, sampling = asked.body, _sampling(asked)
    return {
        "id": response_id(asked),
        "created_at": created,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata"),
        "model": model,
        "object": "response",
        "output": output,
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "temperature": float(sampling["temperature"]),
        "tool_choice": echoed_choice(body),
        "tools": echoed_tools(body),
        "top_p": float(sampling["top_p"]),
        "background": False,
        "max_output_tokens": sampling["max_tokens"],
        "max_tool_calls": body.get("max_tool_calls"),
        "previous_response_id": None,
        "prompt": None,
        "prompt_cache_options": _cache_options(body.get("prompt_cache_options")),
        "prompt_cache_key": body.get("prompt_cache_key"),
        "prompt_cache_retention": _retention(body.get("prompt_cache_retention")),
        "reasoning": _filled(body.get("reasoning"), _REASONING_KEYS),
        "safety_identifier": body.get("safety_identifier"),
        "service_tier": body.get("service_tier") or "auto",
        "status": status,
        "text": _text_config(body.get("text")),
        "top_logprobs": sampling.get("logprobs"),
        "truncation": body.get("truncation") or "disabled",
        "usage": usage,
        "user": body.get("user"),
        "presence_penalty": float(sampling["presence_penalty"]),
        "frequency_penalty": float(sampling["frequency_penalty"]),
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "input_messages": None,
        "output_messages": None,
    }


def status_of(finish: str | None) -> str:
    """Return the status of an answer, or of its last item, for generate's ``finish_reason``.

    All but ``length`` is completed, an aborted answer too: so vLLM has it.
    """
    return "incomplete" if finish == "length" else "completed"


def token_counts(usage: Json) -> Json:
    """Return usage as this API has it.

    The counts inside details are zero where generate does not tell them: what came from the cache needs a
    server flag, reasoning tokens are never told.
    """
    cached: dict[str, Any] = usage.get("prompt_tokens_details") or {}
    spent: dict[str, Any] = usage.get("completion_tokens_details") or {}
    prompt, completion = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    return {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": cached.get("cached_tokens") or 0,
            "cache_write_tokens": cached.get("created_cache_tokens") or 0,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": completion,
        "output_tokens_details": {
            "reasoning_tokens": spent.get("reasoning_tokens") or 0,
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": prompt + completion,
    }


def _sampling(asked: Asked) -> Json:
    defaults = {
        "temperature": 1.0,
        "top_p": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "max_tokens": _ENGINE_MAX_TOKENS,
    }
    if asked.rendered is not None:
        given = asked.rendered.get("sampling_params") or {}
    else:
        given = {**asked.body, "max_tokens": asked.body.get("max_output_tokens")}
    return defaults | {key: value for key, value in given.items() if value is not None}


def _filled(value: Any, keys: tuple[str, ...]) -> Any:
    return filled(value, keys) if isinstance(value, dict) else None


def _text_config(text: Any) -> Any:
    if not isinstance(text, dict):
        return None
    style = text.get("format")
    if isinstance(style, dict):
        style = filled(style, _FORMAT_KEYS.get(str(style.get("type")), ()))
    return filled({**text, "format": style}, ("format", "verbosity"))


def _cache_options(options: Any) -> Any:
    if not isinstance(options, dict):
        return None
    return {
        "mode": options.get("mode") or "implicit",
        "ttl": options.get("ttl") or "30m",
        "comparison_response_id": options.get("comparison_response_id"),
    }


def _retention(value: Any) -> Any:
    return "in_memory" if value == "in-memory" else value
