"""The official Anthropic client, in front of each of the three set-ups: blocks, streams, token counts, error classes.

Text mode has no thinking and tool blocks, as its text is not parsed.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anthropic
import pytest

from coordinator.sim import Canned, Fault, Settings
from tests.bounds import HANG_S
from tests.flows.setups import PARAMETERS, SETUPS, started

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.flows.conftest import Running

PARSED = ["native", "derender"]
STREAMED = ["native", "text"]
TOOL: Any = {"name": "get_weather", "description": "Look outside.", "input_schema": PARAMETERS}
NO_THOUGHT: Any = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
THOUGHT: Any = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
HELLO = "Bonjour ! Ça va ? C'est déjà l'été à Besançon."


def asking(text: str, **fields: Any) -> Any:
    return {"model": "tiny", "max_tokens": 500, "messages": [{"role": "user", "content": text}], **fields}


@asynccontextmanager
async def client_of(at: Running, **options: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with (
        asyncio.timeout(HANG_S),
        anthropic.AsyncAnthropic(base_url=at.url, api_key="key-1", max_retries=0, **options) as client,
    ):
        yield client


def blocks(message: Any) -> list[Any]:
    """Return what a message says, without ids and signatures; text mode has no thinking of its own."""
    said: list[Any] = []
    for block in message.content:
        if block.type == "thinking":
            said.append(("thinking", block.thinking.strip()))
        elif block.type == "tool_use":
            said.append((block.name, block.input))
        elif block.text.strip() or len(message.content) == 1:
            said.append(block.text.strip())
    return said


ASKED: list[tuple[str, dict[str, Any], list[Any], str]] = [
    ("Say hello in French.", NO_THOUGHT, [HELLO], "end_turn"),
    ("Say nothing.", NO_THOUGHT, [""], "end_turn"),
    ("Count to one hundred.", {**NO_THOUGHT, "max_tokens": 7}, ["1 2 3 4"], "max_tokens"),
    ("Say stop in the middle.", {**NO_THOUGHT, "stop_sequences": ["STOP"]}, ["This is before"], "stop_sequence"),
]
PARSED_ASKED: list[tuple[str, dict[str, Any], list[Any], str]] = [
    ("Just say OK.", THOUGHT, [("thinking", "Two letters."), "OK"], "end_turn"),
    (
        "What is the weather in Oslo?",
        {**NO_THOUGHT, "tools": [TOOL]},
        [("get_weather", {"city": "Oslo"})],
        "tool_use",
    ),
    (
        "Compare the weather in Oslo and Rome.",
        {**THOUGHT, "tools": [TOOL]},
        [
            ("thinking", "I need the tool twice."),
            ("get_weather", {"city": "Oslo"}),
            ("get_weather", {"city": "Rome"}),
        ],
        "tool_use",
    ),
]


async def check(at: Running, text: str, fields: dict[str, Any], said: list[Any], reason: str) -> None:
    """Ask in three ways, and expect one answer."""
    async with client_of(at) as client:
        whole = await client.messages.create(**asking(text, **fields))
        events = [event async for event in await client.messages.create(**asking(text, **fields), stream=True)]
        async with client.messages.stream(**asking(text, **fields)) as stream:
            gathered = await stream.get_final_message()
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", "tiny")
    assert (blocks(whole), whole.stop_reason) == (said, reason)
    assert (blocks(gathered) or [""], gathered.stop_reason) == (said, reason)
    assert gathered.stop_sequence == whole.stop_sequence == ("STOP" if reason == "stop_sequence" else None)
    for count in ("input_tokens", "output_tokens"):
        assert getattr(gathered.usage, count) == getattr(whole.usage, count)
    check_lifecycle([event.type for event in events])


def check_lifecycle(kinds: list[str]) -> None:
    """B15: message_start once and first; each block is started, filled and stopped before the next; then the end."""
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert kinds.count("message_start") == kinds.count("message_stop") == 1
    within = False
    for kind in kinds[1:-2]:
        assert kind == "content_block_start" if not within else kind in ("content_block_delta", "content_block_stop")
        within = kind != "content_block_stop"
    assert not within


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize(("text", "fields", "said", "reason"), ASKED, ids=lambda value: str(value)[:20])
async def test_a_message_is_typed_and_its_stream_says_the_same(coordinator, fleet, setup, text, fields, said, reason):
    """S40."""
    await check(await started(coordinator, fleet, setup), text, fields, said, reason)


@pytest.mark.parametrize("setup", PARSED)
@pytest.mark.parametrize(("text", "fields", "said", "reason"), PARSED_ASKED, ids=lambda value: str(value)[:20])
async def test_thoughts_and_tool_calls_are_blocks(coordinator, fleet, setup, text, fields, said, reason):
    """B15, S32."""
    await check(await started(coordinator, fleet, setup), text, fields, said, reason)


@pytest.mark.parametrize("setup", PARSED)
async def test_a_conversation_goes_on_after_a_tool_was_used(coordinator, fleet, setup):
    """V26: the SDK's own blocks are the next request's history."""
    at = await started(coordinator, fleet, setup)
    async with client_of(at) as client:
        asked = asking("What is the weather in Oslo?", tools=[TOOL], **NO_THOUGHT)
        first = await client.messages.create(**asked)
        use = first.content[-1]
        assert use.type == "tool_use"
        result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "cold"}
        asked["messages"] += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = await client.messages.create(**asked)
    assert blocks(second) == ["In Oslo it is cold."]


@pytest.mark.parametrize("setup", SETUPS)
async def test_a_token_count_is_what_the_answer_will_say(coordinator, fleet, setup):
    at = await started(coordinator, fleet, setup)
    async with client_of(at) as client:
        asked = asking("Say hello.", system="Be brief.", tools=[TOOL])
        del asked["max_tokens"]
        counted = await client.messages.count_tokens(**asked)
        whole = await client.messages.create(**asked, max_tokens=5)
    assert counted.input_tokens == whole.usage.input_tokens > 0


@pytest.mark.parametrize("setup", SETUPS)
async def test_raw_headers_can_be_read(coordinator, fleet, setup):
    """H19."""
    at = await started(coordinator, fleet, setup)
    async with client_of(at) as client:
        raw = await client.messages.with_raw_response.create(
            **asking("Say hello.", **NO_THOUGHT), extra_headers={"X-Request-Id": "ask-7"}
        )
        assert (raw.status_code, raw.headers["x-request-id"]) == (200, "ask-7")
        assert blocks(await raw.parse()) == ["Hello! How can I help you today?"]


@pytest.mark.parametrize("setup", SETUPS)
async def test_the_headers_of_the_client_reach_every_leg(coordinator, fleet, setup):
    at = await started(coordinator, fleet, setup)
    async with client_of(at) as client:
        await client.messages.create(**asking("Say hello.", **NO_THOUGHT))
    legs = [leg for worker in fleet.workers for leg in worker.received if leg.header("x-request-id")]
    assert [leg.header("authorization") for leg in legs] == ["Bearer key-1"] * 3
    assert all(leg.header("anthropic-version") for leg in legs)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("setup", SETUPS)
async def test_a_mistake_is_the_sdks_error_of_its_status(coordinator, fleet, setup, stream):
    """V12: in Anthropic's shape, whoever refuses."""
    at = await started(coordinator, fleet, setup)
    async with client_of(at) as client:
        create: Any = client.messages.create
        with pytest.raises(anthropic.NotFoundError) as missing:
            await create(**asking("x", model="nope"), stream=stream)
        with pytest.raises(anthropic.BadRequestError) as bad:
            await create(**asking("x", extra_body={"temperature": 3}), stream=stream)
        with pytest.raises(anthropic.BadRequestError) as ours:
            await create(**asking("x", max_tokens=0), stream=stream)
        with pytest.raises(anthropic.BadRequestError):
            await client.messages.count_tokens(model="tiny", messages="x")  # type: ignore[arg-type]
    kinds = {"not_found_error": missing, "invalid_request_error": bad}
    for kind, raised in {**kinds, "invalid_request_error ": ours}.items():
        body: Any = raised.value.body
        assert (body["type"], body["error"]["type"]) == ("error", kind.strip())
        assert body["error"]["message"]
    assert "The model `nope` does not exist." in str(missing.value)
    assert "temperature" in str(bad.value)
    assert "max_tokens" in str(ours.value)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (403, anthropic.PermissionDeniedError),
        (422, anthropic.UnprocessableEntityError),
        (429, anthropic.RateLimitError),
        (500, anthropic.InternalServerError),
        (503, anthropic.InternalServerError),
    ],
)
async def test_a_workers_failure_is_the_sdks_error_of_its_status(coordinator, fleet, status, kind, stream):
    at = await coordinator(fleet, "alone")
    fleet.decode.behave.fault = Fault(canned=Canned(status, "<html>no</html>", (), "text/html"))
    async with client_of(at) as client:
        with pytest.raises(kind) as failed:
            await client.messages.create(**asking("x"), stream=stream)
    assert failed.value.status_code == (502 if status == 500 else status)
    assert failed.value.body["type"] == "error"


@pytest.mark.parametrize("setup", SETUPS)
async def test_a_key_that_a_worker_refuses_is_an_authentication_error(coordinator, fleet_of, setup):
    fleet = await fleet_of(settings=Settings(api_key="another"))
    shape, steps = SETUPS[setup]
    at = await coordinator(fleet, shape, steps=steps, ready=False)
    async with client_of(at) as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(**asking("x"))


@pytest.mark.parametrize(
    "fault", [Fault(error_after=6), Fault(die_after=6), Fault(end_after=6), Fault(half_event_after=6)]
)
@pytest.mark.parametrize("setup", STREAMED)
async def test_a_stream_that_breaks_raises_and_what_came_before_was_given(coordinator, fleet, setup, fault):
    """B1, S11, S40: by an error event of that API's own kind."""
    at = await started(coordinator, fleet, setup)
    fleet.decode.behave.next(fault)
    kinds: list[str] = []
    async with client_of(at) as client:
        stream = await client.messages.create(**asking("Count to 20.", **NO_THOUGHT), stream=True)
        with pytest.raises(anthropic.APIError):
            async for event in stream:
                kinds.append(event.type)
    assert "content_block_delta" in kinds
    assert "message_stop" not in kinds


@pytest.mark.parametrize("setup", SETUPS)
async def test_the_synchronous_client_is_served_alike(coordinator, fleet, setup):
    at = await started(coordinator, fleet, setup)

    def talk() -> tuple[list[Any], str]:
        with anthropic.Anthropic(base_url=at.url, api_key="key-1", max_retries=0, timeout=HANG_S) as client:
            whole = blocks(client.messages.create(**asking("Say hello in French.", **NO_THOUGHT)))
            with client.messages.stream(**asking("Say hello in French.", **NO_THOUGHT)) as stream:
                streamed = "".join(stream.text_stream)
            return whole, streamed

    async with asyncio.timeout(HANG_S):
        assert await asyncio.to_thread(talk) == ([HELLO], HELLO)
