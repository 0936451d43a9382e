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
        if item["type"] == "reasoning":
            return self._reasoning(item, index)
        if item["type"] == "message":
            return self.open_text(item, index) + self._text(item, index) + self.close_text(item, index)
        return self._call(item, index)

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

    def _text(self, item: Json, index: int) -> bytes:
        part = item["content"][0]
        delta = {"delta": part["text"], "logprobs": delta_logprobs(part["logprobs"])}
        return self.event("response.output_text.delta", {**_at(item, index), **delta})

    def _reasoning(self, item: Json, index: int) -> bytes:
        part, at = item["content"][0], _at(item, index)
        events = [
            self._added({**item, "content": None, "status": "in_progress"}, index),
            self.event("response.content_part.added", {**at, "part": {**part, "text": ""}}),
            self.event("response.reasoning_text.delta", {**at, "delta": part["text"]}),
            self.event("response.reasoning_text.done", {**at, "text": part["text"]}),
            self.event("response.content_part.done", {**at, "part": part}),
            self._done(item, index),
        ]
        return b"".join(events)

    def _call(self, item: Json, index: int) -> bytes:
        field, kind = _CALL_EVENTS[item["type"]]
        at = {"item_id": item["id"], "output_index": index}
        status = {"status": "in_progress"} if "status" in item else {}
        name = {"name": item["name"]} if field == "arguments" else {}
        events = [self._added({**item, field: "", **status}, index)]
        if item[field]:
            events.append(self.event(f"{kind}.delta", {**at, "delta": item[field]}))
        events.append(self.event(f"{kind}.done", {**at, field: item[field]}, **name))
        events.append(self._done(item, index))
        return b"".join(events)

    def _added(self, item: Json, index: int) -> bytes:
        return self.event("response.output_item.added", {"item": item, "output_index": index})

    def _done(self, item: Json, index: int) -> bytes:
        return self.event("response.output_item.done", {"item": item, "output_index": index})


def _at(item: Json, index: int) -> Json:
    """Return the fields that say which part of which item an event is about."""
    return {"content_index": 0, "item_id": item["id"], "output_index": index}
