"""Mooncake: both legs in flight, over TCP. Last come what decode keeps room for, and a prefill that is lost."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import openai
import pytest

from tests.e2e.conftest import VLLM_VERSION, Pair
from tests.e2e.conversations import conversation
from tests.e2e.lineups import LINEUPS
from tests.e2e.pairs import RANKS, at_rest, until
from tests.e2e.routes import TALK, chat, check_whole_prompt_is_taken, each_route, prompts_of_ranks
from tests.e2e.test_kv_transfer import prompt, read
from tests.e2e.wire import Metrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.conftest import Coordinator
    from tests.e2e.servers import Process

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(VLLM_VERSION == "0.32", reason="held against vLLM 0.33 alone"),
]

# A prompt between the two is refused by prefill alone.
PREFILL_LEN = 2048


@pytest.fixture(scope="module")
def mooncake(start_for_module: Callable[..., list[Process]]) -> Pair:
    small = ("prefill", {"max_model_len": str(PREFILL_LEN)})
    return Pair(*start_for_module(small, "decode", connector="MooncakeConnector", **RANKS))


@pytest.fixture(params=["openai", "text"])
def lineup(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def front(coordinator: Callable[[dict], Coordinator], mooncake: Pair, lineup: str) -> Coordinator:
    return coordinator(config(mooncake, lineup))


def config(pair: Pair, lineup: str, **pipeline: str) -> dict:
    """Return a line-up with both legs in one step, and these keys of its pipeline; decode renders too."""
    made = LINEUPS[lineup].config(pair.decode.url, pair.prefill.url, pair.decode.url, kv_connector="kv-mooncake")
    # A new connection for each leg: a worker that was paused closes those it has kept for 5 s before it reads on.
    made["pools"]["prefill"] |= {"bootstrap_port": pair.prefill.side_port, "idle_conn_timeout": "1ms"}
    *before, _, decode = made["pipeline"]["steps"]
    made["pipeline"]["steps"] = [*before, decode | {"type": "prefill-decode"}]
    made["pipeline"] |= pipeline
    return made


@each_route
def test_decode_takes_the_whole_prompt_from_prefill(
    front: Coordinator, mooncake: Pair, route: str, stream: bool
) -> None:
    check_whole_prompt_is_taken(front, mooncake, route, stream)


async def test_prefill_is_told_the_rank_whose_engine_decode_asks(front: Coordinator, mooncake: Pair) -> None:
    """By turns: each attempt names one of them to prefill, and its engine to decode, whose own rank is any."""
    computed, taken = await prompts_of_ranks(front, mooncake)
    assert computed == [0.5, 0.5]
    assert all(taken)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_who_leaves_before_prefill_has_ended_leaves_nothing(
    front: Coordinator, mooncake: Pair, stream: bool
) -> None:
    """Prefill is paused, and decode keeps room for its blocks: only when they come can it be free."""
    chat(front, mooncake.decode, stream)  # so that the engine behind the bootstrap server is known
    mooncake.prefill.pause()
    try:
        async with front.async_sdk() as sdk, asyncio.TaskGroup() as group:
            asking = group.create_task(read(sdk, TALK.ask(stream=stream)))
            waits = lambda: Metrics(mooncake.decode.url).waiting == 1  # noqa: E731
            await asyncio.to_thread(until, waits, "decode waits for the blocks")
            asking.cancel()
        gone = lambda: Metrics(mooncake.decode.url).waiting == 0  # noqa: E731
        await asyncio.to_thread(until, gone, "decode waits no more")
        assert Metrics(mooncake.decode.url).kv_usage > 0
    finally:
        mooncake.prefill.go_on()
    await asyncio.to_thread(until, lambda: at_rest(*mooncake), "nothing is left")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_who_leaves_during_decode_stops_it(front: Coordinator, mooncake: Pair, stream: bool) -> None:
    asked = conversation("Never stop.").ask(max_tokens=1500, stream=stream)
    async with front.async_sdk() as sdk, asyncio.TaskGroup() as group:
        asking = group.create_task(read(sdk, asked))
        decoding = lambda: Metrics(mooncake.decode.url).running == 1  # noqa: E731
        await asyncio.to_thread(until, decoding, "decode runs the request")
        asking.cancel()
    await asyncio.to_thread(until, lambda: at_rest(*mooncake), "nothing is left")


def test_a_prompt_that_prefill_refuses_is_answered_with_its_refusal(front: Coordinator, mooncake: Pair) -> None:
    """Decode would wait for blocks that never come."""
    with pytest.raises(openai.BadRequestError) as refused:
        front.sdk.chat.completions.create(**prompt(PREFILL_LEN + 500).ask(max_tokens=8))
    assert str(PREFILL_LEN) in refused.value.message
    until(lambda: Metrics(mooncake.decode.url).waiting == 0, "decode waits no more")
    told = chat(front, mooncake.decode, False)
    assert told.text.strip("\n") == TALK.expect["content"]


async def test_a_prefill_worker_that_dies_beside_decode_costs_its_request_or_nothing(
    coordinator: Callable[[dict], Coordinator], mooncake: Pair
) -> None:
    """Decode waits for the blocks of both requests when prefill is killed, and its bootstrap server with it."""
    strict = coordinator(config(mooncake, "text"))
    lenient = coordinator(config(mooncake, "text", on_prefill_failure="decode_alone"))
    for front in (strict, lenient):
        chat(front, mooncake.decode, False)  # so that the engine behind the bootstrap server is known
    mooncake.prefill.pause()
    async with strict.async_sdk() as one, lenient.async_sdk() as other:
        asking = [asyncio.create_task(sdk.chat.completions.create(**TALK.ask())) for sdk in (one, other)]
        try:
            waits = lambda: Metrics(mooncake.decode.url).waiting == 2  # noqa: E731
            await asyncio.to_thread(until, waits, "decode waits for the blocks of both")
        finally:
            mooncake.prefill.kill()
        lost, answer = await asyncio.gather(*asking, return_exceptions=True)

    assert isinstance(lost, openai.InternalServerError)
    assert "prefill" in lost.message
    assert not isinstance(answer, BaseException), answer
    assert answer.choices[0].message.content.strip("\n") == TALK.expect["content"]
    with pytest.raises(openai.InternalServerError, match="prefill"):
        chat(strict, mooncake.decode, False)
    assert chat(lenient, mooncake.decode, True).text.strip("\n") == TALK.expect["content"]
    seen = lambda: Metrics(mooncake.decode.url)  # noqa: E731
    await asyncio.to_thread(until, lambda: seen().running == seen().waiting == 0, "decode is done with all of them")
    assert mooncake.decode.alive
