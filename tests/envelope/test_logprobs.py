"""How many candidates each API keeps, and the parallel lists of completions."""

from __future__ import annotations

from typing import Any

import pytest

from envelope import logprobs


def position(token: str, *candidates: str) -> dict[str, Any]:
    tops = [{"token": one, "logprob": -1.0, "bytes": [1]} for one in candidates]
    return {"token": token, "logprob": -0.5, "bytes": [1], "top_logprobs": tops}


TWO = {"content": [position("é", "é", "b", "c"), position("wx", "b")]}


@pytest.mark.parametrize(
    ("body", "chat", "completion"),
    [
        ({}, 0, 1),
        ({"top_logprobs": None, "logprobs": None}, 0, 1),
        ({"top_logprobs": 0, "logprobs": 0}, 0, 1),
        ({"top_logprobs": 3, "logprobs": 3}, 3, 4),
        ({"top_logprobs": 2.0, "logprobs": 2.0}, 2, 3),
        ({"logprobs": True}, 0, 2),
        ({"top_logprobs": -1, "logprobs": -1}, None, None),
        ({"top_logprobs": 1, "logprobs": 1, "logprob_token_ids": [5]}, None, None),
    ],
)
def test_limits(body: dict[str, Any], chat: int | None, completion: int | None) -> None:
    assert logprobs.chat_limit(body) == chat
    assert logprobs.completion_limit(body) == completion


def test_cut_leaves_its_argument_alone() -> None:
    assert logprobs.cut(TWO, 1) == {"content": [position("é", "é"), position("wx", "b")]}
    assert logprobs.cut(TWO, 0) == {"content": [position("é"), position("wx")]}
    assert logprobs.cut(TWO, None) is TWO
    assert logprobs.cut(None, 1) is None
    assert logprobs.cut(TWO, logprobs.chat_limit({"top_logprobs": 1.0})) == logprobs.cut(TWO, 1)
    assert len(TWO["content"][0]["top_logprobs"]) == 3


def test_completions_have_parallel_lists_and_offsets_in_characters() -> None:
    shaped = logprobs.to_completion(TWO, 2, offset=10)
    assert shaped == {
        "text_offset": [10, 11],
        "token_logprobs": [-0.5, -0.5],
        "tokens": ["é", "wx"],
        "top_logprobs": [{"é": -1.0, "b": -1.0}, {"b": -1.0}],
    }
    assert logprobs.end_offset(shaped, 10) == 13


@pytest.mark.parametrize("scores", [None, {"content": []}, {"content": None}])
def test_no_positions_move_no_offset(scores: dict[str, Any] | None) -> None:
    assert logprobs.end_offset(logprobs.to_completion(scores, 1, 4), 4) == 4
