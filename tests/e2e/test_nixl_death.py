"""Real workers that are lost with NIXL hand-overs on their way: those that are left hold nothing, and answer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import openai
import pytest

from tests.bounds import HANG_S
from tests.e2e.conftest import VLLM_VERSION, Pair
from tests.e2e.conversations import CONVERSATIONS, conversation, said
from tests.e2e.pairs import RANKS
from tests.e2e.routes import prompts_of_ranks
from tests.e2e.test_kv_transfer import prompt
from tests.e2e.wire import Metrics, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.conftest import Coordinator, Workers
    from tests.e2e.servers import Process

pytestmark = pytest.mark.e2e

PLAIN = CONVERSATIONS["plain"]


@pytest.fixture(scope="module")
def doomed(start_vllm: Callable[..., list[Process]]) -> Pair:
    """Two ranks each. The tests lose both workers, prefill first."""
    return Pair(*start_vllm("prefill", "decode", **RANKS))


def config(prefill: list[str], decode: list[str]) -> dict:
    pools = {"prefill": {"endpoints": prefill}, "decode": {"endpoints": decode}}
    return {"pools": pools, "pipeline": {"kv_connector": "kv-nixl", "steps": [{"type": "prefill"}, {"type": "decode"}]}}


@pytest.mark.skipif(VLLM_VERSION == "0.32", reason="held against vLLM 0.33 alone")
async def test_decode_of_any_rank_finds_the_rank_of_prefill_that_has_its_blocks(
    coordinator: Callable[[dict], Coordinator], doomed: Pair
) -> None:
    """The hand-over names it; nobody is told which to be, and each worker spreads what comes at once."""
    front = coordinator(config([doomed.prefill.url], [doomed.decode.url]))
    computed, taken = await prompts_of_ranks(front, doomed)
    assert all(computed)
    assert all(taken)


async def test_a_prefill_worker_that_dies_between_the_legs_costs_its_own_request_alone(
    coordinator: Callable[[dict], Coordinator], doomed: Pair, workers: Workers
) -> None:
    """Decode is paused, so both hand-overs are on their way to it when one of their prefill workers is killed."""
    front = coordinator(config([doomed.prefill.url, workers.prefill.url], [doomed.decode.url]))
    await asyncio.to_thread(wait_until, lambda: Metrics(workers.prefill.url).at_rest, HANG_S, "prefill is free before")
    doomed.decode.pause()
    async with front.async_sdk() as sdk:
        try:
            asked = [prompt(150 + i).ask(max_tokens=8, extra_body={"ignore_eos": True}) for i in range(2)]
            asking = [asyncio.create_task(sdk.chat.completions.create(**one)) for one in asked]
            await asyncio.to_thread(wait_until, lambda: decoding(front) == 2, HANG_S, "decode has been asked for both")
            doomed.prefill.kill()
        finally:
            doomed.decode.go_on()
        ends = await asyncio.gather(*asking, return_exceptions=True)

    (lost,) = [end for end in ends if isinstance(end, BaseException)]
    assert isinstance(lost, openai.InternalServerError)
    assert "decode" in lost.message
    await asyncio.to_thread(at_rest_and_well, front, doomed.decode, workers.prefill)


def test_a_decode_worker_that_dies_in_its_streams_leaves_nothing_on_prefill(
    coordinator: Callable[[dict], Coordinator], doomed: Pair, workers: Workers
) -> None:
    """Two streams, one on each decode worker: the one that is lost is an error, and the other goes on."""
    front = coordinator(config([workers.prefill.url], [doomed.decode.url, workers.decode.url]))
    never = conversation("Never stop.").ask(max_tokens=3000, stream=True)
    streams = [front.sdk.chat.completions.create(**never) for _ in range(2)]
    for stream in streams:
        next(stream)

    doomed.decode.kill()

    # To their ends: what came before the loss is still given on.
    ends = [ended(stream) for stream in streams]
    assert sorted(ends) == ["broken", "length"]
    at_rest_and_well(front, workers.prefill, workers.decode)


def ended(stream: openai.Stream) -> str:
    """Read a stream to its end; return the finish reason, or "broken"."""
    try:
        return [chunk.choices[0].finish_reason for chunk in stream][-1]
    except openai.APIError:
        return "broken"


def decoding(front: Coordinator) -> float:
    return Metrics(front.url).total("coordinator_legs_in_flight", role="decode")


def at_rest_and_well(front: Coordinator, *left: Process) -> None:
    """Say that the workers that are left hold nothing, and that each request is answered by one of them."""
    for worker in left:
        wait_until(lambda worker=worker: Metrics(worker.url).at_rest, HANG_S, f"{worker.name} holds nothing")
        assert worker.alive
    for _ in range(4):
        (choice,) = front.sdk.chat.completions.create(**PLAIN.ask()).choices
        assert said(choice.message, choice.finish_reason) == PLAIN.answer(parsed=True)
