"""OpenAI's ``/v1/responses``, rebuilt from generate's answers: whole, streamed, refused, and failed.

No state is kept between requests, so what refers to an earlier response is refused, and nothing is stored.

What vLLM's own endpoint tells and generate does not: ``reasoning_tokens`` (0 here), ``cached_tokens`` and
``cache_write_tokens`` (0 unless the worker runs with ``--enable-prompt-tokens-details``), ``input_messages`` and
``output_messages`` (null).

Source: vLLM 0.33 ``entrypoints/openai/responses``; recorded in ``responses/`` of the 0.33 recordings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from envelope import usage
from envelope.errors import BadRequest, error_body
from envelope.rebuild import model_name
from envelope.responses_body import response_object, status_of, token_counts
from envelope.responses_items import items
from envelope.responses_parsed import ParsedChunks
from envelope.responses_stream import Chunks, error_event, replay
from envelope.responses_tools import chat_choice, chat_tools
from envelope.turn import turn_of

if TYPE_CHECKING:
    from envelope.json_codec import Json
    from envelope.shape import Asked

__all__ = [
    "Chunks",
    "ParsedChunks",
    "error_body",
    "error_event",
    "parse_context",
    "prepare",
    "refuse",
    "replay",
    "whole",
]

_STATEFUL = {
    "previous_response_id": "send the earlier turns in input instead",
    "conversation": "send the earlier turns in input instead",
    "prompt": "send the template's text in instructions and input instead",
}


def whole(reply: Json, asked: Asked) -> Json:
    """Return a whole generate answer as a response object.

    Raises:
        LegFailed: the answer has no choices, or nothing in its choice.
    """
    turn = turn_of(reply)
    return response_object(
        asked,
        model=model_name(reply, asked),
        created=reply.get("created") or asked.created,
        status=status_of(turn.finish),
        output=items(turn, asked),
        usage=token_counts(usage.of_reply(reply, asked.rendered)),
    )


def refuse(body: Json) -> None:
    """Refuse what needs an earlier response, or a later look at this one.

    Raises:
        BadRequest: naming the field, and what to send instead.
    """
    for name, instead in _STATEFUL.items():
        if body.get(name) is not None:
            raise BadRequest(f"{name} is not supported, as no state is kept between requests; {instead}", param=name)
    if body.get("background"):
        raise BadRequest(
            "background is not supported, as no response is kept; leave it out, or ask for a stream",
            param="background",
        )
    given = body.get("input")
    for i, item in enumerate(given if isinstance(given, list) else ()):
        if isinstance(item, dict) and item.get("type") == "item_reference":
            raise BadRequest(
                f"input[{i}] refers to a stored item, and no item is stored; send the item itself",
                param=f"input[{i}]",
            )


def prepare(body: Json) -> Json:
    """Return the body as workers are sent it: nothing is stored, whatever the client says.

    A worker that may store would keep the response where no later request finds it.
    """
    return {**body, "store": False}


def parse_context(body: Json, rendered: Json) -> Json:
    """Return the ``parse_context`` that a worker with parsers needs for ``derender``.

    Render makes one for chat and messages and none for this API. Without one such a worker answers 400, and
    with an empty one it finds no calls.
    """
    template: Json = (rendered.get("reasoning_parser_kwargs") or {}).get("chat_template_kwargs") or {}
    return {
        "tools": chat_tools(body),
        "tool_choice": chat_choice(body),
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "include_reasoning": body.get("include_reasoning") is not False,
        "chat_template_kwargs": template,
        "history_tool_call_cnt": 0,
    }
