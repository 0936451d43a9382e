"""What trace may show of a body: its shape, and no word of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coordinator.telemetry.redact import redacted
from envelope.token_ids import TokenIds

HANDOVER = {
    "do_remote_prefill": True,
    "remote_engine_id": "e1",
    "remote_block_ids": [[1, 2]],
    "remote_host": "10.9.9.9",
    "remote_port": 5600,
}


def test_the_shape_of_a_request_is_left_and_its_words_are_lengths() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 5, "stream": False}
    assert redacted(body) == {
        "model": "<1 characters>",
        "messages": [{"role": "user", "content": "<6 characters>"}],
        "max_tokens": 5,
        "stream": False,
    }


def test_a_hand_over_is_shown_as_it_is() -> None:
    assert redacted({"kv_transfer_params": HANDOVER}) == {"kv_transfer_params": HANDOVER}


@pytest.mark.parametrize("key", ["token_ids", "prompt", "bytes", "anything"])
def test_numbers_in_a_row_are_counted_for_they_may_be_a_text(key: str) -> None:
    assert redacted({key: [72, 105]}) == {key: "<2 numbers>"}
    assert redacted({key: [[72, 105], [33]]}) == {key: ["<2 numbers>", "<1 numbers>"]}
    assert redacted({key: TokenIds(b"[72,105]")}) == {key: "<2 numbers>"}


def test_a_long_list_is_cut_and_a_deep_one_closed() -> None:
    assert redacted(["x"] * 100)[-1] == "<84 more>"
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    assert len(json.dumps(redacted(deep))) < 100


def test_its_argument_stays_as_it_was() -> None:
    body = {"messages": [{"content": "x"}], "ids": [1]}
    redacted(body)
    assert body == {"messages": [{"content": "x"}], "ids": [1]}


CANARY = "canary words"
HIDDEN: list[Any] = [
    {"messages": [{"role": CANARY, "content": [{"type": "text", "text": CANARY}]}]},
    {"messages": [{"tool_calls": [{"function": {"name": CANARY, "arguments": '{"a": "canary"}'}}]}]},
    {"tools": [{"function": {"name": "f", "description": CANARY, "parameters": {"properties": {"canary": {}}}}}]},
    {"metadata": {"canary": 1}, "user": CANARY, "stop": [CANARY], "logit_bias": {"canary": 1}},
    {CANARY: 1, "Canary": {"a": 1}},
    {"choices": [{"text": CANARY, "logprobs": {"tokens": ["canary"], "content": [{"token": "canary"}]}}]},
    {"image_url": {"url": "data:image/png;base64,canary"}, "mm_features": [{"canary words": "x"}]},
    {"type": CANARY, "request_id": "canary\n"},
]


@pytest.mark.parametrize("body", HIDDEN)
def test_no_word_of_anybodys_is_left(body: Any) -> None:
    """J4."""
    assert "canary" not in json.dumps(redacted(body)).lower()
