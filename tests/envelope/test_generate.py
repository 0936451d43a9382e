"""A worker answers in the mode it was asked for, or its answer is not passed on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from envelope.errors import LegFailed
from envelope.generate import asked_mode, check_echo, check_first_echo, needs, single_frame, usage_of
from envelope.sse import data_of, split

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER = Path(__file__).parent.parent / "data" / "recordings" / "vllm-0.33.0" / "generate"
WHOLE = [file.stem for file in sorted(FOLDER.glob("*.json")) if not file.with_suffix(".sse").exists()]
STREAMED = [file.stem for file in sorted(FOLDER.glob("*.sse"))]

NEEDS = {
    "text": "vLLM 0.32 or later with a tokenizer (no --tokens-only)",
    "derender": "vLLM 0.33 or later with a tokenizer (no --tokens-only)",
    "tokens": "vLLM 0.32 or later with a tokenizer (no --tokens-only)",
}

# (asked, answered, whether it is taken)
ECHOES = [
    ("tokens", {"output_mode": "tokens"}, True),
    ("tokens", {}, True),  # what a worker does that knows no modes
    ("tokens", {"output_mode": None}, True),
    ("text", {"output_mode": "text"}, True),
    ("derender", {"output_mode": "derender"}, True),
    ("text", {}, False),
    ("text", {"output_mode": None}, False),
    ("derender", {}, False),
    ("text", {"output_mode": "tokens"}, False),
    ("derender", {"output_mode": "text"}, False),
    ("tokens", {"output_mode": "text"}, False),
    ("text", {"output_mode": ["text"]}, False),
]


def sentence(asked: str, reply: dict[str, Any]) -> str:
    got = reply.get("output_mode")
    said = "did not say in which output_mode it answered" if got is None else f"answered in output_mode {got!r}"
    return f"decode: the worker was asked for output_mode '{asked}' and {said}; that needs {NEEDS[asked]}"


@pytest.mark.parametrize(("asked", "reply", "taken"), ECHOES)
def test_the_mode_must_come_back(pure: Callable[..., Any], asked: str, reply: dict[str, Any], taken: bool) -> None:
    """An old worker ignores the field and answers 200 with ids alone, which reads as an empty answer."""
    data = json.dumps(reply).encode()
    if taken:
        pure(check_echo, "decode", asked, reply)
        check_first_echo("decode", asked, data)
        return
    for check in (lambda: pure(check_echo, "decode", asked, reply), lambda: check_first_echo("decode", asked, data)):
        with pytest.raises(LegFailed) as caught:
            check()
        assert (caught.value.message, caught.value.status) == (sentence(asked, reply), 502)


@pytest.mark.parametrize("reply", [[], None, "text", 3])
def test_an_answer_is_an_object(reply: Any) -> None:
    with pytest.raises(LegFailed, match="decode: the worker's answer is not a JSON object"):
        check_echo("decode", "text", reply)
    with pytest.raises(LegFailed, match="is not a JSON object"):
        check_first_echo("decode", "text", json.dumps(reply).encode())


@pytest.mark.parametrize("data", [b"", b"{", b"hello", b"\xff", b"1" * 5000])
def test_a_first_event_that_is_no_json_is_refused(data: bytes) -> None:
    with pytest.raises(LegFailed, match="decode: the worker's first stream event is not JSON"):
        check_first_echo("decode", "text", data)


@pytest.mark.parametrize("name", WHOLE)
def test_every_recorded_answer_echoes_its_mode(recorded: Any, name: str) -> None:
    exchange = recorded(f"generate/{name}")
    check_echo("decode", asked_mode(exchange["request"]["body"]), exchange["response"]["body"])


@pytest.mark.parametrize("name", STREAMED)
def test_every_recorded_stream_echoes_its_mode_in_its_first_event(recorded: Any, name: str) -> None:
    first = data_of(split((FOLDER / f"{name}.sse").read_bytes())[0])
    assert first is not None
    check_first_echo("decode", asked_mode(recorded(f"generate/{name}")["request"]["body"]), first)


@pytest.mark.parametrize(("body", "mode"), [({}, "tokens"), ({"output_mode": None}, "tokens"),
                                            ({"output_mode": "text"}, "text")])  # fmt: skip
def test_a_body_without_a_mode_asks_for_tokens(pure: Callable[..., Any], body: dict[str, Any], mode: str) -> None:
    assert pure(asked_mode, body) == mode


@pytest.mark.parametrize("mode", NEEDS)
def test_an_operator_is_told_which_worker_knows_a_mode(mode: str) -> None:
    assert needs(mode) == NEEDS[mode]


def test_a_whole_answer_for_a_streaming_client_is_one_event_and_the_end() -> None:
    raw = '{"choices":[{"message":{"content":"a\u2028b"}}]}'.encode()
    events = split(single_frame(raw))
    assert [data_of(event) for event in events] == [raw, b"[DONE]"]


USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}


@pytest.mark.parametrize(("reply", "usage"), [({"usage": USAGE}, USAGE), ({}, None), ({"usage": None}, None),
                                              ({"usage": [USAGE]}, None)])  # fmt: skip
def test_usage_is_what_the_worker_told(pure: Callable[..., Any], reply: dict[str, Any], usage: Any) -> None:
    assert pure(usage_of, reply) == usage
