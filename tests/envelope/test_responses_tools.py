"""Tools of ``/v1/responses``: echoed as the SDK's models dump them, shown to parsers as chat's, named back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import CustomTool, FunctionTool, NamespaceTool, Response, ResponseCustomToolCall

from envelope import responses, responses_tools
from envelope.shape import Asked

RECORDINGS = Path(__file__).parent.parent / "data" / "recordings" / "vllm-0.33.0"

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"type": "function", "name": "weather", "description": "Weather", "parameters": SCHEMA}
CUSTOM = {"type": "custom", "name": "shell", "description": "Run it", "format": {"type": "text"}}
NAMESPACE = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers",
    "tools": [
        {"type": "function", "name": "find", "parameters": SCHEMA, "strict": True},
        {"type": "custom", "name": "note"},
    ],
}
SEARCH = {"type": "web_search_preview"}
ALL = {"tools": [FUNCTION, CUSTOM, NAMESPACE, SEARCH]}


@pytest.mark.parametrize(
    ("model", "tool"), [(FunctionTool, FUNCTION), (CustomTool, CUSTOM), (NamespaceTool, NAMESPACE)]
)
def test_a_tool_is_echoed_as_the_sdks_model_dumps_it(model: Any, tool: dict[str, Any]):
    dumped = model.model_validate(tool).model_dump(mode="json", by_alias=True)
    assert json.dumps(responses_tools.echoed_tools({"tools": [tool]})) == json.dumps([dumped])


def test_fields_and_types_that_we_do_not_know_are_echoed_as_sent():
    tools = [{**FUNCTION, "cache_control": {"type": "ephemeral"}}, SEARCH, {"no": "type"}, "odd"]
    function, *others = responses_tools.echoed_tools({"tools": tools})
    assert function["cache_control"] == {"type": "ephemeral"}
    assert others == tools[1:]


@pytest.mark.parametrize(
    ("sent", "echoed", "chat"),
    [
        ({}, "none", "none"),
        ({"tools": [], "tool_choice": "auto"}, "none", "none"),
        ({"tool_choice": "none"}, "none", "none"),
        ({**ALL}, "auto", "auto"),
        ({**ALL, "tool_choice": None}, "auto", "auto"),
        ({**ALL, "tool_choice": "required"}, "required", "required"),
        (
            {**ALL, "tool_choice": {"type": "function", "name": "weather"}},
            {"name": "weather", "type": "function"},
            {"type": "function", "function": {"name": "weather"}},
        ),
        (
            {**ALL, "tool_choice": {"type": "custom", "name": "shell"}},
            {"name": "shell", "type": "custom"},
            {"type": "function", "function": {"name": "shell"}},
        ),
        (
            {**ALL, "tool_choice": {"type": "function", "name": "find"}},
            {"name": "crm__find", "type": "function"},
            {"type": "function", "function": {"name": "crm__find"}},
        ),
        (
            {**ALL, "tool_choice": {"type": "function", "name": "nobody"}},
            {"name": "nobody", "type": "function"},
            {"type": "function", "function": {"name": "nobody"}},
        ),
        (
            {**ALL, "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}},
            {"type": "allowed_tools", "mode": "required", "tools": []},
            "required",
        ),
        ({**ALL, "tool_choice": SEARCH}, SEARCH, "auto"),
    ],
)
def test_tool_choice(sent: dict[str, Any], echoed: Any, chat: Any):
    assert json.dumps(responses_tools.echoed_choice(sent)) == json.dumps(echoed)
    assert responses_tools.chat_choice(sent) == chat


def test_parsers_are_given_the_functions_that_the_model_was_shown():
    tools = responses_tools.chat_tools(ALL)
    assert tools is not None
    assert [tool["function"]["name"] for tool in tools] == ["weather", "shell", "crm__find"]
    assert tools[0] == {
        "type": "function",
        "function": {"name": "weather", "description": "Weather", "parameters": SCHEMA},
    }
    assert tools[1]["function"]["parameters"]["required"] == ["input"]
    assert tools[2]["function"]["strict"] is True
    assert responses_tools.chat_tools({"tools": [SEARCH]}) is None


def test_the_parse_context_is_the_one_that_render_makes_for_the_same_chat_request():
    rendered = json.loads((RECORDINGS / "generate/generate_derender_tool_call.json").read_text())["request"]["body"]
    function = rendered["parse_context"]["tools"][0]["function"]
    body = {"tools": [{"type": "function", **function}], "tool_choice": "auto"}
    assert responses.parse_context(body, rendered) == rendered["parse_context"]


@pytest.mark.parametrize(
    ("sent", "key", "value"),
    [
        ({"parallel_tool_calls": False}, "parallel_tool_calls", False),
        ({"include_reasoning": False}, "include_reasoning", False),
        ({}, "tools", None),
        ({}, "tool_choice", "none"),
        ({}, "chat_template_kwargs", {}),
    ],
)
def test_parse_context_follows_the_client(sent: dict[str, Any], key: str, value: Any):
    assert responses.parse_context(sent, {})[key] == value


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("weather", ("function", "weather", None)),
        ("shell", ("custom", "shell", None)),
        ("crm__find", ("function", "find", "crm")),
        ("find", ("function", "find", None)),
        ("made_up", ("function", "made_up", None)),
    ],
)
def test_a_called_function_is_named_back(name: str, expected: tuple[str, str, str | None]):
    assert responses_tools.called(ALL, name) == expected


@pytest.mark.parametrize(
    ("arguments", "text"),
    [('{"input": "ls -l"}', "ls -l"), ("ls -l", "ls -l"), ('{"cmd": 1}', '{"cmd": 1}'), ("[1]", "[1]"), ("", "")],
)
def test_a_custom_tools_input_is_taken_out_of_its_function(arguments: str, text: str):
    assert responses_tools.custom_input(arguments) == text


def test_calls_become_items_of_the_tools_own_kind_whole_and_streamed():
    calls = [("shell", '{"input": "ls"}'), ("crm__find", '{"city": "Rome"}')]
    said = {"tool_calls": [{"id": f"t{i}", "function": {"name": n, "arguments": a}} for i, (n, a) in enumerate(calls)]}
    reply = {"choices": [{"index": 0, "finish_reason": "tool_calls", "message": said}]}
    given = Asked(ALL, None, "a1", 0)
    answer = responses.whole(reply, given)
    custom, function = answer["output"]
    assert json.dumps(custom) == json.dumps(
        ResponseCustomToolCall(
            call_id="t0", input="ls", name="shell", type="custom_tool_call", id="ctc_a1_0"
        ).model_dump(by_alias=True)
    )
    assert (function["name"], function["namespace"]) == ("find", "crm")
    Response.model_validate(answer)
    stream = responses.replay(reply, given)
    assert b"event: response.custom_tool_call_input.delta\n" in stream
    assert b'"input":"ls","item_id":"ctc_a1_0"' in stream
    assert b'"name":"find","type":"function_call","id":"fc_a1_1"' in stream
