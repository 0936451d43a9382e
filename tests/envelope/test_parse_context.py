"""The context that a worker with parsers needs for derender: render's own, or one made by hand that equals it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from envelope.formats import Format
from envelope.parse_context import with_parse_context

if TYPE_CHECKING:
    from collections.abc import Callable

CHAT, COMPLETIONS, RESPONSES, MESSAGES, GENERATE = Format

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
NAMED = {"type": "function", "function": {"name": "f"}}

PLAIN = {
    "tools": None,
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "include_reasoning": True,
    "chat_template_kwargs": {},
    "history_tool_call_cnt": 0,
}


@pytest.mark.parametrize("given", [{}, {"tool_choice": "auto"}, {"brand_new": 1}])
@pytest.mark.parametrize("api", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
def test_render_s_own_context_is_never_touched(pure: Callable[..., Any], api: Format, given: dict[str, Any]) -> None:
    rendered = {"token_ids": [1], "parse_context": given}
    assert pure(with_parse_context, rendered, api, {"tools": TOOLS}) is rendered


def test_completions_have_none(pure: Callable[..., Any]) -> None:
    rendered = {"token_ids": [1], "parse_context": None}
    assert pure(with_parse_context, rendered, COMPLETIONS, {"prompt": "hi"}) is rendered


# (what the client asked, what the renderer told, what the context is beside PLAIN)
BY_HAND = {
    "plain": ({}, {}, {}),
    "tools are chosen among": ({"tools": TOOLS}, {}, {"tools": TOOLS, "tool_choice": "auto"}),
    "tools are not to be used": ({"tools": TOOLS, "tool_choice": "none"}, {}, {"tools": TOOLS}),
    "tools are required": ({"tools": TOOLS, "tool_choice": "required"}, {},
                           {"tools": TOOLS, "tool_choice": "required"}),
    "a tool is named": ({"tools": TOOLS, "tool_choice": NAMED}, {}, {"tools": TOOLS, "tool_choice": NAMED}),
    "no tools": ({"tools": [], "tool_choice": None}, {}, {}),
    "one call at a time": ({"parallel_tool_calls": False}, {}, {"parallel_tool_calls": False}),
    "null is the default": ({"parallel_tool_calls": None, "include_reasoning": None}, {}, {}),
    "no reasoning": ({"include_reasoning": False}, {}, {"include_reasoning": False}),
    "calls that were made before are counted": (
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "a"}, {"id": "b"}]},
                      {"role": "tool", "tool_call_id": "a", "content": "x"}, {"role": "assistant", "tool_calls": None},
                      "x", {"role": "assistant", "tool_calls": [{"id": "c"}]}]},
        {}, {"history_tool_call_cnt": 3}),
    "the client's template arguments": ({"chat_template_kwargs": {"a": 1}}, {"reasoning_parser_kwargs": None},
                                        {"chat_template_kwargs": {"a": 1}}),
    "the renderer's, which are resolved": (
        {"chat_template_kwargs": {"a": 1}},
        {"reasoning_parser_kwargs": {"chat_template_kwargs": {"a": 1, "enable_thinking": True}}},
        {"chat_template_kwargs": {"a": 1, "enable_thinking": True}}),
}  # fmt: skip


@pytest.mark.parametrize("absent", [{}, {"parse_context": None}])
@pytest.mark.parametrize(("body", "rendered", "context"), BY_HAND.values(), ids=BY_HAND)
def test_without_one_a_chat_s_context_is_made_by_hand(
    pure: Callable[..., Any], body: Any, rendered: Any, context: Any, absent: dict[str, Any]
) -> None:
    request = {"token_ids": [1], **rendered, **absent}
    assert pure(with_parse_context, request, CHAT, body) == {**request, "parse_context": {**PLAIN, **context}}


ANTHROPIC_TOOL = {"name": "f", "description": None, "input_schema": {"type": "object"}}

# (what an Anthropic client asked, what the context is beside PLAIN)
FROM_MESSAGES = {
    "plain": ({}, {"tool_choice": None}),
    "tools are chosen among": ({"tools": [ANTHROPIC_TOOL]}, {"tools": TOOLS, "tool_choice": "auto"}),
    "auto": ({"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "auto"}}, {"tools": TOOLS, "tool_choice": "auto"}),
    "none": ({"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "none"}}, {"tools": TOOLS, "tool_choice": "none"}),
    "any": ({"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "any"}}, {"tools": TOOLS, "tool_choice": "required"}),
    "a tool is named": ({"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "tool", "name": "f"}},
                        {"tools": TOOLS, "tool_choice": NAMED}),
    "one call at a time": ({"tools": [ANTHROPIC_TOOL],
                            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
                           {"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": False}),
    "odd shapes": ({"tools": "f", "tool_choice": "auto", "messages": "hi"}, {"tool_choice": None}),
    "calls that were made before are counted": (
        {"messages": [{"role": "user", "content": "hi"},
                      {"role": "assistant", "content": [{"type": "text", "text": "x"}, {"type": "tool_use"},
                                                        {"type": "tool_use"}]},
                      {"role": "user", "content": [{"type": "tool_result"}]}]},
        {"tool_choice": None, "history_tool_call_cnt": 2}),
}  # fmt: skip


@pytest.mark.parametrize(("body", "context"), FROM_MESSAGES.values(), ids=FROM_MESSAGES)
def test_anthropic_s_tools_are_turned_into_chat_s(pure: Callable[..., Any], body: Any, context: Any) -> None:
    made = pure(with_parse_context, {"token_ids": [1]}, MESSAGES, body)
    assert made == {"token_ids": [1], "parse_context": {**PLAIN, **context}}


def test_responses_tools_are_turned_into_chat_s(pure: Callable[..., Any]) -> None:
    body = {"tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}], "tool_choice": "required"}
    made = pure(with_parse_context, {"token_ids": [1]}, RESPONSES, body)
    assert made == {"token_ids": [1], "parse_context": {**PLAIN, "tools": TOOLS, "tool_choice": "required"}}


SAME_AS_RENDER = [
    ("render_chat_plain", CHAT),
    ("render_chat_tools_auto", CHAT),
    ("render_chat_tools_none", CHAT),
    ("render_chat_tools_named", CHAT),
    ("render_chat_tools_required", CHAT),
    ("render_chat_reasoning_effort_none", CHAT),
    ("render_chat_include_reasoning_false", CHAT),
    ("render_chat_history_tool_calls", CHAT),
    ("render_messages_plain", MESSAGES),
    ("render_messages_tools_stream", MESSAGES),
]


@pytest.mark.parametrize(("name", "api"), SAME_AS_RENDER)
def test_by_hand_it_is_what_vllm_s_renderer_made_of_the_same_body(recorded: Any, name: str, api: Format) -> None:
    exchange = recorded(f"render/{name}")
    rendered = exchange["response"]["body"]
    bare = {**rendered, "parse_context": None}
    assert with_parse_context(bare, api, exchange["request"]["body"]) == rendered
