"""A client cannot tell the coordinator from one vLLM server: answers equal the decode worker's own, field by field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coordinator.sim import Settings
from tests.flows.setups import CHAT, COMPLETIONS, MESSAGES, RESPONSES, comparable, own, question, started

# Path, question, and what is asked beside it.
ASKED: list[tuple[str, str, dict[str, Any]]] = [
    *(
        (path, text, {})
        for path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
        for text in ("Say hello in Japanese.", "Say nothing.", "Escape test.")
    ),
    *((path, "What is 2 + 2?", {"thinking": True}) for path in (CHAT, RESPONSES, MESSAGES)),
    *((path, "What is the weather in Oslo?", {"tool": True}) for path in (CHAT, RESPONSES, MESSAGES)),
    *((path, "Compare the weather in Oslo and Rome.", {"tool": True, "thinking": True}) for path in (CHAT, MESSAGES)),
    (CHAT, "Count to one hundred.", {"max_tokens": 7}),
    (CHAT, "Count to one hundred.", {"max_completion_tokens": 16}),
    (CHAT, "Say stop in the middle.", {"stop": ["STOP"]}),
    (CHAT, "Say stop in the middle.", {"stop": ["STOP"], "include_stop_str_in_output": True}),
    (CHAT, "Just say OK.", {"logprobs": True, "top_logprobs": 2}),
    (CHAT, "Just say OK.", {"logprobs": True}),
    (CHAT, "Just say OK.", {"n": 2, "temperature": 0.5}),
    (CHAT, "Just say OK.", {"return_token_ids": True}),
    (CHAT, "Give me JSON.", {"response_format": {"type": "json_object"}}),
    (CHAT, "What is the weather in Oslo?", {"tool": True, "tool_choice": "required"}),
    (CHAT, "What is the weather in Oslo?", {"tool": True, "tool_choice": "none"}),
    (COMPLETIONS, "Count to one hundred.", {"max_tokens": 7}),
    (COMPLETIONS, "Just say OK.", {"logprobs": 2}),
    (COMPLETIONS, "Just say OK.", {"n": 2, "temperature": 0.5}),
    (COMPLETIONS, "Say stop in the middle.", {"stop": ["STOP"]}),
    (RESPONSES, "Count to one hundred.", {"max_output_tokens": 7}),
    (RESPONSES, "Just say OK.", {"instructions": "Be brief.", "metadata": {"k": "v"}}),
    (MESSAGES, "Count to one hundred.", {"max_tokens": 7}),
    (MESSAGES, "Say stop in the middle.", {"stop_sequences": ["STOP"]}),
    (MESSAGES, "Just say OK.", {"system": "Be brief."}),
]


def name(value: Any) -> str:
    return value.rpartition("/")[2] if isinstance(value, str) else json.dumps(value).replace('"', "")[:40]


# What a worker counts by its own cache, which the first of two equal questions has filled.
CACHED = ("cached_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "input_tokens_details")
# Named in the modules that rebuild: generate's answers do not tell these.
NOT_TOLD = ("completion_tokens_details", "output_tokens_details", "system_fingerprint")


@pytest.mark.parametrize(("path", "text", "fields"), ASKED, ids=name)
async def test_a_whole_answer_by_the_workers_own_route_is_its_own_answer(coordinator, fleet, path, text, fields):
    """V31: the tokens that render made, prefill and the hand-over leave no trace."""
    at = await started(coordinator, fleet, "native")
    body = question(path, text, **fields)
    got, alone = await at.post(path, body), await own(fleet.decode, path, own_body(path, body))
    assert got.status == alone.status == 200
    assert comparable(got.body, *CACHED) == comparable(alone.body, *CACHED)
    assert list(got.body) == list(alone.body)


@pytest.mark.parametrize(("path", "text", "fields"), ASKED, ids=name)
async def test_a_stream_by_the_workers_own_route_is_its_own_stream_event_by_event(
    coordinator, fleet, path, text, fields
):
    """V31."""
    at = await started(coordinator, fleet, "native")
    usage = {"stream_options": {"include_usage": True}} if path in (CHAT, COMPLETIONS) else {}
    body = question(path, text, **fields, stream=True, **usage)
    got, alone = await at.post(path, body), await own(fleet.decode, path, own_body(path, body))
    assert got.status == alone.status == 200
    assert comparable(got.events, *CACHED) == comparable(alone.events, *CACHED)


@pytest.mark.parametrize(("path", "text", "fields"), ASKED, ids=name)
async def test_a_whole_answer_rebuilt_from_messages_is_the_workers_own(coordinator, fleet, path, text, fields):
    """V20: but for what generate does not tell, which the modules that rebuild name."""
    at = await started(coordinator, fleet, "derender")
    body = question(path, text, **fields)
    got, alone = await at.post(path, body), await own(fleet.decode, path, own_body(path, body))
    assert got.status == alone.status == 200
    differs = (*CACHED, *NOT_TOLD)
    assert comparable(got.body, *differs) == comparable(alone.body, *differs)
    assert list(got.body) == list(alone.body)


PLAIN = [row for row in ASKED if not {"tool", "thinking", "tool_choice"} & set(row[2])]


@pytest.mark.parametrize(("path", "text", "fields"), PLAIN, ids=name)
async def test_a_whole_answer_rebuilt_from_text_is_that_of_a_worker_without_parsers(
    coordinator, fleet_of, path, text, fields
):
    """S33: text mode is for such workers: with parsers, their markup stands in the text."""
    fleet = await fleet_of(settings=Settings(parsers=False))
    at = await started(coordinator, fleet, "text")
    body = question(path, text, **fields)
    got, alone = await at.post(path, body), await own(fleet.decode, path, own_body(path, body))
    assert got.status == alone.status == 200
    differs = (*CACHED, *NOT_TOLD)
    assert comparable(got.body, *differs) == comparable(alone.body, *differs)


@pytest.mark.parametrize(("path", "text", "fields"), PLAIN, ids=name)
async def test_a_stream_rebuilt_from_text_is_that_of_a_worker_without_parsers(
    coordinator, fleet_of, path, text, fields
):
    """S33: event by event, and an event with nothing to say may be missing."""
    fleet = await fleet_of(settings=Settings(parsers=False))
    at = await started(coordinator, fleet, "text")
    usage = {"stream_options": {"include_usage": True}} if path in (CHAT, COMPLETIONS) else {}
    body = question(path, text, **fields, stream=True, **usage)
    got, alone = await at.post(path, body), await own(fleet.decode, path, own_body(path, body))
    assert got.status == alone.status == 200
    differs = (*CACHED, *NOT_TOLD, "sequence_number")
    assert telling(comparable(got.events, *differs)) == telling(comparable(alone.events, *differs))


def telling(events: list[Any]) -> list[Any]:
    """Return the events that say something: vLLM sends one for each token whose text is held back."""
    return [event for event in events if not _says_nothing(event)]


def _says_nothing(event: Any) -> bool:
    choices = event.get("choices") if isinstance(event, dict) else None
    if not choices or choices[0]["finish_reason"] or choices[0]["logprobs"] or choices[0].get("token_ids"):
        return False
    said = choices[0].get("delta", choices[0].get("text"))
    return said in ("", {"content": ""}) or said == {}


def own_body(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the body that a client of one server would have sent: the coordinator lets no response be stored."""
    return {**body, "store": False} if path == RESPONSES else body


REFUSED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"model": "nope"}),
    (CHAT, {"temperature": 3}),
    (CHAT, {"messages": "x"}),
    (CHAT, {"tool_choice": "required"}),
    (CHAT, {"max_tokens": 9000}),
    (COMPLETIONS, {"model": "nope"}),
    (COMPLETIONS, {"top_p": 2}),
    (RESPONSES, {"model": "nope"}),
    (RESPONSES, {"temperature": 3}),
    (MESSAGES, {"model": "nope"}),
    (MESSAGES, {"temperature": 3}),
]


@pytest.mark.parametrize(("path", "fields"), REFUSED, ids=name)
@pytest.mark.parametrize("setup", ["native", "text", "derender"])
async def test_a_refusal_is_the_workers_own_whichever_leg_makes_it(coordinator, fleet, setup, path, fields):
    """V05, V12: same status, type, param and code; the message too."""
    at = await started(coordinator, fleet, setup)
    for stream in (False, True):
        body = {**question(path, "Say hello."), **fields, "stream": stream}
        got, alone = await at.post(path, body), await own(fleet.decode, path, body)
        assert (got.status, got.headers["Content-Type"]) == (alone.status, "application/json")
        assert got.error == alone.error
