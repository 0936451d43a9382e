"""Stop strings are found where the engine finds them, wherever the text is cut."""

from __future__ import annotations

from typing import Any

import pytest

from envelope.stop_strings import StopStrings, counted, ended_by

TEXT = "one two, three"
FOUND = [
    (["two"], "two", 7),
    (["x", "two"], "two", 7),
    (["two, t", "o,"], "o,", 8),  # the one that ends first, though it begins later
    (["wo", "two"], "wo", 7),  # of two that end together, the first of the list
    (["two", "wo"], "two", 7),
    (["e"], "e", 3),
    (["e t"], "e t", 5),
    (["three"], "three", 14),
    (["four", "three!"], None, None),
    (["\u2028"], None, None),
]


@pytest.mark.parametrize(("stop", "which", "ends_at"), FOUND)
@pytest.mark.parametrize("size", range(1, len(TEXT) + 1))
def test_a_stop_string_is_found_in_the_piece_that_completes_it(
    stop: list[str], which: str | None, ends_at: int | None, size: int
) -> None:
    strings, found = StopStrings(stop), []
    for at in range(0, len(TEXT), size):
        piece = TEXT[at : at + size]
        found.append(strings.found(piece))
        assert strings.found(piece) == found[-1], "looking changes nothing"
        strings.passed(piece)
        if found[-1] is not None:
            break
    assert found[-1] == which
    assert found[:-1] == [None] * (len(found) - 1)
    if ends_at is not None:
        assert (len(found) - 1) * size < ends_at <= len(found) * size


def test_what_has_passed_is_not_found_again() -> None:
    """As before ``min_tokens``: a stop string that ended there does not count, one that only began there does."""
    strings = StopStrings(["ab", "bcdefgh"])
    strings.passed("xab")
    assert strings.found("") is None
    assert strings.found("cde") is None
    assert strings.found("cdefgh") == "bcdefgh"


@pytest.mark.parametrize(
    ("scores", "kept"),
    [(None, None), ({"content": [1, 2, 3]}, {"content": [1, 2]}), ({"content": None}, {"content": []})],
)
def test_a_choice_ends_with_the_token_that_completes_the_stop_string(pure: Any, scores: Any, kept: Any) -> None:
    choice = {"index": 1, "token_ids": [5, 6, 7], "logprobs": scores, "finish_reason": "length", "stop_reason": None}
    made = pure(ended_by, choice, 2, "###")
    assert made == {"index": 1, "token_ids": [5, 6], "logprobs": kept, "finish_reason": "stop", "stop_reason": "###"}


def test_usage_counts_what_the_answer_has(pure: Any) -> None:
    reply = {"choices": [{"token_ids": [5, 6]}, {"token_ids": None}], "usage": {"completion_tokens": 9, "x": 1}}
    usage = {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2}
    assert pure(counted, reply, 3)["usage"] == {**usage, "x": 1}
    assert pure(counted, {**reply, "usage": None}, 3)["usage"] == usage
