"""What pydantic refuses of a generate request, before any of vLLM's own checks.

Source: recordings ``errors/generate_error_*`` of type "Bad Request".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coordinator.sim import features
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


def check_schema(body: Mapping[str, Any], mode: str | None, settings: Settings) -> None:
    """
    Raises:
        Refusal: all that is wrong, in one.
    """
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
    if settings.at_least(0, 33):
        _check_parse_context(schema, mode)
    schema.done()
    if mode in ("text", "derender") and body["sampling_params"].get("detokenize") is False:
        schema.invalid("body", f"output_mode='{mode}' requires sampling_params.detokenize to be true", body)
    features.check_schema(schema)
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
