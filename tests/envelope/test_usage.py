"""Token counts in the three forms in which vLLM sends them: whole, at a stream's end, while it runs."""

from __future__ import annotations

from typing import Any

import pytest

from envelope import usage

COUNTED = {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2}
CACHED = {"prompt_tokens_details": {"cached_tokens": 1}}
NULLS = {"prompt_tokens_details": None, "completion_tokens_details": None}


def test_counts_stand_in_vllms_order() -> None:
    assert list(usage.counts(3, 2).items()) == list(COUNTED.items())


@pytest.mark.parametrize(
    ("given", "whole"),
    [
        (COUNTED, COUNTED | NULLS),
        (COUNTED | CACHED, COUNTED | NULLS | CACHED),
        (COUNTED | {"new": 1}, COUNTED | {"new": 1} | NULLS),
    ],
)
def test_a_whole_answer_has_both_details(given: dict[str, Any], whole: dict[str, Any]) -> None:
    assert usage.with_details(given) == whole


def test_a_streams_end_has_no_null_at_either_level() -> None:
    details = {"cached_tokens": 0, "multimodal_tokens": None}
    given = COUNTED | NULLS | {"prompt_tokens_details": details}
    assert usage.without_nulls(given) == COUNTED | {"prompt_tokens_details": {"cached_tokens": 0}}
    assert details == {"cached_tokens": 0, "multimodal_tokens": None}


@pytest.mark.parametrize(
    ("reply", "rendered", "counted"),
    [
        ({"usage": COUNTED}, None, COUNTED),
        ({"usage": COUNTED}, {"token_ids": [1]}, COUNTED),
        ({"choices": [{"token_ids": [1]}, {"token_ids": [2]}]}, {"token_ids": [7, 8, 9]}, COUNTED),
        ({"usage": None, "choices": [{"token_ids": None}]}, None, usage.counts(0, 0)),
        ({}, {"token_ids": None}, usage.counts(0, 0)),
    ],
)
def test_what_a_worker_does_not_count_is_counted_by_its_tokens(
    reply: dict[str, Any], rendered: dict[str, Any] | None, counted: dict[str, Any]
) -> None:
    assert usage.of_reply(reply, rendered) == counted | NULLS
