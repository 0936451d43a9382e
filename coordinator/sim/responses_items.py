"""The output items of ``/v1/responses``, and the events in which they come.

Source: recordings ``responses/``.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from coordinator.sim.stream_parser import Delta


def reasoning_item(id: str, text: str, status: str | None) -> dict[str, Any]:
    return {
        "id": id,
        "summary": [],
        "type": "reasoning",
        "content": [{"text": text, "type": "reasoning_text"}] if text else None,
        "encrypted_content": None,
        "status": status,
    }


def message_item(id: str, text: str, status: str) -> dict[str, Any]:
    part: dict[str, Any] = {"annotations": [], "text": text, "type": "output_text", "logprobs": None}
    return {
        "id": id,
        "content": [part] if status != "in_progress" else [],
        "role": "assistant",
        "status": status,
        "type": "message",
        "phase": None,
    }


def call_item(id: str, call_id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
    return {
        "arguments": arguments,
        "call_id": call_id,
        "name": name,
        "type": "function_call",
        "id": id,
        "async": None,
        "caller": None,
        "namespace": None,
        "status": status,
    }


class ItemWriter:
    """Opens and closes output items as the kind of delta changes."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._kind = ""
        self._id = ""
        self._text = ""
        self._call: dict[str, Any] = {}

    def feed(self, delta: Delta) -> Iterator[dict[str, Any]]:
        if delta.reasoning:
            yield from self._begin("reasoning")
            yield self._add("reasoning_text", delta.reasoning)
        if delta.content:
            yield from self._begin("message")
            yield {**self._add("output_text", delta.content), "logprobs": []}
        for entry in delta.tools:
            if "id" in entry:
                yield from self._begin("call", entry)
            arguments = entry["function"].get("arguments")
            if arguments:
                event = self._add("function_call_arguments", arguments)
                del event["content_index"]
                yield event

    def close(self, status: str) -> Iterator[dict[str, Any]]:
        if not self._kind:
            return
        place: dict[str, Any] = {"item_id": self._id, "output_index": len(self.done)}
        if self._kind == "call":
            name = self._call["function"]["name"]
            kind = "response.function_call_arguments.done"
            yield {**place, "arguments": self._text, "type": kind, "name": name}
        else:
            place["content_index"] = 0
            if self._kind == "reasoning":
                yield {**place, "text": self._text, "type": "response.reasoning_text.done"}
                part: dict[str, Any] = {"text": self._text, "type": "reasoning_text"}
            else:
                yield {**place, "text": self._text, "logprobs": [], "type": "response.output_text.done"}
                part = {"annotations": [], "text": self._text, "type": "output_text", "logprobs": None}
            yield {**place, "part": part, "type": "response.content_part.done"}
        item = self._item(status)
        yield {"item": item, "output_index": len(self.done), "type": "response.output_item.done"}
        self.done.append(item)
        self._kind = ""

    def _begin(self, kind: str, entry: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        if self._kind == kind and entry is None:
            return
        yield from self.close("completed")
        prefix = {"reasoning": "rs", "message": "msg", "call": "fc"}[kind]
        self._kind, self._id, self._text = kind, f"{prefix}_{secrets.token_hex(8)}", ""
        self._call = entry or {}
        index = len(self.done)
        yield {"item": self._item("in_progress"), "output_index": index, "type": "response.output_item.added"}
        if kind == "call":
            return
        part: dict[str, Any] = {"text": "", "type": "reasoning_text"}
        if kind == "message":
            part = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
        yield {
            "content_index": 0,
            "item_id": self._id,
            "output_index": index,
            "part": part,
            "type": "response.content_part.added",
        }

    def _add(self, what: str, delta: str) -> dict[str, Any]:
        self._text += delta
        return {
            "content_index": 0,
            "delta": delta,
            "item_id": self._id,
            "output_index": len(self.done),
            "type": f"response.{what}.delta",
        }

    def _item(self, status: str) -> dict[str, Any]:
        if self._kind == "reasoning":
            return reasoning_item(self._id, self._text, status)
        if self._kind == "message":
            return message_item(self._id, self._text, status)
        return call_item(self._id, self._call["id"], self._call["function"]["name"], self._text, status)
