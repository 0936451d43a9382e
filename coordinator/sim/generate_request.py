"""What ``/inference/v1/generate`` refuses, and how it reads a request that it takes.

Source: recordings ``errors/generate_*``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coordinator.sim.generate_schema import check_schema
from coordinator.sim.refusals import Refusal, unknown_model, value_error
from coordinator.sim.sampling import Sampling, check_transfer_ints

if TYPE_CHECKING:
    from collections.abc import Mapping

    from coordinator.sim.settings import Settings


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
    check_schema(body, mode, settings)
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
