"""What a template is given of a client's messages, for templates that are not the tiny model's."""

from __future__ import annotations

from typing import Any

from coordinator.rendering.conversation import conversation, count_tool_calls

USER = {"role": "user", "content": [{"type": "text", "text": "a"}, "b", {"type": "text", "text": None}]}


def given(*messages: dict[str, Any], parts: bool = False, developers: bool = False) -> list[dict[str, Any]]:
    return conversation(list(messages), parts=parts, developers=developers)


def test_content_is_one_text_or_a_list_of_parts() -> None:
    assert given(USER) == [{"role": "user", "content": "a\nb"}]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert given(USER, parts=True) == [{"role": "user", "content": parts}]


def test_a_developer_is_a_system_message_to_a_template_that_knows_none() -> None:
    tools = [{"type": "function"}]
    developer = {"role": "developer", "content": "Be brief.", "tools": tools}
    assert given(developer) == [{"role": "system", "content": "Be brief."}]
    assert given(developer, developers=True) == [{**developer}]


def test_system_messages_become_one_where_a_developer_s_was_among_them() -> None:
    messages = ({"role": "system", "content": "One."}, USER, {"role": "developer", "content": "Two."},
                {"role": "system", "content": None})  # fmt: skip
    assert given(*messages) == [{"role": "system", "content": "One.\n\nTwo."}, {"role": "user", "content": "a\nb"}]
    assert given(*messages, parts=True)[0] == {"role": "system", "content": "One.\n\nTwo."}


def test_system_messages_alone_stay_where_they_are() -> None:
    messages = (USER, {"role": "system", "content": "Later."})
    assert [message["role"] for message in given(*messages)] == ["user", "system"]


def test_the_attribution_header_goes_and_what_follows_it_stays() -> None:
    parts = ["x-anthropic-billing-header: 1\nkept", "x-anthropic-billing-header: 2", {"type": "text", "text": "too"}]
    assert given({"role": "system", "content": parts}) == [{"role": "system", "content": "kept\ntoo"}]


def test_a_tool_s_result_is_one_text_for_every_template() -> None:
    content = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    message = {"role": "tool", "tool_call_id": "a", "content": content}
    for parts in (True, False):
        assert given(message, parts=parts) == [{"role": "tool", "content": "x\ny", "tool_call_id": "a"}]


def test_arguments_are_objects_whatever_was_said() -> None:
    calls = [{"id": str(n), "type": "function", "function": {"name": "f", "arguments": arguments}}
             for n, arguments in enumerate(['{"a": 1}', {"b": 2}, "", None, "[1]", "{"])]  # fmt: skip
    (shown,) = given({"role": "assistant", "tool_calls": calls})
    assert [call["function"]["arguments"] for call in shown["tool_calls"]] == [{"a": 1}, {"b": 2}, {}, {}, {}, {}]
    assert count_tool_calls([{"role": "assistant", "tool_calls": calls}, {"role": "user", "tool_calls": calls}]) == 6


def test_the_client_s_messages_are_left_as_they_are() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}, "index": 0}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "name": "x", "task": "t", "extra": 1}
    before = repr(message)
    (shown,) = given(message)
    assert repr(message) == before
    calls = [{"id": "1", "function": {"arguments": {}, "name": "f"}, "type": "function"}]
    assert shown == {"role": "assistant", "content": "", "tool_calls": calls, "name": "x", "task": "t"}
