"""What every rebuilt envelope shares: the id, the choices, and what the client asked to see of the tokens."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from envelope.errors import LegUnreadable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from envelope.json_codec import Json
    from envelope.shape import Asked

# What Python raises over a value that has another shape than it is read by.
MISSHAPEN = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)

_GENERATE_PREFIX = "generate-tokens-"


@contextmanager
def reading(leg: str) -> Iterator[None]:
    """Take a worker's answer apart: where it has another shape than its route's, the worker is at fault.

    Raises:
        LegUnreadable
    """
    try:
        yield
    except MISSHAPEN as error:
        raise LegUnreadable(leg, f"cannot read the worker's answer: {error!r}") from error


def answer_id(request_id: Any, asked: Asked, prefix: str) -> str:
    """Return the id that vLLM's own route would have given, made of the generate answer's id.

    Args:
        request_id: the worker's, ``generate-tokens-`` and the leg's id; without it ``asked.leg_id`` is used.
        prefix: the route's, such as ``chatcmpl-``; it is not put twice.
    """
    own = request_id if isinstance(request_id, str) and request_id else asked.leg_id
    return prefix + own.removeprefix(_GENERATE_PREFIX).removeprefix(prefix)


def model_name(reply: Json, asked: Asked) -> str:
    """Return the model's name: the worker's word, else what was asked for."""
    return str(reply.get("model") or asked.body.get("model") or (asked.rendered or {}).get("model") or "")


def choices_of(reply: Json) -> list[Json]:
    """Return the choices of a generate answer, in the order of their indexes.

    Raises:
        LegUnreadable: there is none, or one is no object, or its index no number.
    """
    choices = reply.get("choices")
    if not isinstance(choices, list) or not choices or not all(isinstance(item, dict) for item in choices):
        raise LegUnreadable("decode", "the worker's answer has no choices")
    if not all(isinstance(choice.get("index") or 0, int) for choice in choices):
        raise LegUnreadable("decode", "a choice of the worker's answer has an index that is no number")
    return sorted(choices, key=lambda choice: choice.get("index") or 0)


def content_of(choice: Json) -> str | None:
    """Return the text of a choice, of either output mode. None is a message without content (a tool call).

    Raises:
        LegUnreadable: the choice has neither text nor message.
    """
    message = choice.get("message")
    if isinstance(message, dict):
        content = message.get("content")
        return content if content is None else str(content)
    text = choice.get("text")
    if not isinstance(text, str):
        raise LegUnreadable("decode", "the worker's answer holds neither text nor message, as if it had no output_mode")
    return text


def choice_count(asked: Asked) -> int:
    """Return how many choices were asked for; 1 where nothing valid says so."""
    sampling = (asked.rendered or {}).get("sampling_params") or {}
    n = sampling.get("n", asked.body.get("n"))
    return n if isinstance(n, int) and n > 1 else 1


def prompt_token_ids(reply: Json, asked: Asked) -> Any:
    """Return the prompt's token ids as the worker tells them, else as they were rendered."""
    return reply.get("prompt_token_ids") or (asked.rendered or {}).get("token_ids")
