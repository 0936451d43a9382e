"""What we rebuild for /v1/responses and /v1/messages is what the worker's own endpoint answers, key by key."""

from __future__ import annotations

import json
import re
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.conftest import VLLM_VERSION
from tests.e2e.lineups import LINEUPS
from tests.e2e.servers import MODEL_NAME
from tests.e2e.test_parity import both

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.conftest import Coordinator, Workers
    from tests.e2e.wire import Reply

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(VLLM_VERSION == "0.32", reason="vLLM 0.32 has no derender"),
]

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"

_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_WEATHER = {"name": "get_weather", "description": "Get the current weather in a city."}

SAY: dict[str, tuple[str, bool]] = {  # what the user says, and whether there are tools
    "plain": ("Say hello.", False),
    "accents": ("Say hello in French.", False),
    "japanese": ("Say hello in Japanese.", False),
    "emoji": ("Send me some emoji.", False),
    "escapes": ("Escape test.", False),
    "numbers": ("Count to twenty.", False),
    "tool call": ("What is the weather in Oslo?", True),
    "two tool calls": ("Compare the weather in Quito and Lagos.", True),
}

# Random, or what the generate route does not tell.
ELSEWHERE = {
    RESPONSES: {
        "id",
        "created_at",
        "call_id",
        "item_id",
        "reasoning_tokens",
        "cached_tokens",
        "cache_write_tokens",
        "input_messages",
        "output_messages",
        "sequence_number",  # the worker sends more deltas than the one of a finished answer
        "max_output_tokens",
    },
    MESSAGES: {"id", "signature", "cache_read_input_tokens", "cache_creation_input_tokens"},
}


def asked(path: str, name: str, **fields: Any) -> dict[str, Any]:
    text, tools = SAY[name]
    turn = {"role": "user", "content": text}
    if path == RESPONSES:
        body: dict[str, Any] = {"input": [turn], "max_output_tokens": 400}
        body |= {"tools": [{"type": "function", **_WEATHER, "parameters": _CITY}]} if tools else {}
    else:
        body = {"messages": [turn], "max_tokens": 400}
        body |= {"tools": [{**_WEATHER, "input_schema": _CITY}]} if tools else {}
    return {"model": MODEL_NAME, "temperature": 0, **body, **fields}


def comparable(value: Any, path: str) -> Any:
    """Return a copy without what cannot be equal."""
    if isinstance(value, dict) and path == MESSAGES and "input_tokens" in value:
        # The worker counts blocks that it read or made apart from the rest; generate does not tell of those it made.
        apart = ("cache_read_input_tokens", "cache_creation_input_tokens")
        value = {**value, "input_tokens": value["input_tokens"] + sum(value.get(name) or 0 for name in apart)}
    if isinstance(value, dict):
        return {key: comparable(item, path) for key, item in value.items() if key not in ELSEWHERE[path]}
    if isinstance(value, list):
        return [comparable(item, path) for item in value]
    return value


@pytest.fixture
def derender(workers: Workers, coordinator: Callable[[dict], Coordinator]) -> Coordinator:
    return coordinator(LINEUPS["derender"].config(workers.render.url, workers.prefill.url, workers.decode.url))


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@pytest.mark.parametrize("name", SAY)
def test_a_rebuilt_answer_equals_the_worker_s_own(
    derender: Coordinator, workers: Workers, path: str, name: str
) -> None:
    ours, alone = both(derender, workers, asked(path, name), path)
    assert ours.status == alone.status == 200, ours.raw
    assert comparable(ours.body, path) == comparable(alone.body, path)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (RESPONSES, {"max_output_tokens": 12}),
        (MESSAGES, {"max_tokens": 12}),
        (MESSAGES, {"stop_sequences": ["seven"]}),
    ],
    ids=["cut response", "cut message", "stop sequence"],
)
def test_an_answer_that_ends_early_says_so_in_the_same_words(
    derender: Coordinator, workers: Workers, path: str, fields: dict[str, Any]
) -> None:
    ours, alone = both(derender, workers, asked(path, "numbers", **fields), path)
    assert comparable(ours.body, path) == comparable(alone.body, path)


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@pytest.mark.parametrize("name", SAY)
def test_a_rebuilt_stream_has_the_worker_s_events_in_its_order(
    derender: Coordinator, workers: Workers, path: str, name: str
) -> None:
    """Deltas aside, which the worker sends by the token: as many events, in the same order, adding up to the same."""
    ours, alone = both(derender, workers, asked(path, name, stream=True), path)
    assert kinds(ours) == kinds(alone)
    assert deltas(ours) == deltas(alone)


def events(reply: Reply) -> list[tuple[str, dict[str, Any]]]:
    """Return the events of a stream, but for items of nothing but white space.

    The worker streams the newlines between reasoning and a tool call; in its finished answer, which is all that
    ``derender`` gives, there is no such item.
    """
    found = []
    for block in reply.raw.decode().strip().split("\n\n"):
        match = re.fullmatch(r"event: (\S+)\ndata: (.*)", block, re.DOTALL)
        assert match, block
        found.append((match[1], json.loads(match[2])))
    texts: dict[int, str] = {}
    for _, event in found:
        if (text := _text(event)) is not None:
            texts[_item(event)] = texts.get(_item(event), "") + text
    blank = {item for item, text in texts.items() if not text.strip()}
    return [(kind, event) for kind, event in found if _item(event) not in blank]


def _item(event: dict[str, Any]) -> Any:
    return event.get("output_index", event.get("index"))


def _text(event: dict[str, Any]) -> str | None:
    if event["type"] == "response.output_text.delta":
        return event["delta"]
    delta = event.get("delta")
    return delta["text"] if isinstance(delta, dict) and delta.get("type") == "text_delta" else None


def kinds(reply: Reply) -> list[str]:
    return [kind for kind, _ in groupby(kind for kind, _ in events(reply))]


def deltas(reply: Reply) -> dict[str, str]:
    """Return what the deltas of each kind add up to."""
    whole: dict[str, str] = {}
    for kind, event in events(reply):
        delta = event.get("delta")
        if isinstance(delta, str):
            whole[kind] = whole.get(kind, "") + delta
        elif isinstance(delta, dict) and kind == "content_block_delta":
            name, text = next((k, v) for k, v in delta.items() if k != "type")
            if name != "signature":
                whole[name] = whole.get(name, "") + text
    return whole
