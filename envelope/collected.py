"""A generate stream put together into the whole answer that it would have been.

For a client who wants a whole answer of a worker that has to be listened to while it generates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from envelope.errors import LegUnreadable
from envelope.generate import TEXT, TOKENS
from envelope.json_codec import loads_lenient
from envelope.passthrough import DONE, error_message
from envelope.rebuild import reading
from envelope.sse import Events, data_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from envelope.json_codec import Json


class Collected:
    """Takes a stream's bytes, cut anywhere; ``reply`` is the whole answer.

    Args:
        mode: the stream's output mode: text, or tokens.
    """

    def __init__(self, mode: str = TEXT) -> None:
        self._mode = mode
        self._events = Events()
        self._choices: dict[int, Json] = {}
        self._pieces: dict[int, list[str]] = {}
        self._head: Json = {}
        self._usage: Json | None = None
        self._ended = False

    def feed(self, data: bytes) -> bool:
        """Take the next bytes; True, as there is always room for more.

        Raises:
            LegUnreadable: the stream cannot be understood, or tells of a failure.
        """
        for event in self._events.feed(data):
            said = (data_of(event) or b"").strip()
            if said == DONE:
                self._ended = True
            elif said:
                with reading("decode"):
                    self._take(loads_lenient(said))
        return True

    def end(self) -> None:
        """Take the stream for ended: nothing more is wanted of it."""
        self._ended = True

    def choices(self) -> list[Json]:
        """Return the choices as far as they have come."""
        return [self._choice(index) for index in sorted(self._choices)]

    def reply(self, ended: Collection[int] = ()) -> Json:
        """Return the answer.

        Args:
            ended: the choices that were ended by us, of which the worker need not tell a finish.

        Raises:
            LegUnreadable: the end mark, or a choice's finish, never came.
        """
        choices = self.choices()
        going_on = [one for one in choices if one["finish_reason"] is None and one["index"] not in ended]
        if not self._ended or not choices or going_on:
            raise LegUnreadable("decode", "the worker's stream ended early")
        return {**self._head, "usage": self._usage, "output_mode": self._mode, "choices": choices}

    def _choice(self, index: int) -> Json:
        whole = self._choices[index]
        return whole if self._mode == TOKENS else {**whole, "text": "".join(self._pieces[index])}

    def _take(self, chunk: Json) -> None:
        if error := chunk.get("error"):
            raise LegUnreadable("decode", f"the worker failed in mid-stream: {error_message(error)}")
        self._head = self._head or {"request_id": chunk.get("request_id")}
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices") or ():
            self._add(choice)

    def _add(self, choice: Json) -> None:
        index = choice["index"]
        if not isinstance(index, int):
            raise TypeError(f"the index is of type {type(index).__name__}")
        whole = self._choices.setdefault(index, {**choice, "token_ids": [], "logprobs": None})
        if self._mode != TOKENS:
            self._pieces.setdefault(index, []).append(choice["text"])
        whole["token_ids"] += choice.get("token_ids") or ()
        scores: Any = (choice.get("logprobs") or {}).get("content")
        if scores is not None:
            whole["logprobs"] = {"content": [*(whole["logprobs"] or {"content": []})["content"], *scores]}
        for name in ("finish_reason", "stop_reason", "weight_versions"):
            whole[name] = choice.get(name)
