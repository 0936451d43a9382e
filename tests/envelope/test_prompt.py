"""How long a prompt is, before anybody has counted its tokens."""

from __future__ import annotations

from typing import Any

import pytest

from envelope.formats import Format
from envelope.prompt import beginning, count_tokens, without_prompt, without_tokens
from envelope.token_ids import TokenIds
from envelope.usage import prompt_length

TEXT = "x" * 400
PARTS = [{"type": "text", "text": TEXT}, {"type": "image_url", "image_url": {"url": "data:" + "y" * 10_000}}]


@pytest.mark.parametrize(
    ("api", "body", "tokens"),
    [
        (Format.CHAT, {"messages": [{"role": "user", "content": TEXT}, {"role": "user", "content": TEXT}]}, 200),
        (Format.CHAT, {"messages": [{"role": "user", "content": PARTS}]}, 100),
        (Format.MESSAGES, {"system": TEXT, "messages": [{"role": "user", "content": TEXT}]}, 200),
        (Format.RESPONSES, {"instructions": TEXT, "input": TEXT}, 200),
        (Format.RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": TEXT}]}]}, 100),
        (Format.COMPLETIONS, {"prompt": TEXT}, 100),
        (Format.COMPLETIONS, {"prompt": [1, 2, 3]}, 3),
        (Format.COMPLETIONS, {"prompt": [[1, 2, 3]]}, 3),
        (Format.GENERATE, {"token_ids": [1, 2, 3, 4], "sampling_params": {}}, 4),
        (Format.CHAT, {"messages": "not a list", "input": None}, 2),
        (Format.CHAT, {}, 0),
    ],
)
def test_tokens_are_counted_where_they_are_known_and_else_reckoned_from_the_text(
    api: Format, body: Any, tokens: int
) -> None:
    assert count_tokens(api, body, None) == tokens


def test_render_knows_better_than_the_text() -> None:
    assert count_tokens(Format.CHAT, {"messages": [{"content": TEXT}]}, {"token_ids": [1, 2]}) == 2


def test_a_body_may_be_nested_as_deeply_as_json_allows() -> None:
    body: Any = TEXT
    for _ in range(100_000):
        body = {"content": body}
    assert count_tokens(Format.CHAT, {"messages": [body]}, None) == 100


def test_a_conversation_begins_as_its_earlier_turns_did_and_is_cut_at_the_limit() -> None:
    first = {"messages": [{"content": TEXT}], "tools": [{"name": "f"}]}
    second = {"messages": [{"content": TEXT}, {"content": "more"}], "tools": [{"name": "f"}]}
    (before, said), (before_2, said_2) = beginning(first, 10_000), beginning(second, 10_000)
    assert before == before_2 == b'[[{"name":"f"}]]' and said_2.startswith(said[:-1])
    assert len(beginning(second, 100)[1]) == 100
    assert beginning({"prompt": "hi"}, 100) == (b"", b'"hi"')


def test_what_answers_are_rebuilt_from_is_a_body_without_its_prompt() -> None:
    prompt = {"messages": [1], "input": "x", "prompt": "x", "system": "x", "token_ids": [1], "features": {}}
    rest = {"model": "m", "stream": True, "tools": [], "instructions": "x"}
    assert without_prompt({**prompt, **rest}) == rest


@pytest.mark.parametrize("field", [{"echo": True}, {"add_generation_prompt": False}])
def test_an_answer_that_goes_on_with_the_last_message_is_rebuilt_from_that_too(field: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": TEXT}], **field}
    assert without_prompt(body) == body


@pytest.mark.parametrize("ids", [[1, 2, 3], TokenIds(b"[1,2,3]")])
def test_of_a_rendered_prompt_its_length_is_left_and_its_tokens_where_they_are_shown(ids: Any) -> None:
    rendered = {"token_ids": ids, "model": "m", "sampling_params": {"n": 2}, "features": {}, "parse_context": {}}
    left = without_tokens(rendered)
    assert left.keys() == {"model", "sampling_params", "token_ids"}
    assert (left["model"], left["sampling_params"], prompt_length(left)) == ("m", {"n": 2}, 3)
    assert without_tokens({**rendered, "return_token_ids": True})["token_ids"] is ids
