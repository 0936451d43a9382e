"""The official SDK gets the model's own answer through every line-up, whole and streamed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.conversations import CONVERSATIONS, Conversation, joined, said
from tests.e2e.servers import MODEL_NAME

if TYPE_CHECKING:
    from tests.e2e.conftest import Coordinator
    from tests.e2e.lineups import Lineup

pytestmark = pytest.mark.e2e


@pytest.fixture(params=CONVERSATIONS)
def talk(request: pytest.FixtureRequest) -> Conversation:
    return CONVERSATIONS[request.param]


def test_a_whole_answer_is_what_the_model_said(front: Coordinator, lineup: Lineup, talk: Conversation) -> None:
    answer = front.sdk.chat.completions.create(**talk.ask())

    (choice,) = answer.choices
    assert said(choice.message, choice.finish_reason) == talk.answer(parsed=lineup.parsed)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL_NAME
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert choice.message.role == "assistant"
    ids = [call.id for call in choice.message.tool_calls or ()]
    assert len(set(ids)) == len(ids)


async def test_a_stream_adds_up_to_what_the_model_said(front: Coordinator, lineup: Lineup, talk: Conversation) -> None:
    async with front.async_sdk() as sdk:
        stream = await sdk.chat.completions.create(**talk.ask(stream=True, stream_options={"include_usage": True}))
        chunks = [chunk async for chunk in stream]

    assert joined(chunks) == {0: talk.answer(parsed=lineup.parsed)}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert {chunk.model for chunk in chunks} == {MODEL_NAME}
    ((chunk_id, _),) = {(chunk.id, chunk.created) for chunk in chunks}
    assert chunk_id.startswith("chatcmpl-")
    *deltas, last = chunks
    assert deltas[0].choices[0].delta.role == "assistant"
    assert [bool(chunk.choices[0].finish_reason) for chunk in deltas] == [False] * (len(deltas) - 1) + [True]
    assert last.choices == []
    assert last.usage.completion_tokens > 0
    assert not any(chunk.usage for chunk in deltas)
    calls = [call for chunk in deltas for call in chunk.choices[0].delta.tool_calls or ()]
    assert [c.index for c in calls if c.id] == list(range(len({c.index for c in calls}))), "one id for each call"


async def test_text_comes_piece_by_piece_where_the_worker_streams(front: Coordinator, lineup: Lineup) -> None:
    """All but derender, which vLLM answers whole, so that its stream is one piece."""
    asked = CONVERSATIONS["numbers"].ask(stream=True)
    async with front.async_sdk() as sdk:
        stream = await sdk.chat.completions.create(**asked)
        pieces = [chunk async for chunk in stream if chunk.choices[0].delta.content]

    if lineup.output_mode == "derender":
        assert len(pieces) == 1
    else:
        assert len(pieces) > 35
