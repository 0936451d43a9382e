"""The render routes: an OpenAI request in, a generate request out.

Source: recordings ``render/``.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from coordinator.sim import conversations, features, prompts, tokenizer
from coordinator.sim.answers import Answer, Call, Whole
from coordinator.sim.refusals import Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from coordinator.sim.core import Core
    from coordinator.sim.prompts import Prepared
    from coordinator.sim.settings import Settings


async def chat(core: Core, call: Call) -> Answer:
    _check_beam_search(call.body)
    prepared = prompts.prepare_chat(call.body, core.settings)
    return Whole(
        _request(f"chatcmpl-{call.id}", prepared, _by_release(call.body, [prepared], core.settings), core.settings)
    )


async def completions(core: Core, call: Call) -> Answer:
    _check_beam_search(call.body)
    every = prompts.prepare_completions(call.body, core.settings)
    body = _by_release(call.body, every, core.settings)
    ids = [f"cmpl-{call.id}"] if len(every) == 1 else [f"cmpl-{call.id}-{at}" for at in range(len(every))]
    return Whole([_request(id, prepared, body, core.settings) for id, prepared in zip(ids, every, strict=True)])


async def responses(core: Core, call: Call) -> Answer:
    if call.body.get("previous_response_id") is not None:
        raise Refusal(
            "previous_response_id is not supported by the stateless render endpoint.",
            type="invalid_request_error",
            param="previous_response_id",
        )
    prepared = conversations.prepare_responses(call.body, core.settings)
    body = {**call.body, "stream_options": None, "return_token_ids": None}
    return Whole(_request(response_id(call), prepared, body, core.settings, parsed=False))


async def messages(core: Core, call: Call) -> Answer:
    prepared = conversations.prepare_messages(call.body, core.settings)
    options = {"include_usage": True, "continuous_usage_stats": True} if call.wants_stream else None
    body = {**call.body, "stream_options": options}
    return Whole(_request(f"chatcmpl-{call.id}", prepared, body, core.settings))


def response_id(call: Call) -> str:
    """Return the body's id as it is, or a new one; the header is not used here."""
    return call.body.get("request_id") or f"resp_{secrets.token_hex(8)}"


def _by_release(body: Mapping[str, Any], prepared: Sequence[Prepared], settings: Settings) -> Mapping[str, Any]:
    """Move transfer params to where releases before 0.33 left them: inside ``extra_args``."""
    params = {key: body[key] for key in ("kv_transfer_params", "ec_transfer_params") if body.get(key) is not None}
    if settings.at_least(0, 33):
        return body
    for one in prepared if params else ():
        one.sampling.extra_args = {**(one.sampling.extra_args or {}), **params}
    return {key: value for key, value in body.items() if key not in params and key != "return_token_ids"}


def _check_beam_search(body: Mapping[str, Any]) -> None:
    if body.get("use_beam_search"):
        raise Refusal("Beam search is not supported by the render endpoint")


def _request(
    id: str, prepared: Prepared, body: Mapping[str, Any], settings: Settings, *, parsed: bool = True
) -> dict[str, Any]:
    """Return the generate request.

    Args:
        parsed: the route says how its answer is to be parsed; responses does not.
    """
    kwargs = prepared.template_kwargs
    with_parser = parsed and settings.parsers and prepared.context is not None
    request: dict[str, Any] = {
        "request_id": id,
        "token_ids": prepared.token_ids,
        "token_offsets": None,
        "features": features.written(prepared.media, payload=_wants_payload(body)),
        "content_parts": None,
        "sampling_params": prepared.sampling.rendered(),
        "model": settings.model,
        "reasoning_ended": prepared.reasoning_ended if with_parser else None,
        "reasoning_parser_kwargs": {"chat_template_kwargs": kwargs} if settings.parsers and kwargs else None,
        "return_token_ids": body.get("return_token_ids"),
        "output_mode": "tokens",
    }
    if body.get("return_token_offsets") and prepared.text is not None:
        request["token_offsets"] = tokenizer.load().offsets(prepared.text)
    if settings.at_least(0, 33):
        request["parse_context"] = prepared.context if parsed else None
    return request | {
        "stream": bool(body.get("stream")),
        "stream_options": _stream_options(body.get("stream_options")),
        "cache_salt": body.get("cache_salt"),
        "priority": body.get("priority") or 0,
        "kv_transfer_params": body.get("kv_transfer_params"),
        "ec_transfer_params": body.get("ec_transfer_params"),
    }


def _wants_payload(body: Mapping[str, Any]) -> bool:
    old_spelling = "none" if body.get("return_mm_kwargs") is False else "tensors"
    return bool(body.get("mm_payload", old_spelling) != "none")


def _stream_options(options: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if options is None:
        return None
    return {"include_usage": False, "continuous_usage_stats": False, **options}
