"""Where parts stand in each API's body; a part is replaced in a copy, and the body stays as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from envelope.errors import BadRequest
from envelope.formats import Format
from envelope.media_walk import map_parts, wrong

A, B, C = {"type": "a"}, {"type": "b"}, {"type": "c"}
TOOL = {"type": "tool_result", "tool_use_id": "t", "content": [A, "text"]}
WRITTEN = {"type": "document", "source": {"type": "content", "content": [A, B]}}

BODIES: dict[str, tuple[Format, dict[str, Any], list[str]]] = {
    "chat": (
        Format.CHAT,
        {"messages": [{"role": "user", "content": [A, "text", B]}, {"content": "text"}, {"content": [C]}, None]},
        ["messages[0].content[0]", "messages[0].content[1]", "messages[0].content[2]", "messages[2].content[0]"],
    ),
    "responses": (
        Format.RESPONSES,
        {
            "input": [
                {"type": "message", "content": [A]},
                {"type": "function_call_output", "output": [B]},
                {"type": "computer_call_output", "output": C},
                {"type": "function_call_output", "output": "text"},
                {"type": "shell_call_output", "output": [A]},
                "text",
            ]
        },
        ["input[0].content[0]", "input[1].output[0]", "input[2].output"],
    ),
    "messages": (
        Format.MESSAGES,
        {"system": [A], "messages": [{"content": [TOOL, B]}, {"content": [WRITTEN]}, {"content": "text"}]},
        [
            "system[0]",
            "messages[0].content[0]",
            "messages[0].content[0].content[0]",
            "messages[0].content[0].content[1]",
            "messages[0].content[1]",
            "messages[1].content[0]",
            "messages[1].content[0].source.content[0]",
            "messages[1].content[0].source.content[1]",
        ],
    ),
    "generate": (
        Format.GENERATE,
        {"token_ids": [1], "content_parts": [A, B]},
        ["content_parts[0]", "content_parts[1]"],
    ),
    "completions": (Format.COMPLETIONS, {"prompt": "text"}, []),
    "no parts": (Format.CHAT, {"messages": "text"}, []),
    "no messages": (Format.MESSAGES, {}, []),
    "text input": (Format.RESPONSES, {"input": "text"}, []),
}


@pytest.mark.parametrize(("api", "body", "paths"), BODIES.values(), ids=list(BODIES))
def test_every_part_is_visited_once_and_named_by_its_path(api: Format, body: Any, paths: list[str]) -> None:
    seen: list[str] = []

    def look(where: str, part: Any) -> Any:
        seen.append(where)
        return part

    assert map_parts(api, body, look) is body
    assert seen == paths


@pytest.mark.parametrize(("api", "body", "paths"), BODIES.values(), ids=list(BODIES))
def test_a_part_is_replaced_where_it_stands_and_the_body_stays_as_it_was(
    api: Format, body: Any, paths: list[str]
) -> None:
    before = copy.deepcopy(body)
    for path in paths:

        def put(where: str, part: Any, path: str = path) -> Any:
            return {"type": "new"} if where == path else part

        changed = map_parts(api, body, put)
        assert body == before
        holder = changed
        for step in path.replace("]", "").replace("[", ".").split("."):
            holder = holder[int(step)] if step.isdecimal() else holder[step]
        assert holder == {"type": "new"}


def test_blocks_nested_deeper_than_any_api_says_are_refused() -> None:
    """Recursion has an end whatever a client sends."""
    block: dict[str, Any] = {"type": "text"}
    for _ in range(3):
        block = {"type": "tool_result", "content": [block]}
    map_parts(Format.MESSAGES, {"messages": [{"content": [block["content"][0]]}]}, lambda _, part: part)
    with pytest.raises(
        BadRequest, match=r"content\[0\]\.content\[0\]\.content\[0\] \(tool_result\): blocks are nested"
    ):
        map_parts(Format.MESSAGES, {"messages": [{"content": [block]}]}, lambda _, part: part)


def test_an_error_names_the_part() -> None:
    error = wrong("messages[0].content[1]", "image_url", "it is odd")
    assert (error.message, error.param) == ("messages[0].content[1] (image_url): it is odd", "messages[0].content[1]")
