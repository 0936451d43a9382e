"""The ``sampling_params`` that vLLM's render resolves from a client's fields.

A field that the client left out takes the model's own default (generation_config.json), then the API's. What equals the
engine's default is left out of the result, except the cap on the output: without one the generate route goes on to the
end of the context.

Source: vLLM 0.33 ``to_sampling_params`` of the chat and completion requests, ``SamplingParams.__post_init__``,
``get_max_tokens``, ``ModelConfig.get_diff_sampling_param``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from envelope.errors import BadRequest

if TYPE_CHECKING:
    from coordinator.rendering.fields import ClientFields
    from coordinator.rendering.parsers import Adjusted
    from envelope.json_codec import Json

DELTA, FINAL_ONLY = 1, 2  # of vLLM's RequestOutputKind

# In the order in which they are looked up in the model's generation_config.json.
_FROM_MODEL = (
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("temperature", "top_k", "top_p", "min_p", "max_new_tokens", "skip_special_tokens"),
)
_API_DEFAULTS: Json = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
}
_ENGINE_DEFAULTS: Json = {
    **_API_DEFAULTS,
    "n": 1,
    "stop": [],
    "stop_token_ids": [],
    "bad_words": [],
    "ignore_eos": False,
    "min_tokens": 0,
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "output_text_buffer_length": 0,
    "routed_experts_prompt_start": 0,
}
_NO_STRUCTURE: Json = {
    "json": None,
    "regex": None,
    "choice": None,
    "grammar": None,
    "json_object": None,
    "disable_any_whitespace": False,
    "disable_additional_properties": False,
    "whitespace_pattern": None,
    "structural_tag": None,
    "_backend": None,
    "_backend_was_auto": False,
}
_GREEDY_BELOW, _LEAST_RANDOM = 1e-5, 1e-2
_MAX_N = 16384


def model_defaults(generation_config: Json) -> Json:
    """Return what a model's generation config says of sampling, in the engine's names."""
    found = {name: generation_config[name] for name in _FROM_MODEL if generation_config.get(name) is not None}
    if "max_new_tokens" in found:
        found["max_tokens"] = found.pop("max_new_tokens")
    return found


def output_cap(asked: int | None, prompt_tokens: int, max_model_len: int, defaults: Json, most: int | None) -> int:
    """Return the cap on output tokens: what was asked for, as far as the context and the deployment go."""
    given = asked if asked is not None else defaults.get("max_tokens")
    return min(cap for cap in (max_model_len - prompt_tokens, given, most) if cap is not None)


def sampling_params(fields: ClientFields, max_tokens: int, defaults: Json, adjusted: Adjusted) -> Json:
    """Return a client's ``sampling_params``.

    Raises:
        BadRequest: a value is out of range.
    """
    params = {name: _first(getattr(fields, name), defaults.get(name), api) for name, api in _API_DEFAULTS.items()}
    skip = _first(adjusted.skip_special_tokens, fields.skip_special_tokens, defaults.get("skip_special_tokens", True))
    params |= {
        "n": 1 if fields.n is None else fields.n,
        "watermarking": fields.watermarking,
        "seed": None if fields.seed == -1 else fields.seed,
        "stop": [fields.stop] if isinstance(fields.stop, str) else fields.stop or [],
        "stop_token_ids": list(dict.fromkeys(fields.stop_token_ids or ())),
        "logprobs": None if fields.logprob_token_ids else fields.sampled_logprobs,
        "prompt_logprobs": fields.echoed_logprobs if fields.prompt_logprobs is None else fields.prompt_logprobs,
        "logprob_token_ids": fields.logprob_token_ids or None,
        "ignore_eos": fields.ignore_eos,
        "max_tokens": 1 if fields.only_echoes else max_tokens,
        "min_tokens": fields.min_tokens,
        "skip_special_tokens": skip,
        "spaces_between_special_tokens": fields.spaces_between_special_tokens,
        "include_stop_str_in_output": fields.include_stop_str_in_output,
        "stream_interval": fields.stream_interval,
        "structured_outputs": adjusted.structure and {**_NO_STRUCTURE, **adjusted.structure},
        "logit_bias": _logit_bias(fields.logit_bias),
        "bad_words": list(dict.fromkeys(fields.bad_words)),
        "thinking_token_budget": None if fields.thinking_token_budget == -1 else fields.thinking_token_budget,
        "allowed_token_ids": fields.allowed_token_ids,
        "extra_args": fields.vllm_xargs or None,
        "repetition_detection": fields.repetition_detection and fields.repetition_detection.model_dump(),
        "routed_experts_prompt_start": fields.routed_experts_prompt_start,
    }
    _check(params)
    return _written(_settled(params), stream=bool(fields.stream))


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _logit_bias(given: dict[str, float] | None) -> dict[str, float] | None:
    if given is None:
        return None
    wrong = [token for token in given if not _is_int(token)]
    if wrong:
        raise BadRequest(
            f"logit_bias contains key(s) that cannot be converted to integer token IDs: {wrong!r}", param="logit_bias"
        )
    return {str(int(token)): min(100.0, max(-100.0, bias)) for token, bias in given.items()}


def _is_int(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


def _check(params: Json) -> None:
    """Refuse what the engine would, in its words and its order."""
    if not 1 <= params["n"] <= _MAX_N:
        bound = "at least 1" if params["n"] < 1 else f"at most {_MAX_N}"
        raise BadRequest(f"n must be {bound}, got {params['n']}.", param="n")
    _check_integers(params["extra_args"])
    for name, low, high, says in (
        ("presence_penalty", -2.0, 2.0, "in [-2, 2]"),
        ("frequency_penalty", -2.0, 2.0, "in [-2, 2]"),
        ("temperature", 0.0, 2.0, "in [0, 2]"),
        ("min_p", 0.0, 1.0, "in [0, 1]"),
    ):
        if not low <= params[name] <= high:
            raise BadRequest(f"{name} must be {says}, got {params[name]}.", param=name)
    if not 0.0 < params["repetition_penalty"] < math.inf:
        raise BadRequest(
            f"repetition_penalty must be greater than zero, got {params['repetition_penalty']}.",
            param="repetition_penalty",
        )
    if not 0.0 < params["top_p"] <= 1.0:
        raise BadRequest(f"top_p must be in (0, 1], got {params['top_p']}.", param="top_p")
    if params["top_k"] < -1:
        raise BadRequest(f"top_k must be 0 (disable), or at least 1, got {params['top_k']}.", param="top_k")
    if params["max_tokens"] < 1:
        raise BadRequest(f"max_tokens must be at least 1, got {params['max_tokens']}.", param="max_tokens")
    if not 0 <= params["min_tokens"] <= params["max_tokens"]:
        bound = "greater than or equal to 0" if params["min_tokens"] < 0 else "less than or equal to max_tokens"
        raise BadRequest(f"min_tokens must be {bound}, got {params['min_tokens']}.", param="min_tokens")
    for name in ("logprobs", "prompt_logprobs"):
        if params[name] is not None and params[name] < -1:
            raise BadRequest(f"{name} must be non-negative or -1, got {params[name]}.", param=name)
    if "" in params["stop"]:
        raise BadRequest("stop cannot contain an empty string.", param="stop")
    if "" in params["bad_words"]:
        raise BadRequest("bad_words cannot contain an empty string.", param="bad_words")
    if params["temperature"] < _GREEDY_BELOW and params["n"] > 1:
        raise BadRequest(f"n must be 1 when using greedy sampling, got {params['n']}.", param="n")


def _check_integers(value: Any) -> None:
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        if isinstance(item, int) and not -(2**63) <= item < 2**64:
            raise BadRequest("extra_args integers must be between -2**63 and 2**64 - 1.", param="vllm_xargs")
        _check_integers(item)


def _settled(params: Json) -> Json:
    """Return the params as the engine settles them: greedy ones lose what only sampling needs."""
    if params["temperature"] < _GREEDY_BELOW:
        params = {**params, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    elif params["temperature"] < _LEAST_RANDOM:
        params = {**params, "temperature": _LEAST_RANDOM}
    if params["stop"] and not params["include_stop_str_in_output"]:
        # How many characters the engine holds back, since they may begin a stop string.
        params = {**params, "output_text_buffer_length": max(map(len, params["stop"])) - 1}
    return params


def _written(params: Json, *, stream: bool) -> Json:
    written = {
        name: value for name, value in params.items() if value is not None and value != _ENGINE_DEFAULTS.get(name)
    }
    return written | {
        "output_kind": DELTA if stream else FINAL_ONLY,
        "skip_clone": True,
        "skip_reading_prefix_cache": params["prompt_logprobs"] is not None,
    }
