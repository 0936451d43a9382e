"""Streams of Anthropic's ``/v1/messages``: generate's text chunks, or a whole answer, as events.

The order of a stream: ``message_start``; per block ``content_block_start``, deltas, ``content_block_stop``;
``message_delta``, ``message_stop``. There is no ``[DONE]``.

Source: vLLM 0.33 ``message_stream_converter``; recorded in ``messages/*_stream.sse``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from envelope import messages_blocks, usage
from envelope.json_codec import dumps
from envelope.messages_blocks import (
    call_id,
    message_id,
    parsed_input,
    stop_reason,
    stop_reason_of,
    token_counts,
)
from envelope.rebuild import model_name
from envelope.turn import TextChunks, turn_of

if TYPE_CHECKING:
    from envelope.errors import ApiError
    from envelope.json_codec import Json
    from envelope.shape import Asked
    from envelope.turn import Turn

# Statuses that Anthropic's API has a word for; any other 4xx is the request's fault, and 5xx the server's.
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_MESSAGE_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
_TEXT_START = (
    b'event: content_block_start\ndata: {"type":"content_block_start",'
    b'"content_block":{"type":"text","text":""},"index":0}\n\n'
)
_TEXT_DELTA = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"text_delta","text":',
    b'},"index":0}\n\n',
)
_TEXT_STOP = b'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'


class Chunks(TextChunks):
    """Generate's text chunks as one text block: nothing is parsed, so no thinking and no tool use."""

    _open = False  # the text block, which starts with the first text

    def _begin(self) -> bytes:
        # The prompt is counted before what came from the cache is known; message_delta tells that.
        prompt = (self.usage or {}).get("prompt_tokens") or usage.prompt_length(self._asked.rendered)
        return message_start(self._asked, model_name({}, self._asked), prompt)

    def _delta(self, text: str, choice: Json) -> bytes:
        before, after = _TEXT_DELTA
        delta = before + dumps(text) + after
        if self._open:
            return delta
        self._open = True
        return _TEXT_START + delta

    def _end(self) -> bytes:
        stop = stop_reason_of(self._finish, self._stop)
        return (_TEXT_STOP if self._open else b"") + message_end(stop, self._counts())

    def _broken(self, error: Json) -> bytes:
        return (_TEXT_STOP if self._open else b"") + error_frame(error)


def replay(reply: Json, asked: Asked) -> bytes:
    """Return a whole generate answer as a stream: every block with one delta.

    Raises:
        LegFailed: the answer has no choices, or nothing in its choice.
    """
    turn = turn_of(reply)
    counts = usage.of_reply(reply, asked.rendered)
    parts = [message_start(asked, model_name(reply, asked), counts.get("prompt_tokens") or 0)]
    for index, (block, deltas) in enumerate(_blocks(turn, asked)):
        parts.append(event("content_block_start", {"content_block": block, "index": index}))
        parts += [event("content_block_delta", {"delta": delta, "index": index}) for delta in deltas]
        parts.append(event("content_block_stop", {"index": index}))
    parts.append(message_end(stop_reason(turn), counts))
    return b"".join(parts)


def error_object(error: Json) -> Json:
    """Return Anthropic's error body for an OpenAI ``error`` object, whose ``code`` is the HTTP status."""
    code = error.get("code")
    status = code if isinstance(code, int) else 500
    kind = _ERROR_TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(error.get("message") or "")}}


def error_body(error: ApiError, request_id: str) -> bytes:
    """Return the JSON body of an error answer."""
    return dumps(error_object({**error.body(request_id), "code": error.status}))


def error_event(error: ApiError, request_id: str) -> bytes:
    """Return the event that tells of a failure once the status line is spent; it ends the stream."""
    return error_frame({**error.body(request_id), "code": error.status})


def error_frame(error: Json) -> bytes:
    return b"event: error\ndata: " + dumps(error_object(error)) + b"\n\n"


def _blocks(turn: Turn, asked: Asked) -> list[tuple[Json, list[Json]]]:
    """Return each block as it starts, with the deltas that fill it."""
    found: list[tuple[Json, list[Json]]] = []
    if turn.reasoning:
        deltas = [
            {"type": "thinking_delta", "thinking": turn.reasoning},
            {"type": "signature_delta", "signature": messages_blocks.signature(asked)},
        ]
        found.append(({"type": "thinking", "thinking": ""}, deltas))
    if turn.text:
        found.append(({"type": "text", "text": ""}, [{"type": "text_delta", "text": turn.text}]))
    for i, call in enumerate(turn.calls):
        found.append(_call(call, i, asked))
    return found


def _call(call: Json, index: int, asked: Asked) -> tuple[Json, list[Json]]:
    function = call["function"]
    arguments = function.get("arguments")
    if parsed_input(call) is None:
        return {"type": "text", "text": ""}, [{"type": "text_delta", "text": arguments}]
    block = {"type": "tool_use", "id": call_id(call, index, asked), "name": function["name"], "input": {}}
    return block, [{"type": "input_json_delta", "partial_json": arguments}] if arguments else []


def message_start(asked: Asked, model: str, prompt_tokens: int) -> bytes:
    message: Json = {
        "id": message_id(asked),
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": model,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": prompt_tokens, "output_tokens": 0},
    }
    return event("message_start", {"message": message})


def message_end(stop: tuple[str | None, str | None], counts: Json) -> bytes:
    reason, sequence = stop
    fields = {"delta": {"stop_reason": reason, "stop_sequence": sequence}, "usage": token_counts(counts)}
    return event("message_delta", fields) + _MESSAGE_STOP


def event(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + dumps({"type": kind, **fields}) + b"\n\n"
