"""Streams of ``/v1/responses``: generate's text chunks, or a whole answer, as numbered events.

The order of a stream: ``response.created``, ``response.in_progress``; per item ``output_item.added``,
``content_part.added``, deltas, their done events, ``output_item.done``; last ``response.completed`` or
``response.incomplete``. There is no ``[DONE]``.

Source: vLLM 0.33 ``responses_stream_generator``; recorded in ``responses/*_stream.sse``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from envelope import usage
from envelope.json_codec import dumps
from envelope.rebuild import model_name
from envelope.responses_body import response_object, status_of, token_counts
from envelope.responses_events import Writer
from envelope.responses_items import delta_logprobs, items, logprobs, message_item, wants_logprobs
from envelope.sse import MAX_EVENT_BYTES
from envelope.turn import TextChunks, turn_of

if TYPE_CHECKING:
    from envelope.errors import ApiError
    from envelope.json_codec import Json
    from envelope.shape import Asked

_DELTA = b'event: response.output_text.delta\ndata: {"content_index":0,"delta":'
_DELTA_END = b',"type":"response.output_text.delta"}\n\n'


class Chunks(TextChunks):
    """Generate's text chunks as one message item: nothing is parsed, so no reasoning and no calls.

    The text is kept, because the last events repeat it; its pieces are joined once, at the end.
    """

    def __init__(self, asked: Asked, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        super().__init__(asked, max_event_bytes)
        self._writer = Writer()
        self._pieces: list[str] = []
        self._logprobs: list[Json] = []
        self._wants_logprobs = wants_logprobs(asked.body)
        self._item = message_item(asked, "", "in_progress", None)
        self._delta_item = b',"item_id":' + dumps(self._item["id"]) + b',"logprobs":'

    def _begin(self) -> bytes:
        return self._writer.begin(self._response("in_progress", [], None))

    def _delta(self, text: str, choice: Json) -> bytes:
        opening = b"" if self._pieces else self._writer.open_text(self._item, 0)
        self._pieces.append(text)
        shown = self._shown_logprobs(choice) if self._wants_logprobs else b"[]"
        place = b',"output_index":0,"sequence_number":%d' % self._writer.number()
        return b"".join((opening, _DELTA, dumps(text), self._delta_item, shown, place, _DELTA_END))

    def _shown_logprobs(self, choice: Json) -> bytes:
        full = logprobs((choice.get("logprobs") or {}).get("content"), self._asked.body)
        self._logprobs += full or ()
        return dumps(delta_logprobs(full))

    def _end(self) -> bytes:
        status = status_of(self._finish)
        output = self._output(status)
        closing = self._writer.close_text(output[0], 0) if output else b""
        return closing + self._writer.end(self._response(status, output, token_counts(self._counts())))

    def _broken(self, error: Json) -> bytes:
        told = failed_event(error, self._writer.number())
        if not self._begun:
            return told
        response = self._response("failed", self._output("incomplete"), None)
        response["error"] = {"code": "server_error", "message": str(error.get("message") or "")}
        return told + self._writer.end(response)

    def _output(self, status: str) -> list[Json]:
        text = "".join(self._pieces)
        return [message_item(self._asked, text, status, self._logprobs or None)] if text else []

    def _response(self, status: str, output: list[Json], counts: Json | None) -> Json:
        return response_at(self._asked, {}, status, output, counts)


def replay(reply: Json, asked: Asked) -> bytes:
    """Return a whole generate answer as a stream: every item with one delta.

    Raises:
        LegFailed: the answer has no choices, or nothing in its choice.
    """
    turn = turn_of(reply)
    writer = Writer()
    output = items(turn, asked, streamed=True)
    counts = token_counts(usage.of_reply(reply, asked.rendered))
    return b"".join(
        [
            writer.begin(response_at(asked, reply, "in_progress", [], None)),
            *[writer.item(item, index) for index, item in enumerate(output)],
            writer.end(response_at(asked, reply, status_of(turn.finish), output, counts)),
        ]
    )


def error_event(error: ApiError, request_id: str) -> bytes:
    """Return the event that tells of a failure once the status line is spent; it ends the stream.

    vLLM has none and cuts the connection. This is OpenAI's own, with vLLM's ``error`` object inside, on which
    OpenAI's SDK raises. A stream that ``Chunks`` began is better failed by its ``fail``, which knows the
    sequence number.
    """
    return failed_event({**error.body(request_id), "code": error.status}, 0)


def failed_event(error: Json, number: int) -> bytes:
    body = {
        "code": error.get("type"),
        "message": str(error.get("message") or ""),
        "param": error.get("param"),
        "sequence_number": number,
        "type": "error",
        "error": error,
    }
    return b"event: error\ndata: " + dumps(body) + b"\n\n"


def response_at(asked: Asked, reply: Json, status: str, output: list[Json], counts: Json | None) -> Json:
    """Return the response object of a stream; without a reply, as of text chunks, the time is that of the start."""
    created = reply.get("created") or asked.created
    model = model_name(reply, asked)
    return response_object(asked, model=model, created=created, status=status, output=output, usage=counts)
