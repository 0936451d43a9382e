"""What ``/inference/v1/generate`` refuses, and how it reads a request that it takes.

Source: recordings ``errors/generate_*``.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from coordinator.sim.refusals import Refusal, unknown_model, value_error
from coordinator.sim.sampling import Sampling, check_transfer_ints
from coordinator.sim.schema import Schema

if TYPE_CHECKING:
    from collections.abc import Mapping

    from coordinator.sim.settings import Settings

_CONTEXT_FIELDS = {
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "include_reasoning",
    "chat_template_kwargs",
    "history_tool_call_cnt",
}


def output_mode(body: Mapping[str, Any], settings: Settings) -> str | None:
    """Return the mode; None on a server that knows none, whatever was asked."""
    return (body.get("output_mode") or "tokens") if settings.output_modes else None


def transfer_params(body: Mapping[str, Any], sampling: Sampling) -> Mapping[str, Any] | None:
    """Return the params that reach the connector: top level wins over ``extra_args``."""
    nested = (sampling.extra_args or {}).get("kv_transfer_params")
    params: Mapping[str, Any] | None = body.get("kv_transfer_params") or nested
    return params


def checked(body: Mapping[str, Any], mode: str | None, settings: Settings) -> Sampling:
    """Check all that is checked before the engine sees the request, in vLLM's order.

    Raises:
        Refusal
    """
    _check_schema(body, mode, settings)
    if body.get("model") and body["model"] != settings.model:
        raise unknown_model(body["model"], settings.model)
    _check_mode(body, mode, settings)
    _check_cache_salt(body.get("cache_salt"))
    check_transfer_ints(body.get("kv_transfer_params"))
    check_transfer_ints(body.get("ec_transfer_params"))
    given = dict(body["sampling_params"])
    room = settings.max_model_len - len(body["token_ids"])
    if given.get("max_tokens") is None:
        if room < 1:
            raise Refusal(
                f"Input length ({len(body['token_ids'])}) exceeds model's maximum context length "
                f"({settings.max_model_len})."
            )
        given["max_tokens"] = room
    sampling = Sampling.of(given)
    if sampling.n > settings.max_num_seqs:
        raise Refusal(
            f"sampling_params.n must be at most the server's max_num_seqs ({settings.max_num_seqs}), got {sampling.n}."
        )
    if sampling.max_tokens is not None:
        sampling.max_tokens = max(min(sampling.max_tokens, room), 1)
    if settings.tokens_only:
        _check_tokens_only(sampling)
        sampling.detokenize = False
    return sampling


def _check_schema(body: Mapping[str, Any], mode: str | None, settings: Settings) -> None:
    schema = Schema(body)
    schema.required("token_ids", "sampling_params")
    schema.strings("request_id", "model", "cache_salt")
    schema.booleans("stream", "return_token_ids", "reasoning_ended")
    schema.objects("kv_transfer_params", "ec_transfer_params", "stream_options", "features")
    schema.lists("content_parts", "token_offsets")
    schema.priority()
    _check_token_ids(schema)
    _check_sampling_types(schema)
    _check_reasoning_kwargs(schema)
    if mode is not None and mode not in settings.output_modes:
        names = [f"'{name}'" for name in settings.output_modes]
        expected = f"{', '.join(names[:-1])} or {names[-1]}"
        schema.wrong("body.output_mode", "literal_error", f"Input should be {expected}", mode, expected=expected)
    if settings.parse_context:
        _check_parse_context(schema, mode)
    schema.done()
    if mode in ("text", "derender") and body["sampling_params"].get("detokenize") is False:
        schema.invalid("body", f"output_mode='{mode}' requires sampling_params.detokenize to be true", body)
    _check_features(schema)
    schema.done()


def _check_token_ids(schema: Schema) -> None:
    ids = schema.body.get("token_ids")
    if "token_ids" not in schema.body:
        return
    if not isinstance(ids, list):
        schema.wrong("body.token_ids", "list_type", "Input should be a valid list", ids)
    elif not ids:
        schema.wrong(
            "body.token_ids",
            "too_short",
            "List should have at least 1 item after validation, not 0",
            ids,
            field_type="List",
            min_length=1,
            actual_length=0,
        )
    else:
        for at, id in enumerate(ids):
            if isinstance(id, bool) or not isinstance(id, int):
                schema.integer(f"body.token_ids.{at}", id)
                return
        if min(ids) < 0:
            schema.invalid("body.token_ids", "token_ids must not contain negative values", ids)


def _check_sampling_types(schema: Schema) -> None:
    params = schema.body.get("sampling_params")
    if "sampling_params" not in schema.body:
        return
    inner = Schema(schema.body)
    if isinstance(params, dict):
        for name, check in _SAMPLING_TYPES.items():
            if params.get(name) is not None:
                check(inner, f"body.sampling_params.{name}", params[name])
        if not inner.errors:
            return
    schema.wrong(
        "body.sampling_params",
        "is_instance_of",
        "Input should be an instance of SamplingParams",
        params,
        **{"class": "SamplingParams"},
    )
    schema.errors += inner.errors


def _strings(schema: Schema, loc: str, value: Any) -> None:
    if not isinstance(value, str | list) or not all(isinstance(item, str) for item in value):
        schema.wrong(loc, "list_type", "Input should be a valid list", value)


def _integers(schema: Schema, loc: str, value: Any) -> None:
    if not isinstance(value, list):
        schema.wrong(loc, "list_type", "Input should be a valid list", value)
    else:
        for at, item in enumerate(value):
            schema.integer(f"{loc}.{at}", item)


def _object(schema: Schema, loc: str, value: Any) -> None:
    if not isinstance(value, dict):
        schema.wrong(loc, "dict_type", "Input should be a valid dictionary", value)


def _boolean(schema: Schema, loc: str, value: Any) -> None:
    if not isinstance(value, bool):
        schema.wrong(loc, "bool_type", "Input should be a valid boolean", value)


_SAMPLING_TYPES = {
    **dict.fromkeys(
        (
            "temperature",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
        ),
        Schema.number,
    ),
    **dict.fromkeys(
        (
            "n",
            "top_k",
            "seed",
            "max_tokens",
            "min_tokens",
            "logprobs",
            "prompt_logprobs",
            "stream_interval",
        ),
        Schema.integer,
    ),
    **dict.fromkeys(("stop", "bad_words"), _strings),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids", "logprob_token_ids"), _integers),
    **dict.fromkeys(("structured_outputs", "logit_bias", "extra_args"), _object),
    **dict.fromkeys(("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"), _boolean),
}


def _check_reasoning_kwargs(schema: Schema) -> None:
    kwargs = schema.body.get("reasoning_parser_kwargs")
    if kwargs is None:
        return
    schema.objects("reasoning_parser_kwargs")
    for name in kwargs if isinstance(kwargs, dict) else ():
        if name != "chat_template_kwargs":
            loc = f"body.reasoning_parser_kwargs.{name}"
            schema.wrong(loc, "extra_forbidden", "Extra inputs are not permitted", kwargs[name])


def _check_parse_context(schema: Schema, mode: str | None) -> None:
    context = schema.body.get("parse_context")
    if context is None:
        return
    schema.objects("parse_context")
    if not isinstance(context, dict):
        return
    count = context.get("history_tool_call_cnt", 0)
    if isinstance(count, int) and count < 0:
        loc = "body.parse_context.history_tool_call_cnt"
        message = "Input should be greater than or equal to 0"
        schema.wrong(loc, "greater_than_equal", message, count, ge=0)
    unknown = sorted(context.keys() - _CONTEXT_FIELDS)
    if unknown and mode == "derender":
        advice = "the render server is newer than this generate server"
        schema.invalid("body", f"Unknown parse_context fields {unknown}; {advice}", schema.body)


def _check_features(schema: Schema) -> None:
    features, body = schema.body.get("features"), schema.body
    if features is None:
        return
    if body.get("content_parts") is not None:
        schema.invalid("body", "content_parts and features are mutually exclusive", body)
        return
    hashes, places = features.get("mm_hashes") or {}, features.get("mm_placeholders") or {}
    if hashes.keys() != places.keys():
        schema.invalid("body.features", "mm_hashes and mm_placeholders must use the same modalities", features)
        return
    for modality in hashes:
        if len(hashes[modality]) != len(places[modality]):
            message = f"{modality} mm_hashes and mm_placeholders must have the same length"
            schema.invalid("body.features", message, features)
            return
    spans = sorted((p["offset"], p["offset"] + p["length"]) for group in places.values() for p in group)
    if any(end > start for (_, end), (start, _) in itertools.pairwise(spans)):
        message = "mm_placeholders must be globally non-overlapping and sorted"
        schema.invalid("body.features", message, features)
    elif spans and spans[-1][1] > len(body["token_ids"]):
        schema.invalid("body", "mm_placeholders must remain within the token_ids sequence", body)
    elif features.get("mm_metadata") and not features.get("kwargs_data") and not body.get("ec_transfer_params"):
        schema.invalid("body", "metadata-only multimodal items require ec_transfer_params", body)


def _check_mode(body: Mapping[str, Any], mode: str | None, settings: Settings) -> None:
    if body.get("stream") and body["sampling_params"].get("prompt_logprob_token_ids") is not None:
        raise Refusal("prompt_logprob_token_ids are not available when stream=true.")
    if mode in ("text", "derender") and settings.tokens_only:
        raise Refusal(
            f"output_mode='{mode}' requires a tokenizer, but this server does not load one (--tokens-only or "
            "--skip-tokenizer-init). Send the request to a server that loads a tokenizer, or use "
            "output_mode='tokens'."
        )
    if mode != "derender":
        return
    if body.get("stream"):
        raise Refusal("output_mode='derender' does not support stream=true.")
    context = body.get("parse_context")
    if context is None and settings.parsers:
        raise Refusal(
            "output_mode='derender' requires parse_context on a server with a tool or reasoning parser. "
            "Use the one returned by /render."
        )
    check_named_tool((context or {}).get("tool_choice"), (context or {}).get("tools"))


def check_named_tool(choice: Any, tools: Any) -> None:
    """
    Raises:
        Refusal: the tool choice names a tool that is not there.
    """
    if not isinstance(choice, dict):
        return
    name = (choice.get("function") or {}).get("name")
    if name not in {(tool.get("function") or {}).get("name") for tool in tools or ()}:
        raise value_error(
            "The tool specified in `tool_choice` does not match any of the specified `tools`",
            param="tool_choice",
        )


def _check_cache_salt(salt: str | None) -> None:
    if salt is None:
        return
    if not salt:
        raise value_error("Parameter 'cache_salt' must be a non-empty string if provided.", param="cache_salt")
    if len(salt) > 128 or set(salt) & set("@/\\\0"):
        raise value_error(
            "Parameter 'cache_salt' must be at most 128 characters and must not contain '@', '/', '\\\\', or NUL.",
            param="cache_salt",
        )


def _check_tokens_only(sampling: Sampling) -> None:
    if sampling.stop:
        raise Refusal(
            "stop strings are not supported on a --tokens-only server because detokenization is disabled. "
            "Check stop strings on the coordinator, or use stop_token_ids."
        )
    if sampling.structured_outputs:
        raise Refusal("Structured outputs requires a tokenizer so it can't be used with 'skip_tokenizer_init'")
