"""The numbered events of a ``/v1/responses`` stream: how a response, an item and its parts start and end.

Source: vLLM 0.33 ``streaming_events.py``, the simple (non-Harmony) path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from envelope.json_codec import dumps
from envelope.responses_items import delta_logprobs, text_part

if TYPE_CHECKING:
    from envelope.json_codec import Json

_CALL_EVENTS = {
    "function_call": ("arguments", "response.function_call_arguments"),
    "custom_tool_call": ("input", "response.custom_tool_call_input"),
}


class Writer:
    """Frames the events of one response and numbers them.

    An item is given as it stands in the end, with its place in the output; how it looks at its start is known.
    """

    def __init__(self) -> None:
        self._next = 0

    def number(self) -> int:
        """Return the ``sequence_number`` of the next event, which is used up thereby."""
        self._next += 1
        return self._next - 1

    def event(self, kind: str, fields: dict[str, Any], **tail: Any) -> bytes:
        """Return one event; its keys stand in alphabetical order, as vLLM's do, but for those of ``tail``."""
        body = {**fields, "sequence_number": self.number(), "type": kind}
        ordered = {key: body[key] for key in sorted(body)}
        return b"event: " + kind.encode() + b"\ndata: " + dumps({**ordered, **tail}) + b"\n\n"

    def begin(self, response: Json) -> bytes:
        kinds = ("response.created", "response.in_progress")
        return b"".join([self.event(kind, {"response": response}) for kind in kinds])

    def end(self, response: Json) -> bytes:
        return self.event(f"response.{response['status']}", {"response": response})

    def item(self, item: Json, index: int) -> bytes:
        """Return all events of an item, with one delta."""
        part = item["content"][0] if "content" in item else None
        said = item[_CALL_EVENTS[item["type"]][0]] if part is None else part["text"]
        scores = part.get("logprobs") if part else None
        return self.open(item, index) + self.delta(item, index, said, scores) + self.close(item, index)

    def open(self, item: Json, index: int) -> bytes:
        """Return the events with which an item starts, empty, whatever it holds."""
        if item["type"] == "message":
            return self.open_text(item, index)
        return self._open_thought(item, index) if item["type"] == "reasoning" else self._open_call(item, index)

    def delta(self, item: Json, index: int, piece: str, logprobs: list[Json] | None = None) -> bytes:
        """Return the event for a piece of an item's text, reasoning, arguments or input; none for an empty one."""
        if not piece:
            return b""
        if item["type"] == "message":
            fields = {**_at(item, index), "delta": piece, "logprobs": delta_logprobs(logprobs)}
            return self.event("response.output_text.delta", fields)
        if item["type"] == "reasoning":
            return self.event("response.reasoning_text.delta", {**_at(item, index), "delta": piece})
        _, kind = _CALL_EVENTS[item["type"]]
        return self.event(f"{kind}.delta", {"item_id": item["id"], "output_index": index, "delta": piece})

    def close(self, item: Json, index: int) -> bytes:
        """Return the events with which an item ends, as it then is."""
        if item["type"] == "message":
            return self.close_text(item, index)
        return self._close_thought(item, index) if item["type"] == "reasoning" else self._close_call(item, index)

    def open_text(self, item: Json, index: int) -> bytes:
        added = self._added({**item, "content": [], "status": "in_progress"}, index)
        return added + self.event("response.content_part.added", {**_at(item, index), "part": text_part("", [])})

    def close_text(self, item: Json, index: int) -> bytes:
        part, at = item["content"][0], _at(item, index)
        events = [
            self.event("response.output_text.done", {**at, "logprobs": [], "text": part["text"]}),
            self.event("response.content_part.done", {**at, "part": part}),
            self._done(item, index),
        ]
        return b"".join(events)

    def _open_thought(self, item: Json, index: int) -> bytes:
        part = {**item["content"][0], "text": ""}
        added = self._added({**item, "content": None, "status": "in_progress"}, index)
        return added + self.event("response.content_part.added", {**_at(item, index), "part": part})

    def _close_thought(self, item: Json, index: int) -> bytes:
        part, at = item["content"][0], _at(item, index)
        events = [
            self.event("response.reasoning_text.done", {**at, "text": part["text"]}),
            self.event("response.content_part.done", {**at, "part": part}),
            self._done(item, index),
        ]
        return b"".join(events)

    def _open_call(self, item: Json, index: int) -> bytes:
        field, _ = _CALL_EVENTS[item["type"]]
        status = {"status": "in_progress"} if "status" in item else {}
        return self._added({**item, field: "", **status}, index)

    def _close_call(self, item: Json, index: int) -> bytes:
        field, kind = _CALL_EVENTS[item["type"]]
        at = {"item_id": item["id"], "output_index": index}
        name = {"name": item["name"]} if field == "arguments" else {}
        return self.event(f"{kind}.done", {**at, field: item[field]}, **name) + self._done(item, index)

    def _added(self, item: Json, index: int) -> bytes:
        return self.event("response.output_item.added", {"item": item, "output_index": index})

    def _done(self, item: Json, index: int) -> bytes:
        return self.event("response.output_item.done", {"item": item, "output_index": index})


def _at(item: Json, index: int) -> Json:
    """Return the fields that say which part of which item an event is about."""
    return {"content_index": 0, "item_id": item["id"], "output_index": index}
