"""What is taken for an event like the one before says what reading it as JSON would say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envelope.likeness import Likeness
from envelope.sse import split

RECORDINGS = Path(__file__).parent.parent / "data" / "recordings"


def event(text: str = "a", ids: Any = (1,), **fields: Any) -> bytes:
    choice = {"index": 0, "finish_reason": None, "token_ids": ids, "text": text, "logprobs": None} | fields
    body = {"request_id": "r", "usage": None, "choices": [choice]}
    return f"data: {json.dumps(body, separators=(',', ':'), ensure_ascii=False)}\n\n".encode()


@pytest.fixture
def learned() -> Likeness:
    likeness = Likeness()
    assert likeness.learn(event("first", [7, 8]), b'"first"')
    return likeness


@pytest.mark.parametrize("text", ["a", " hello", "é漢🙂", "],[1", "token_ids", "{}", "a/b", "'"])
@pytest.mark.parametrize("ids", [[], [1], [1, 22, 333], [151643]])
def test_other_text_and_other_ids_are_what_it_may_have(learned: Likeness, text: str, ids: list[int]) -> None:
    assert learned.text(event(text, ids)).decode() == text


def test_what_vllm_sends_is_learned_from() -> None:
    """Also where it echoes an output_mode that is called as the member is."""
    raw = (RECORDINGS / "vllm-0.33.0" / "generate" / "generate_text_stream.sse").read_bytes()
    recorded = split(raw)[0]
    assert b'"output_mode":"text"' in recorded and recorded.count(rb'"\n"') == 1
    likeness = Likeness()
    assert likeness.learn(recorded.replace(rb'"\n"', b'"first"'), b'"first"')
    assert likeness.text(recorded.replace(rb'"\n"', b'"another"')) == b"another"


UNLIKE = [
    event(""),
    event('say "no"'),
    event("back\\slash"),
    event("line\nend"),
    event(finish_reason="stop"),
    event(index=1),
    event(logprobs={"content": []}),
    event(ids=None),
    event(ids=["1"]),
    event(ids=[-1]),
    event(ids=[1.5]),
    event().replace(b"[1]", b"[1,]"),
    event().replace(b"[1]", b"[01]"),
    event().replace(b"[1]", b"[1\0]"),
    event() + event(),
    event()[:-1],
    event()[:-2] + b"\r\n",
    event("x").replace(b"x", b"\t"),
    event("x").replace(b"x", b"\xff"),
    b": comment\n\n",
    b"data: [DONE]\n\n",
    b"",
]


@pytest.mark.parametrize("other", UNLIKE)
def test_whatever_else_differs_is_to_be_read(learned: Likeness, other: bytes) -> None:
    assert learned.text(other) == b""


@given(st.text(), st.lists(st.integers(0, 2**31)), st.integers(0, 400), st.integers(0, 400), st.binary(max_size=8))
def test_no_change_to_an_event_is_overlooked(text: str, ids: list[int], start: int, size: int, new: bytes) -> None:
    """Whatever is written over whatever part of it: what is found is what JSON has there, or nothing is."""
    likeness = Likeness()
    assert likeness.learn(event("first", [7, 8]), b'"first"')
    raw = event(text, ids)
    changed = raw[:start] + new + raw[start + size :]
    if found := likeness.text(changed):
        said = json.loads(changed[len(b"data: ") :])
        assert said["choices"][0].pop("text") == found.decode()
        said["choices"][0].pop("token_ids")
        expected = json.loads(event()[len(b"data: ") :])
        del expected["choices"][0]["text"], expected["choices"][0]["token_ids"]
        assert said == expected


# (event, its text as JSON)
NOT_LEARNED = [
    (event("\n"), b'"\\n"'),
    (event("a", None), b'"a"'),
    (b'data: {"choices":[{"text":"a","token_ids":[1]}]}\n\n', b'"a"'),
    (event("a"), b'"b"'),
    (event("a", extra={"text": "a"}), b'"a"'),
    (event("a").replace(b'"logprobs"', b'"te\\u0078t":"a","logprobs"'), b'"a"'),
]


@pytest.mark.parametrize(("first", "text"), NOT_LEARNED)
def test_what_cannot_be_compared_with_is_not_learned(first: bytes, text: bytes) -> None:
    likeness = Likeness()
    assert not likeness.learn(first, text)
    assert likeness.text(first) == b""


def test_it_gives_up_where_each_event_differs_from_the_last() -> None:
    likeness = Likeness()
    taken = [likeness.learn(event("a", index=index), b'"a"') for index in range(20)]
    assert taken.count(True) == taken.index(False)


def test_what_is_forgotten_is_like_nothing(learned: Likeness) -> None:
    learned.forget()
    assert learned.text(event("a")) == b""
