"""Any API's generation fields -> the ``sampling_params`` of the generate route.

Render does this for whole requests. Two things are left to us: a prompt that is tokenized already never sees the
renderer, and a renderer leaves out what equals the engine's default, also where absence means something else on the
generate route.

Source: vLLM ``SamplingParams``; the ``to_sampling_params`` of its chat and completion requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from envelope.formats import Format
from envelope.json_codec import dumps

if TYPE_CHECKING:
    from envelope.json_codec import Json

# Fields that have one name and one meaning everywhere.
_SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "logprob_token_ids",
    "thinking_token_budget",
    "repetition_detection",
    "structured_outputs",
    "stream_interval",
    "watermarking",
    "routed_experts_prompt_start",
)

# JSON has one kind of number: a client may write 2.0 for 2, and the engine takes an integer.
_INTEGERS = ("n", "top_k", "seed", "min_tokens", "prompt_logprobs", "thinking_token_budget")

# The output cap, in the order in which an API reads its own names for it.
OUTPUT_CAPS: dict[Format, tuple[str, ...]] = {
    Format.CHAT: ("max_completion_tokens", "max_tokens"),
    Format.COMPLETIONS: ("max_tokens",),
    Format.RESPONSES: ("max_output_tokens",),
    Format.MESSAGES: ("max_tokens",),
}

# The engine's default. A renderer drops a field that equals it, so a cap of exactly 16 vanishes.
ENGINE_MAX_TOKENS = 16


def client_sampling(api: Format, body: Json) -> Json:
    """Return what a client's body says about generation, in the engine's names; null counts as absent."""
    params = {name: body[name] for name in _SAME_NAME if body.get(name) is not None}
    params |= {name: _integer(params[name]) for name in _INTEGERS if name in params}
    stop = body.get("stop_sequences") if api is Format.MESSAGES else body.get("stop")
    if stop is not None:
        params["stop"] = [stop] if isinstance(stop, str) else stop
    if params.get("logprob_token_ids") == []:
        del params["logprob_token_ids"]  # lists none, and the engine counts an empty list as a list
    if (logprobs := _logprobs(api, body)) is not None:
        params["logprobs"] = logprobs
    if constraint := _structured(body.get("response_format")):
        own = params.get("structured_outputs")
        params["structured_outputs"] = {**(own if isinstance(own, dict) else {}), **constraint}
    if isinstance(body.get("vllm_xargs"), dict) and body["vllm_xargs"]:
        params["extra_args"] = body["vllm_xargs"]
    if (cap := output_cap(api, body)) is not None:
        params["max_tokens"] = cap
    return params


def output_cap(api: Format, body: Json) -> Any:
    """Return the cap on output tokens that a client's body means, or None where it means "the rest".

    Completions has a default of its own, 16, which null means as well.
    """
    for name in OUTPUT_CAPS.get(api, ()):
        if body.get(name) is not None:
            return _integer(body[name])
    return ENGINE_MAX_TOKENS if api is Format.COMPLETIONS else None


def asked_output(api: Format, body: Json) -> int | None:
    """Return how many output tokens a client wants at most, of any API; None where it did not say."""
    cap = body["sampling_params"].get("max_tokens") if api is Format.GENERATE else output_cap(api, body)
    return None if cap is None else int(cap)


def complete(rendered: Json, api: Format, body: Json) -> Json:
    """Return a renderer's ``sampling_params`` with what it left out put back.

    vLLM's Python renderer, which fills ``output_kind``, resolves every field: what it leaves out is the engine's
    default, and for the cap alone the generate route has another one. The Rust renderer resolves less, so there the
    client's fields stand in; absence of a cap is what the client meant.
    """
    resolved = {key: value for key, value in rendered.items() if value is not None}
    if "output_kind" in rendered:
        return {"max_tokens": ENGINE_MAX_TOKENS, **resolved}
    return {**client_sampling(api, body), **resolved}


def _integer(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _logprobs(api: Format, body: Json) -> Any:
    """Chat says ``logprobs: true`` and ``top_logprobs: k``; completions says ``logprobs: k``.

    Beside ``logprob_token_ids`` the engine takes no count, except the length of that list.
    """
    if body.get("logprob_token_ids"):
        return None
    value = body.get("logprobs")
    if api is not Format.CHAT:
        return value
    return (body.get("top_logprobs") or 0) if value is True else None


def _structured(response_format: Any) -> Json | None:
    if not isinstance(response_format, dict):
        return None
    kind = response_format.get("type")
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        schema = response_format.get("json_schema")
        return {"json": schema.get("schema")} if isinstance(schema, dict) else None
    if kind == "structural_tag":
        return {"structural_tag": dumps(response_format).decode()}  # the engine wants the text of it
    return None
