"""Answers of ``/inference/v1/generate``: the output modes, the echo check, and the single-frame stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from envelope.errors import LegUnechoed, LegUnreadable
from envelope.json_codec import JSONDecodeError, loads_lenient

if TYPE_CHECKING:
    from envelope.json_codec import Json

TOKENS, TEXT, DERENDER = "tokens", "text", "derender"

_SINCE = {TEXT: "0.32", DERENDER: "0.33"}


def check_echo(leg: str, asked: str, reply: Any) -> None:
    """Make sure that a worker answered in the mode it was asked for.

    A worker older than ``output_mode`` ignores the field and answers 200 with token ids alone, which a client would
    read as an empty answer. Newer ones echo the mode on every answer and chunk. ``tokens`` is what an old worker
    does anyway, so it needs no echo.

    Raises:
        LegUnechoed: the mode is missing or another one; says which vLLM is needed.
        LegUnreadable: the answer is no object.
    """
    if not isinstance(reply, dict):
        raise LegUnreadable(leg, "the worker's answer is not a JSON object")
    got = reply.get("output_mode")
    if got == asked or (asked == TOKENS and got is None):
        return
    said = "did not say in which output_mode it answered" if got is None else f"answered in output_mode {got!r}"
    raise LegUnechoed(leg, f"the worker was asked for output_mode {asked!r} and {said}; that needs {needs(asked)}")


def check_first_echo(leg: str, asked: str, data: bytes) -> None:
    """Make the echo check on a stream's first event, given as the bytes of its data.

    Raises:
        LegUnechoed, LegUnreadable: as ``check_echo``, or the event is not JSON.
    """
    try:
        chunk = loads_lenient(data)
    except JSONDecodeError:
        raise LegUnreadable(leg, "the worker's first stream event is not JSON") from None
    check_echo(leg, asked, chunk)


def asked_mode(body: Json) -> str:
    """Return the mode that a generate body asks for; the route's own default is tokens."""
    return body.get("output_mode") or TOKENS


def needs(mode: str) -> str:
    """Say which workers know a mode."""
    return f"vLLM {_SINCE.get(mode, '0.32')} or later with a tokenizer (no --tokens-only)"


def single_frame(raw: bytes) -> bytes:
    """Return a whole answer as the event stream that a streaming client waits for: one frame, then the end mark.

    vLLM refuses ``derender`` together with ``stream``, so such a leg is sent unstreamed.
    """
    return b"data: " + raw + b"\n\ndata: [DONE]\n\n"


def usage_of(reply: Json) -> Json | None:
    usage = reply.get("usage")
    return usage if isinstance(usage, dict) else None
