"""The official OpenAI client, in front of each of the three set-ups: typed answers, streams, helpers and error classes.

Whole and streamed answers are compared with one another here; with the worker's own in ``test_api_equal.py``.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import openai
import pytest
from pydantic import BaseModel

from coordinator.sim import Canned, Fault, Settings
from tests.bounds import HANG_S
from tests.flows.setups import PARAMETERS, SETUPS, started

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from openai.types.chat import ChatCompletionChunk

    from tests.flows.conftest import Running

PARSED = ["native", "derender"]  # text mode leaves tool calls and thoughts in the text
STREAMED = ["native", "text"]  # a derender leg comes whole, so nothing can happen in its midst
NO_THOUGHT = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
THOUGHT = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
RESPONSES_TOOL: Any = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": False}
HELLO = "Bonjour ! Ça va ? C'est déjà l'été à Besançon."


def said(text: str) -> Any:
    return [{"role": "user", "content": text}]


@asynccontextmanager
async def client_of(at: Running, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        asyncio.timeout(HANG_S),
        openai.AsyncOpenAI(base_url=f"{at.url}/v1", api_key="key-1", max_retries=0, **options) as client,
    ):
        yield client


async def collected(stream: Any) -> list[ChatCompletionChunk]:
    return [chunk async for chunk in stream]


def joined(chunks: list[ChatCompletionChunk], index: int = 0) -> tuple[str, str, list[dict[str, str]], str | None]:
    """Return what a stream said: thought, content, tool calls, finish reason."""
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    thought = "".join(getattr(choice.delta, "reasoning", None) or "" for choice in choices)
    content = "".join(choice.delta.content or "" for choice in choices)
    calls: dict[int, dict[str, str]] = {}
    for part in (part for choice in choices for part in choice.delta.tool_calls or ()):
        call = calls.setdefault(part.index, {"id": part.id or "", "name": "", "arguments": ""})
        assert part.function is not None
        call["name"] += part.function.name or ""
        call["arguments"] += part.function.arguments or ""
    (finish,) = [choice.finish_reason for choice in choices if choice.finish_reason]
    return thought, content, list(calls.values()), finish


@pytest.mark.parametrize("setup", SETUPS)
async def test_a_chat_answer_is_typed_and_its_stream_says_the_same(coordinator, fleet, setup):
    at = await started(coordinator, fleet, setup)
    async with client_of(at) as client:
        asked: Any = {"model": "tiny", "messages": said("Say hello in French."), **NO_THOUGHT}
        whole = await client.chat.completions.create(**asked)
        chunks = await collected(
            await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        )
    (choice,) = whole.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", HELLO, "stop")
    assert joined(chunks) == ("", HELLO, [], "stop")
    assert (whole.object, whole.model) == ("chat.completion", "tiny")
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert whole.id.startswith("chatcmpl-")
    assert chunks[0].id.startswith("chatcmpl-")
    assert chunks[0].choices[0].delta.role == "assistant"
    *others, last = chunks
    assert (last.choices, [chunk.usage for chunk in others]) == ([], [None] * len(others))
    assert whole.usage is not None
    assert last.usage is not None
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(last.usage, count) == getattr(whole.usage, count) > 0


@pytest.mark.parametrize("setup", PARSED)
async def test_a_thought_is_apart_from_the_answer(coordinator, fleet, setup):
    at = await started(coordinator, fleet, setup)
    async with client_of(at) as client:
        asked: Any = {"model": "tiny", "messages": said("What is 2 + 2?"), **THOUGHT}
        whole = (await client.chat.completions.create(**asked)).choices[0]
        thought, content, _, finish = joined(
            await collected(await client.chat.completions.create(**asked, stream=True))
        )
    assert content.strip() == "2 + 2 = **4**."
    assert (whole.message.content, whole.finish_reason) == (content, finish)
    assert whole.message.reasoning == thought  # type: ignore[attr-defined]
    assert thought.strip() == "2 + 2 is 4.\n\nI am sure of it."


@pytest.mark.parametrize("setup", PARSED)
@pytest.mark.parametrize(
    ("text", "cities", "choice"),
    [
        ("What is the weather in Oslo?", ["Oslo"], "auto"),
        ("Compare the weather in Oslo and Rome.", ["Oslo", "Rome"], "auto"),
        ("What is the weather in Oslo?", ["Oslo"], "required"),
    ],
)
async def test_tool_calls_are_typed_and_streamed_by_index(coordinator, fleet, setup, text, cities, choice):
    """S32, B13."""
    at = await started(coordinator, fleet, setup)
    async with client_of(at) as client:
        asked: Any = {"model": "tiny", "messages": said(text), "tools": [TOOL], "tool_choice": choice, **NO_THOUGHT}
        whole = (await client.chat.completions.create(**asked)).choices[0]
        _, content, calls, finish = joined(await collected(await client.chat.completions.create(**asked, stream=True)))
    assert (whole.finish_reason, finish) == ("tool_calls", "tool_calls")
    assert whole.message.tool_calls is not None
    assert [call.function.name for call in whole.message.tool_calls] == ["get_weather"] * len(cities)
    assert [json.loads(call.function.arguments)["city"] for call in whole.message.tool_calls] == cities
    assert [(call["name"], json.loads(call["arguments"])["city"]) for call in calls] == [
        ("get_weather", city) for city in cities
    ]
    assert len({call["id"] for call in calls}) == len(cities)
    assert (whole.message.content or "") == content


@pytest.mark.parametrize("setup", PARSED)
async def test_a_conversation_goes_on_after_a_tool_was_called(coordinator, fleet, setup):
    """V26: the SDK's own message object, null content and all, is the next request's history."""
    at = await started(coordinator, fleet, setup)
    async with client_of(at) as client:
        history: list[Any] = said("What is the weather in Oslo?")
        for answer in ("cold", None):
            message = (
                (await client.chat.completions.create(model="tiny", messages=history, tools=[TOOL], **NO_THOUGHT))
                .choices[0]
                .message
            )
            if answer is not None:
                assert message.tool_calls is not None
                history += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": answer}]
    assert message.content is not None
    assert message.content.strip() == "In Oslo it is cold."


@pytest.mark.parametrize("setup", SETUPS)
async def test_the_stream_helper_ends_with_the_whole_answer(coordinator, fleet, setup):
    at = await started(coordinator, fleet, setup)
    async with client_of(at) as client:
        asked: Any = {"model": "tiny", "messages": said("Say hello in French."), **NO_THOUGHT}
        async with client.chat.completions.stream(**asked) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
        whole = await client.chat.completions.create(**asked)
    assert (kinds[0], kinds[-1]) == ("chunk", "content.done")
    assert "content.delta" in kinds
    assert final.choices[0].message.content == whole.choices[0].message.content == HELLO
    assert final.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("setup", PARSED)
async def test_the_stream_helper_gathers_tool_calls(coordinator, fleet, setup):
    at = await started(coordinator, fleet, setup)
    async with client_of(at) as client:
        asked: Any = {"model": "tiny", "messages": said("What is the weather in Oslo?"), "tools": [TOOL], **NO_THOUGHT}
        async with client.chat.completions.stream(**asked) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    (call,) = final.choices[0].message.tool_calls or ()
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"})
    assert final.choices[0].finish_reason == "tool_calls"


class City(BaseModel):
    city: str
    population: int


@pytest.mark.parametrize("setup", SETUPS)
async def test_a_structured_answer_is_parsed_by_the_sdk(coordinator, fleet, setup):
    """V22: the grammar reaches the engine on every way there."""
    at = await started(coordinator, fleet, setup)
    async with client_of(at) as client:
        asked: Any = {"model": "tiny", "messages": said("Which city?"), "response_format": City, **NO_THOUGHT}
        whole = (await client.chat.completions.parse(**asked)).choices[0].message
        async with client.chat.completions.stream(**asked) as stream:
            streamed = (await stream.get_final_completion()).choices[0].message
    assert whole.parsed == streamed.parsed == City(city="Oslo", population=1)


@pytest.mark.parametrize("setup", SETUPS)
async def test_several_choices_are_streamed_by_their_index(coordinator, fleet, setup):
    """B10."""
    at = await started(coordinator, fleet, setup)
    async with client_of(at) as client:
        asked: Any = {
            "model": "tiny",
            "messages": said("Just say OK."),
            "n": 3,
            "temperature": 0.5,
            "seed": 1,
            **NO_THOUGHT,
        }
        whole = await client.chat.completions.create(**asked)
        chunks = await collected(await client.chat.completions.create(**asked, stream=True))
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    for choice in whole.choices:
        assert joined(chunks, choice.index) == ("", choice.message.content, [], "stop")
    assert len({choice.message.content for choice in whole.choices}) == 3


@pytest.mark.parametrize("setup", SETUPS)
async def test_logprobs_are_typed_and_the_streams_are_the_whole_ones(coordinator, fleet, setup):
    at = await started(coordinator, fleet, setup)
    async with client_of(at) as client:
        asked: Any = {
            "model": "tiny",
            "messages": said("Just say OK."),
            "logprobs": True,
            "top_logprobs": 2,
            **NO_THOUGHT,
        }
        whole = (await client.chat.completions.create(**asked)).choices[0].logprobs
        chunks = await collected(await client.chat.completions.create(**asked, stream=True))
    assert whole is not None
    assert whole.content is not None
    parts = [choice.logprobs.content for chunk in chunks for choice in chunk.choices if choice.logprobs]
    assert [token for part in parts for token in part or ()] == whole.content
    assert all(len(token.top_logprobs) == 2 for token in whole.content)
    assert whole.content[0].bytes == list(whole.content[0].token.encode())


@pytest.mark.parametrize("setup", SETUPS)
async def test_a_completion_is_typed_and_its_stream_says_the_same(coordinator, fleet, setup):
    at = await started(coordinator, fleet, setup)
    async with client_of(at) as client:
        asked: Any = {"model": "tiny", "prompt": "Count to 20.", "max_tokens": 9, "logprobs": 1}
        whole = await client.completions.create(**asked)
        chunks = [chunk async for chunk in await client.completions.create(**asked, stream=True)]
    assert (whole.object, whole.choices[0].finish_reason) == ("text_completion", "length")
    assert whole.id.startswith("cmpl-")
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text != ""
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
    assert whole.choices[0].logprobs is not None
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens or ()]
    offsets = [at for choice in choices if choice.logprobs for at in choice.logprobs.text_offset or ()]
    assert (tokens, offsets) == (whole.choices[0].logprobs.tokens, whole.choices[0].logprobs.text_offset)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 9


@pytest.mark.parametrize("setup", SETUPS)
async def test_a_completion_of_token_ids_needs_no_renderer(coordinator, fleet, setup):
    at = await started(coordinator, fleet, setup)
    async with client_of(at) as client:
        text = await client.completions.create(model="tiny", prompt="Count to 20.", max_tokens=9, temperature=0)
        rendered = len(fleet.render.received)
        ids = fleet.decode.received[-1].body.get("token_ids") or fleet.decode.received[-1].body["prompt"]
        whole = await client.completions.create(model="tiny", prompt=ids, max_tokens=9, temperature=0)
    assert whole.choices[0].text == text.choices[0].text
    assert len(fleet.render.received) == rendered


@pytest.mark.parametrize("setup", SETUPS)
async def test_a_response_is_typed_and_its_stream_ends_with_it(coordinator, fleet, setup):
    """B15: with its own lifecycle of events."""
    at = await started(coordinator, fleet, setup)
    async with client_of(at) as client:
        asked: Any = {"model": "tiny", "input": "Say hello in French.", "reasoning": {"effort": "none"}}
        whole = await client.responses.create(**asked)
        events = [event async for event in await client.responses.create(**asked, stream=True)]
    assert (whole.object, whole.status, whole.output_text) == ("response", "completed", HELLO)
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == HELLO
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == HELLO
    assert last.response.usage is not None
    assert whole.usage is not None
    assert last.response.usage.output_tokens == whole.usage.output_tokens > 0
    assert last.response.usage.input_tokens == whole.usage.input_tokens > 0


@pytest.mark.parametrize("setup", SETUPS)
async def test_the_response_helper_ends_with_the_whole_response(coordinator, fleet, setup):
    at = await started(coordinator, fleet, setup)
    async with client_of(at) as client:
        asked: Any = {"model": "tiny", "input": "Say hello in French.", "reasoning": {"effort": "none"}}
        async with client.responses.stream(**asked) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
    assert final.output_text == HELLO
    assert kinds[-1] == "response.completed"


@pytest.mark.parametrize("setup", PARSED)
async def test_a_response_calls_functions_and_shows_its_thought(coordinator, fleet, setup):
    at = await started(coordinator, fleet, setup)
    async with client_of(at) as client:
        asked: Any = {"model": "tiny", "input": "What is the weather in Oslo?", "tools": [RESPONSES_TOOL]}
        whole = await client.responses.create(**asked)
        events = [event async for event in await client.responses.create(**asked, stream=True)]
    final = events[-1].response
    assert [item.type for item in whole.output] == [item.type for item in final.output]
    for response in (whole, final):
        first, *_, last = response.output
        assert (first.type, last.type) == ("reasoning", "function_call")
        assert (last.name, json.loads(last.arguments)) == ("get_weather", {"city": "Oslo"})
        assert response.output_text.strip() == ""
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [json.loads(event.arguments) for event in done] == [{"city": "Oslo"}]


@pytest.mark.parametrize("setup", SETUPS)
async def test_a_response_that_is_cut_by_its_cap_is_incomplete(coordinator, fleet, setup):
    at = await started(coordinator, fleet, setup)
    async with client_of(at) as client:
        asked: Any = {
            "model": "tiny",
            "input": "Count to one hundred.",
            "max_output_tokens": 5,
            "reasoning": {"effort": "none"},
        }
        whole = await client.responses.create(**asked)
        events = [event async for event in await client.responses.create(**asked, stream=True)]
    for response in (whole, events[-1].response):
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert events[-1].type == "response.incomplete"
    assert whole.output_text == events[-1].response.output_text


@pytest.mark.parametrize("setup", SETUPS)
async def test_the_request_id_is_on_every_object_and_raw_headers_can_be_read(coordinator, fleet, setup):
    """H19."""
    at = await started(coordinator, fleet, setup)
    async with client_of(at) as client:
        own: Any = {"model": "tiny", "extra_headers": {"X-Request-Id": "ask-7"}}
        whole = await client.chat.completions.create(messages=said("Say hello."), **own)
        assert whole._request_id == "ask-7"
        raw = await client.chat.completions.with_raw_response.create(messages=said("Say hello."), **own)
        assert (raw.status_code, raw.headers["x-request-id"]) == (200, "ask-7")
        assert raw.parse().choices[0].finish_reason == "stop"
        async with client.chat.completions.with_streaming_response.create(
            messages=said("Say hello."), stream=True, **own
        ) as streaming:
            assert streaming.headers["x-request-id"] == "ask-7"
            lines = [line async for line in streaming.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"


@pytest.mark.parametrize("setup", SETUPS)
async def test_the_models_are_listed(coordinator, fleet, setup):
    at = await started(coordinator, fleet, setup)
    async with client_of(at) as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("setup", SETUPS)
async def test_a_mistake_is_the_sdks_error_of_its_status(coordinator, fleet, setup, stream):
    """V12, C2: with the worker's message, code and param."""
    at = await started(coordinator, fleet, setup)
    async with client_of(at) as client:
        create: Any = client.chat.completions.create
        with pytest.raises(openai.NotFoundError) as missing:
            await create(model="nope", messages=said("x"), stream=stream)
        assert (missing.value.code, missing.value.param, missing.value.type) == ("404", "model", "NotFoundError")
        assert "The model `nope` does not exist." in missing.value.message
        with pytest.raises(openai.BadRequestError) as bad:
            await create(model="tiny", messages=said("x"), temperature=3, stream=stream)
        assert (bad.value.param, bad.value.status_code) == ("temperature", 400)
        with pytest.raises(openai.BadRequestError) as ours:
            await create(model="tiny", messages=said("x"), max_tokens=0, stream=stream)
        assert ours.value.param == "max_tokens"
        assert ours.value.request_id
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(model="tiny", input="x", previous_response_id="resp_1", stream=stream)
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="tiny", input="x")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("setup", SETUPS)
async def test_a_key_that_a_worker_refuses_is_an_authentication_error(coordinator, fleet_of, setup, stream):
    fleet = await fleet_of(settings=Settings(api_key="another"))
    shape, steps = SETUPS[setup]
    at = await coordinator(fleet, shape, steps=steps, ready=False)
    async with client_of(at) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model="tiny", messages=said("x"), stream=stream)


STATUSES: list[tuple[int, type[openai.APIStatusError]]] = [
    (403, openai.PermissionDeniedError),
    (409, openai.ConflictError),
    (422, openai.UnprocessableEntityError),
    (429, openai.RateLimitError),
    (500, openai.InternalServerError),
    (503, openai.InternalServerError),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("status", "kind"), STATUSES)
async def test_a_workers_failure_is_the_sdks_error_of_its_status(coordinator, fleet, status, kind, stream):
    at = await coordinator(fleet, "alone")
    fleet.decode.behave.fault = Fault(canned=Canned(status, "<html>no</html>", (("Retry-After", "1"),), "text/html"))
    async with client_of(at) as client:
        with pytest.raises(kind) as failed:
            await client.chat.completions.create(model="tiny", messages=said("x"), stream=stream)
    assert failed.value.status_code == (502 if status == 500 else status)
    assert isinstance(failed.value.body, dict)


@pytest.mark.parametrize(
    "fault", [Fault(error_after=3), Fault(die_after=3), Fault(end_after=3), Fault(half_event_after=3)]
)
@pytest.mark.parametrize("setup", STREAMED)
async def test_a_chat_stream_that_breaks_raises_and_what_came_before_was_given(coordinator, fleet, setup, fault):
    """B1, S09, S11, S12: the SDK takes a plain end of the body for the end of the answer."""
    at = await started(coordinator, fleet, setup)
    fleet.decode.behave.next(fault)
    got: list[ChatCompletionChunk] = []
    async with client_of(at) as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=said("Count to 20."), stream=True, **NO_THOUGHT
        )
        with pytest.raises(openai.APIError):
            async for chunk in stream:
                got.append(chunk)
    assert any(choice.delta.content for chunk in got for choice in chunk.choices)


@pytest.mark.parametrize("fault", [Fault(error_after=3), Fault(die_after=3)])
@pytest.mark.parametrize("setup", STREAMED)
async def test_a_completions_stream_that_breaks_raises(coordinator, fleet, setup, fault):
    at = await started(coordinator, fleet, setup)
    fleet.decode.behave.next(fault)
    async with client_of(at) as client:
        stream = await client.completions.create(model="tiny", prompt="Count to 20.", stream=True)
        with pytest.raises(openai.APIError):
            async for _ in stream:
                pass


@pytest.mark.parametrize("setup", STREAMED)
async def test_a_response_stream_that_breaks_raises_or_fails_by_its_own_event(coordinator, fleet, setup):
    """B1: vLLM cuts such a stream without a word; the client is told all the same."""
    at = await started(coordinator, fleet, setup)
    fleet.decode.behave.next(Fault(die_after=8))
    kinds = []
    async with client_of(at) as client:
        stream = await client.responses.create(model="tiny", input="Count to 20.", stream=True)
        with pytest.raises(openai.APIError):
            async for event in stream:
                kinds.append(event.type)
                if event.type in ("error", "response.failed"):
                    raise openai.APIError("told", request=None, body=None)  # type: ignore[arg-type]
    assert "response.completed" not in kinds


@pytest.mark.parametrize("setup", SETUPS)
async def test_the_synchronous_client_is_served_alike(coordinator, fleet, setup):
    at = await started(coordinator, fleet, setup)

    def talk() -> tuple[str | None, str, str, str]:
        with openai.OpenAI(base_url=f"{at.url}/v1", api_key="key-1", max_retries=0, timeout=HANG_S) as client:
            asked: Any = {"model": "tiny", "messages": said("Say hello in French."), **NO_THOUGHT}
            whole = client.chat.completions.create(**asked).choices[0].message.content
            streamed = "".join(
                chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True)
            )
            completion = client.completions.create(model="tiny", prompt="Just say OK.").choices[0].text
            response = client.responses.create(
                model="tiny", input="Say hello in French.", reasoning={"effort": "none"}
            ).output_text
            with pytest.raises(openai.NotFoundError):
                client.chat.completions.create(model="nope", messages=said("x"))
            return whole, streamed, completion, response

    async with asyncio.timeout(HANG_S):
        assert await asyncio.to_thread(talk) == (HELLO, HELLO, "OK", HELLO)


@pytest.mark.parametrize("setup", STREAMED)
async def test_a_client_that_closes_its_stream_frees_the_worker(coordinator, fleet_of, eventually, setup):
    """A3, of the SDK's own way to leave."""
    fleet = await fleet_of(itl_s=0.02)
    at = await started(coordinator, fleet, setup)
    async with client_of(at) as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=said("Count to 20."), stream=True, **NO_THOUGHT
        )
        async for _ in stream:
            break
        await stream.close()
        await eventually(lambda: not fleet.decode.in_flight)
