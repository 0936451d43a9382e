"""A text stream collected into a whole answer, in any pieces, and what is no whole answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from envelope.collected import Collected
from envelope.errors import LegUnreadable

DONE = b"data: [DONE]\n\n"


def chunk(text: str, ids: list[int], index: int = 0, **more: Any) -> bytes:
    choice = {"index": index, "text": text, "token_ids": ids, "finish_reason": None, "stop_reason": None, **more}
    return event({"request_id": "g", "usage": None, "choices": [choice]})


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


SCORE = {"content": [{"token": "b", "logprob": -1.0}]}
STREAM = [
    b": hello\n\n", chunk("a", [1]), chunk("x", [7], 1), chunk("", [2], logprobs=SCORE), chunk("b", [], logprobs=None),
    chunk("", [3], 1, finish_reason="length"),
    chunk("c", [4], logprobs=SCORE, finish_reason="stop", stop_reason="###", weight_versions=[1]),
    event({"request_id": "g", "usage": {"prompt_tokens": 3}, "choices": []}), DONE,
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 5, 10_000])
def test_choices_are_put_together_by_index(size: int) -> None:
    raw, collected = b"".join(STREAM), Collected()
    for at in range(0, len(raw), size):
        assert collected.feed(raw[at : at + size])
    reply = collected.reply()
    assert (reply["request_id"], reply["usage"], reply["output_mode"]) == ("g", {"prompt_tokens": 3}, "text")
    first, second = reply["choices"]
    assert (first["text"], first["token_ids"], first["finish_reason"], first["stop_reason"]) == (
        "abc", [1, 2, 4], "stop", "###")  # fmt: skip
    assert first["logprobs"] == {"content": SCORE["content"] * 2}
    assert first["weight_versions"] == [1]
    assert (second["text"], second["token_ids"], second["finish_reason"], second["logprobs"]) == (
        "x", [7, 3], "length", None)  # fmt: skip


@pytest.mark.parametrize("missing", [STREAM.index(DONE), 6, 5])
def test_a_stream_without_its_end_or_a_finish_is_no_answer(missing: int) -> None:
    collected = Collected()
    for i, part in enumerate(STREAM):
        if i != missing:
            collected.feed(part)
    with pytest.raises(LegUnreadable):
        collected.reply()


@pytest.mark.parametrize("wrong", [event({"error": {"message": "no"}}), event({"choices": [{}]}), b"data: oops\n\n"])
def test_what_cannot_be_read_is_a_failed_leg(wrong: bytes) -> None:
    with pytest.raises(LegUnreadable):
        Collected().feed(wrong)


def test_a_stream_of_tokens_may_be_ended_by_us() -> None:
    """Of the choices that we have ended, the worker need not tell a finish."""
    collected = Collected("tokens")
    for choice in ({"index": 0, "token_ids": [1]}, {"index": 1, "token_ids": [7]}, {"index": 0, "token_ids": [2]}):
        collected.feed(event({"request_id": "g", "choices": [choice]}))
    assert [choice["token_ids"] for choice in collected.choices()] == [[1, 2], [7]]
    with pytest.raises(LegUnreadable):
        collected.reply([0, 1])
    collected.end()
    with pytest.raises(LegUnreadable):
        collected.reply([0])
    reply = collected.reply([0, 1])
    assert (reply["output_mode"], reply["usage"]) == ("tokens", None)
    assert all("text" not in choice for choice in reply["choices"])


def test_what_streams_are_relayed_with_is_taken_here_too() -> None:
    """Numbers that JSON does not have, and blanks behind the end mark."""
    collected = Collected()
    for part in (chunk("a", [1], logprobs={"content": [{"logprob": float("-inf")}]}, finish_reason="stop"), DONE):
        collected.feed(part.replace(b"[DONE]", b"[DONE] "))
    (choice,) = collected.reply()["choices"]
    assert choice["logprobs"] == {"content": [{"logprob": float("-inf")}]}
