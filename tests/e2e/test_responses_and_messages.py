"""The other two APIs, through the SDKs that users have for them, in every line-up."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import anthropic
import openai
import pytest

from tests.bounds import HANG_S
from tests.e2e.conversations import CONVERSATIONS, conversation
from tests.e2e.servers import MODEL_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.conftest import Coordinator
    from tests.e2e.lineups import Lineup

pytestmark = pytest.mark.e2e

FRENCH = CONVERSATIONS["accents"]
WEATHER = conversation("What is the weather in Oslo?")
WEATHER_TOOL = WEATHER.request["tools"][0]["function"]
# Thinking is on unless the template is told otherwise, which these two APIs have no field for in the SDK.
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture
def claude(front: Coordinator) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=front.url, api_key="none", max_retries=0, timeout=HANG_S) as sdk:
        yield sdk


def messages(talk, **fields) -> dict:
    # This SDK has no temperature any more.
    extra = NO_THINKING | {"temperature": 0}
    return {"model": MODEL_NAME, "max_tokens": 200, "messages": talk.request["messages"], "extra_body": extra} | fields


def test_a_response_is_what_the_model_said(front: Coordinator) -> None:
    answer = front.sdk.responses.create(
        model=MODEL_NAME, input=FRENCH.request["messages"], temperature=0, store=False, extra_body=NO_THINKING
    )
    assert answer.status == "completed"
    assert answer.output_text.strip("\n") == FRENCH.expect["content"]


def test_a_streamed_response_is_what_the_model_said(front: Coordinator) -> None:
    asked = {"model": MODEL_NAME, "input": FRENCH.request["messages"], "temperature": 0, "store": False}
    events = list(front.sdk.responses.create(**asked, stream=True, extra_body=NO_THINKING))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text.strip("\n") == FRENCH.expect["content"]
    assert [events[0].type, events[-1].type] == ["response.created", "response.completed"]
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert events[-1].response.output_text == text


def test_a_message_is_what_the_model_said(claude: anthropic.Anthropic) -> None:
    answer = claude.messages.create(**messages(FRENCH))
    assert (answer.type, answer.role, answer.stop_reason) == ("message", "assistant", "end_turn")
    assert "".join(b.text for b in answer.content if b.type == "text").strip("\n") == FRENCH.expect["content"]
    assert answer.usage.output_tokens > 0


def test_a_streamed_message_is_what_the_model_said(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(**messages(FRENCH)) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text.strip("\n") == FRENCH.expect["content"]
    assert final.stop_reason == "end_turn"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_message_with_a_tool_call_has_a_tool_use_block(
    claude: anthropic.Anthropic, lineup: Lineup, stream: bool
) -> None:
    if not lineup.parsed:
        pytest.skip("raw text has no tool calls")
    tool = {
        "name": WEATHER_TOOL["name"],
        "description": WEATHER_TOOL["description"],
        "input_schema": WEATHER_TOOL["parameters"],
    }
    asked = messages(WEATHER, tools=[tool])
    if stream:
        with claude.messages.stream(**asked) as events:
            answer = events.get_final_message()
    else:
        answer = claude.messages.create(**asked)
    (block,) = [b for b in answer.content if b.type == "tool_use"]
    assert (block.name, block.input, answer.stop_reason) == ("get_weather", {"city": "Oslo"}, "tool_use")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_response_with_a_tool_call_has_a_function_call_item(front: Coordinator, lineup: Lineup, stream: bool) -> None:
    if not lineup.parsed:
        pytest.skip("raw text has no tool calls")
    asked = {"model": MODEL_NAME, "input": WEATHER.request["messages"], "temperature": 0, "store": False}
    asked |= {"tools": [{"type": "function"} | WEATHER_TOOL], "extra_body": NO_THINKING}
    if stream:
        answer = list(front.sdk.responses.create(**asked, stream=True))[-1].response
    else:
        answer = front.sdk.responses.create(**asked)
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Oslo"})


def test_an_unknown_model_is_not_found(front: Coordinator, claude: anthropic.Anthropic) -> None:
    with pytest.raises(openai.NotFoundError):
        front.sdk.responses.create(model="gpt-0", input="hi", store=False)
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(**messages(FRENCH, model="gpt-0"))
