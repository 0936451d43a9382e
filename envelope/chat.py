"""A generate answer as ``/v1/chat/completions`` sends it, whole and streamed.

Keys, their order and their nulls are vLLM's own (0.33). Only named fields are taken over from the worker, so
that nothing of the tokens-in route leaks: no request_id, output_mode, hand-over, sampling mask, placeholders.

Source: vLLM ``entrypoints/openai/chat_completion/serving.py`` and ``protocol.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from envelope import logprobs, usage
from envelope.rebuild import answer_id, choices_of, content_of, model_name

if TYPE_CHECKING:
    from envelope.json_codec import Json
    from envelope.shape import Asked

ID_PREFIX = "chatcmpl-"


def whole(reply: Json, asked: Asked) -> Json:
    """Return the ``chat.completion`` for a whole generate answer in text or derender mode.

    Raises:
        LegFailed: the answer has no choices, or one has neither text nor message.
    """
    token_ids = bool(asked.body.get("return_token_ids"))
    return {
        "id": answer_id(reply.get("request_id"), asked, ID_PREFIX),
        "object": "chat.completion",
        "created": reply.get("created") or asked.created,
        "model": model_name(reply, asked),
        "choices": [_choice(choice, asked.body) for choice in choices_of(reply)],
        "service_tier": None,
        "system_fingerprint": None,  # a hash of the worker's configuration, which generate does not tell
        "usage": usage.of_reply(reply, asked.rendered),
        "prompt_logprobs": reply.get("prompt_logprobs"),
        "prompt_token_ids": prompt_token_ids(reply, asked) if token_ids else None,
        "prompt_text": None,  # as the fingerprint: not in the answer
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": reply.get("metrics"),
    }


def prompt_token_ids(reply: Json, asked: Asked) -> Any:
    """Return the prompt as the worker tells it, else as it was rendered."""
    return reply.get("prompt_token_ids") or (asked.rendered or {}).get("token_ids")


def _choice(choice: Json, body: Json) -> Json:
    derendered = isinstance(choice.get("message"), dict)
    return {
        "index": choice.get("index") or 0,
        "message": choice["message"] if derendered else _text_message(choice, body),
        "logprobs": choice.get("logprobs") if derendered else _logprobs(choice, body),
        "finish_reason": choice.get("finish_reason"),
        "stop_reason": choice.get("stop_reason"),
        "token_ids": choice.get("token_ids") if body.get("return_token_ids") else None,
        "routed_experts": choice.get("routed_experts"),
        "weight_versions": choice.get("weight_versions") if body.get("return_weight_versions") else None,
    }


def _text_message(choice: Json, body: Json) -> Json:
    return {
        "role": role(body),
        "content": content_of(choice),
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": None,
    }


def _logprobs(choice: Json, body: Json) -> Json | None:
    return logprobs.cut(choice.get("logprobs"), logprobs.chat_limit(body)) if body.get("logprobs") else None


def role(body: Json) -> str:
    """Return who speaks: the assistant, or the last speaker when the prompt leaves its turn open."""
    messages = body.get("messages")
    if body.get("add_generation_prompt") is False and isinstance(messages, list) and messages:
        return str(messages[-1].get("role") or "assistant")
    return "assistant"
