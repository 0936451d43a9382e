"""Output items of ``/v1/responses``: reasoning, message, and calls, in this order, whole.

Source: vLLM 0.33 ``build_response_output_items``; in a stream ``SimpleStreamingEventProcessor``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from envelope.responses_body import status_of
from envelope.responses_tools import called, custom_input

if TYPE_CHECKING:
    from envelope.json_codec import Json
    from envelope.shape import Asked
    from envelope.turn import Turn

LOGPROBS = "message.output_text.logprobs"


def items(turn: Turn, asked: Asked, *, streamed: bool = False) -> list[Json]:
    """Return the output items of a turn. Only the last one can have been cut short.

    Args:
        streamed: as they stand at the end of a stream: reasoning has a status there, and empty text no item.
    """
    last = status_of(turn.finish)
    calls = _calls(turn, asked, last)
    found: list[Json] = []
    if turn.reasoning:
        found.append(reasoning_item(asked, turn.reasoning, None))
    if turn.text or not (turn.parsed or streamed):
        status = "completed" if calls else last
        found.append(message_item(asked, turn.text, status, logprobs(turn.logprobs, asked.body)))
    found += calls
    if streamed and turn.reasoning:
        found[0]["status"] = last if len(found) == 1 else "completed"
    return found


def reasoning_item(asked: Asked, text: str, status: str | None) -> Json:
    return {
        "id": f"rs_{asked.leg_id}",
        "summary": [],
        "type": "reasoning",
        "content": [{"text": text, "type": "reasoning_text"}],
        "encrypted_content": None,
        "status": status,
    }


def message_item(asked: Asked, text: str, status: str, logprobs: list[Json] | None) -> Json:
    """Return a message item; without text it has no part."""
    return {
        "id": f"msg_{asked.leg_id}",
        "content": [text_part(text, logprobs)] if text else [],
        "role": "assistant",
        "status": status,
        "type": "message",
        "phase": None,
    }


def text_part(text: str, logprobs: list[Json] | None) -> Json:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}


def wants_logprobs(body: Json) -> bool:
    return LOGPROBS in (body.get("include") or ())


def logprobs(found: list[Json] | None, body: Json) -> list[Json] | None:
    """Return chat's logprobs, one object per token, as a text part holds them; None unless the client asked.

    Generate may hold one candidate more than ``top_logprobs``: the list is cut.
    """
    if not found or not wants_logprobs(body):
        return None
    k = max(body.get("top_logprobs") or 0, 0)
    return [
        {
            **_token(position),
            "top_logprobs": [_token(top) for top in (position.get("top_logprobs") or ())[:k]],
        }
        for position in found
    ]


def delta_logprobs(full: list[Json] | None) -> list[Json]:
    """Return a part's logprobs as a delta holds them: without bytes."""
    return [
        {
            "token": position["token"],
            "logprob": position["logprob"],
            "top_logprobs": [{"token": top["token"], "logprob": top["logprob"]} for top in position["top_logprobs"]],
        }
        for position in full or ()
    ]


def _token(position: Json) -> Json:
    token = position["token"]
    known = position.get("bytes")  # null when the server shows tokens by their id
    spelled = list(token.encode("utf-8", "replace")) if known is None else known
    return {"token": token, "bytes": spelled, "logprob": position["logprob"]}


def _calls(turn: Turn, asked: Asked, last: str) -> list[Json]:
    # The parser may find several calls where the client allows one.
    calls = turn.calls[:1] if asked.body.get("parallel_tool_calls") is False else turn.calls
    return [call_item(call, i, asked, last if i == len(calls) - 1 else "completed") for i, call in enumerate(calls)]


def call_item(call: Json, index: int, asked: Asked, status: str) -> Json:
    """Return the item of a call that chat has as ``call``; ``index`` is its place among the answer's calls."""
    function = call["function"]
    arguments = function.get("arguments") or ""
    kind, name, namespace = called(asked.body, function["name"])
    call_id = call.get("id") or f"chatcmpl-tool-{asked.leg_id}-{index}"
    nulls = {"async": None, "caller": None, "namespace": namespace}
    if kind == "custom":
        head = {
            "call_id": call_id,
            "input": custom_input(arguments),
            "name": name,
            "type": "custom_tool_call",
        }
        return {**head, "id": f"ctc_{asked.leg_id}_{index}", **nulls}
    head = {"arguments": arguments, "call_id": call_id, "name": name, "type": "function_call"}
    return {**head, "id": f"fc_{asked.leg_id}_{index}", **nulls, "status": status}
