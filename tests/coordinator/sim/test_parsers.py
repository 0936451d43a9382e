"""Whole and streamed are two readings of one text."""

from __future__ import annotations

import pytest

from coordinator.sim.parsers import Parsed, Parsing, parse, rewritten
from coordinator.sim.stream_parser import Delta, StreamParser

THINKING = Parsing(thinking=True, tools=True, tool_choice="auto")
PLAIN = Parsing(tools=True, tool_choice="auto")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": {"c": "}\\"{"}}}\n</tool_call>'
TEXTS = [
    "<think>\nhm <b>\n</think>\n\nHi < there <tool",
    f"<think>\nhm\n</think>\n\nFirst.\n{CALL}\n{CALL}",
    "never opened\n</think>done",
    CALL,
    "",
]


def streamed(pieces: list[str], parsing: Parsing) -> Parsed:
    """Put the deltas of a streamed text together, as a client does."""
    parser = StreamParser(parsing)
    deltas = [parser.feed(piece, last=at == len(pieces) - 1) for at, piece in enumerate(pieces)]
    calls: list[dict[str, dict[str, str]]] = []
    for entry in [entry for delta in deltas for entry in delta.tools]:
        if "id" in entry:
            calls.append({"function": {"name": entry["function"]["name"], "arguments": ""}})
        calls[entry["index"]]["function"]["arguments"] += entry["function"].get("arguments", "")
    reasoning = "".join(delta.reasoning for delta in deltas) or None
    return Parsed(reasoning, "".join(delta.content for delta in deltas) or None, calls)


@pytest.mark.parametrize("parsing", [THINKING, PLAIN])
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_cut_anywhere_parses_as_the_whole(text: str, parsing: Parsing) -> None:
    whole = parse(text, parsing)
    calls = [{"function": call["function"]} for call in whole.tool_calls]
    want = Parsed(whole.reasoning, whole.content or None, calls)
    assert streamed(list(text) or [""], parsing) == want
    for cut in range(len(text)):
        assert streamed([text[:cut], text[cut:]], parsing) == want


def test_reasoning_keeps_its_newlines_and_loses_its_tags() -> None:
    assert parse("<think>\nhm\n</think>\n\nHi", THINKING) == Parsed("\nhm\n", "\n\nHi")


def test_a_thought_without_an_end_leaves_content_null() -> None:
    assert parse("<think>\nhm", THINKING) == Parsed("\nhm", None)


def test_without_thinking_all_is_content() -> None:
    assert parse("<think>\nhm\n</think>", PLAIN) == Parsed(None, "<think>\nhm\n</think>")


@pytest.mark.parametrize(("choice", "content"), [("auto", None), ("required", ""), ({"type": "function"}, "")])
def test_a_call_alone_leaves_content_null_or_if_forced_empty(choice: object, content: str | None) -> None:
    assert parse(CALL, Parsing(tools=True, tool_choice=choice)).content == content


def test_a_cut_call_stays_markup_in_a_whole_answer_and_has_a_name_in_a_stream() -> None:
    text = 'Sure.\n<tool_call>\n{"name": "add", "argum'
    assert parse(text, PLAIN) == Parsed(None, text)
    assert streamed([text], PLAIN) == Parsed(None, "Sure.\n", [{"function": {"name": "add", "arguments": ""}}])


def test_markup_stays_in_the_content_where_no_tool_is_read() -> None:
    assert parse(CALL, Parsing(tool_choice="none")) == Parsed(None, CALL)


def test_hidden_reasoning_is_left_out_of_both() -> None:
    hidden = Parsing(thinking=True, include_reasoning=False)
    assert parse("a</think>b", hidden) == Parsed(None, "b")
    assert streamed(["a</thi", "nk>b"], hidden) == Parsed(None, "b")


@pytest.mark.parametrize(
    ("engine", "called", "choice", "shown"),
    [
        ("stop", True, "auto", "tool_calls"),
        ("stop", True, "required", "tool_calls"),
        ("stop", True, {"function": {"name": "add"}}, "stop"),
        ("length", True, "auto", "length"),
        ("abort", True, "auto", "abort"),
        ("stop", False, "auto", "stop"),
    ],
)
def test_only_a_stop_with_calls_and_no_named_function_becomes_tool_calls(
    engine: str, called: bool, choice: object, shown: str
) -> None:
    assert rewritten(engine, called=called, parsing=Parsing(tools=True, tool_choice=choice)) == shown


def test_a_tool_delta_has_a_null_content() -> None:
    assert Delta(tools=[{"index": 0}]).wire() == {"content": None, "tool_calls": [{"index": 0}]}
    assert Delta().wire() == {}
