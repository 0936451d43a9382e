"""Decode takes the prompt's KV blocks from prefill, whoever asks and however, and nothing is left behind on prefill."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from typing import TYPE_CHECKING

import pytest

from tests.bounds import HANG_S
from tests.e2e.conversations import CONVERSATIONS, conversation, joined, said
from tests.e2e.servers import MODEL_NAME
from tests.e2e.wire import Metrics, post, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import openai

    from tests.e2e.conftest import Coordinator, Workers
    from tests.e2e.conversations import Conversation
    from tests.e2e.lineups import Lineup

pytestmark = pytest.mark.e2e


def prompt(words: int) -> Conversation:
    """Return a conversation of about so many prompt tokens."""
    content = " ".join(itertools.islice(itertools.cycle(("window", "yellow", "garden")), words))
    request = {
        "messages": [{"role": "user", "content": content}],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    return conversation("Say hello.")._replace(request=request)


LONG_PROMPT = prompt(3600)


@pytest.fixture
def pulled(workers: Workers) -> Callable[[int], None]:
    """Assert that decode has since taken so many prompt tokens from prefill, and computed none."""
    before = Metrics(workers.decode.url)

    def check(tokens: int) -> None:
        def taken() -> float:
            now = Metrics(workers.decode.url)
            return now.prompt_tokens("external_kv_transfer") - before.prompt_tokens("external_kv_transfer")

        wait_until(lambda: taken() >= tokens, HANG_S, f"decode takes {tokens} prompt tokens from prefill")
        assert taken() == tokens
        after = Metrics(workers.decode.url)
        for source in ("local_compute", "local_cache_hit"):
            assert after.prompt_tokens(source) == before.prompt_tokens(source)
        assert after.total("vllm:nixl_bytes_transferred_sum") > before.total("vllm:nixl_bytes_transferred_sum")

    return check


@pytest.fixture
def nothing_left(workers: Workers) -> Iterator[None]:
    """Prefill's blocks are free again after the test, and none had to wait for the end of its lease (30 s)."""
    # What an earlier test left, on purpose or not, is not this one's.
    wait_until(lambda: at_rest(workers), HANG_S, "nothing was left before")
    before = Metrics(workers.prefill.url).leases_ended
    yield
    wait_until(lambda: Metrics(workers.prefill.url).kv_usage == 0, HANG_S, "prefill holds no block")
    wait_until(lambda: Metrics(workers.decode.url).running == 0, HANG_S, "decode runs no request")
    assert Metrics(workers.prefill.url).leases_ended == before


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_decode_computes_no_token_of_the_prompt(
    front: Coordinator, pulled: Callable[[int], None], stream: bool
) -> None:
    asked = CONVERSATIONS["tool result"].ask(stream=stream)
    if stream:
        chunks = front.sdk.chat.completions.create(**asked, stream_options={"include_usage": True})
        usage = list(chunks)[-1].usage
    else:
        usage = front.sdk.chat.completions.create(**asked).usage
    assert usage.prompt_tokens_details.cached_tokens == 0
    pulled(usage.prompt_tokens)


@pytest.mark.usefixtures("nothing_left")
def test_completions_too_take_the_prompt_from_prefill(front: Coordinator, pulled: Callable[[int], None]) -> None:
    answer = front.sdk.completions.create(
        model=MODEL_NAME, prompt="Say hello. " * 20, temperature=0, extra_body={"cache_salt": uuid.uuid4().hex}
    )
    pulled(answer.usage.prompt_tokens)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_generate_client_gets_the_answer_in_the_mode_it_asked_for(
    front: Coordinator, workers: Workers, pulled: Callable[[int], None], stream: bool
) -> None:
    talk = CONVERSATIONS["japanese"]
    rendered = post(f"{workers.render.url}/v1/chat/completions/render", talk.body()).body
    answer = post(f"{front.url}/inference/v1/generate", rendered | {"output_mode": "text", "stream": stream})

    assert answer.status == 200
    answers = answer.events if stream else [answer.body]
    assert {a["output_mode"] for a in answers} == {"text"}
    text = "".join(choice["text"] for a in answers for choice in a["choices"])
    assert text == talk.expect["text"]
    pulled(len(rendered["token_ids"]))


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    "extra",
    [
        {"kv_transfer_params": {"do_remote_prefill": True}, "ec_transfer_params": {"x": {}}},
        {
            "kv_transfer_params": {
                "do_remote_prefill": True,
                "remote_host": "192.0.2.1",
                "remote_port": 9,
                "remote_block_ids": [[1]],
            }
        },
        {"kv_transfer_params": {"do_remote_decode": True}},
        {"kv_transfer_params": {"prompt_token_ids": [1, 2, 3]}},
        {"vllm_xargs": {"kv_transfer_params": "x"}},
    ],
    ids=["half a hand-over", "another host", "prefill's own", "another prompt", "in vllm_xargs"],
)
def test_transfer_params_of_a_client_reach_no_worker(
    front: Coordinator, lineup: Lineup, workers: Workers, extra: dict
) -> None:
    """The first of these ends the engine of a worker that gets it."""
    talk = CONVERSATIONS["plain"]
    answer = front.sdk.chat.completions.create(**talk.ask(extra_body=extra))
    (choice,) = answer.choices
    assert said(choice.message, choice.finish_reason) == talk.answer(parsed=lineup.parsed)
    assert workers.decode.alive
    assert workers.prefill.alive


@pytest.mark.usefixtures("nothing_left")
def test_transfer_params_of_a_generate_client_reach_no_worker(front: Coordinator, workers: Workers) -> None:
    rendered = post(f"{workers.render.url}/v1/chat/completions/render", CONVERSATIONS["plain"].body()).body
    params = {"do_remote_prefill": True}
    rendered["sampling_params"]["extra_args"] = {"kv_transfer_params": params}
    asked = rendered | {"kv_transfer_params": params, "output_mode": "text"}
    answer = post(f"{front.url}/inference/v1/generate", asked)
    assert answer.status == 200, answer.raw
    assert answer.body["choices"][0]["text"] == CONVERSATIONS["plain"].expect["text"]
    assert workers.decode.alive


@pytest.mark.usefixtures("nothing_left")
async def test_clients_may_share_a_request_id(front: Coordinator, lineup: Lineup) -> None:
    """Eight at once, two prompts, one id: each gets its own answer, and the id back."""
    talks = [CONVERSATIONS["plain"], CONVERSATIONS["accents"]] * 4
    async with front.async_sdk() as sdk:
        create = sdk.chat.completions.with_raw_response.create
        header = {"X-Request-Id": "same-id"}
        answers = await asyncio.gather(*(create(**talk.ask(extra_headers=header)) for talk in talks))
    for talk, answer in zip(talks, answers, strict=True):
        assert answer.headers["X-Request-Id"] == "same-id"
        choice = answer.parse().choices[0]
        assert said(choice.message, choice.finish_reason) == talk.answer(parsed=lineup.parsed)


@pytest.mark.usefixtures("nothing_left")
async def test_sixteen_at_once_are_all_right(front: Coordinator, lineup: Lineup) -> None:
    """Whole and streamed, each with a prompt of its own: wrong blocks would show in the text."""
    talks = list(CONVERSATIONS.values())[:16]

    async def whole(talk) -> object:
        choice = (await sdk.chat.completions.create(**talk.ask())).choices[0]
        return said(choice.message, choice.finish_reason)

    async def streamed(talk) -> object:
        return joined([chunk async for chunk in await sdk.chat.completions.create(**talk.ask(stream=True))])[0]

    async with front.async_sdk() as sdk:
        got = await asyncio.gather(*((whole, streamed)[i % 2](talk) for i, talk in enumerate(talks)))
    assert got == [talk.answer(parsed=lineup.parsed) for talk in talks]


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_who_leaves_during_decode_stops_it(front: Coordinator, workers: Workers, stream: bool) -> None:
    """The worker stands still while its client leaves, so that it cannot come to the end of its answer before."""
    tokens = 3000
    never = conversation("Never stop.").ask(max_tokens=tokens, stream=stream)
    before = Metrics(workers.decode.url).steps
    async with front.async_sdk() as sdk, asyncio.TaskGroup() as group:
        asking = group.create_task(begin(sdk, never))
        decoding = lambda: Metrics(workers.decode.url).running > 0  # noqa: E731
        await asyncio.to_thread(wait_until, decoding, HANG_S, "decode runs the request")
        workers.decode.pause()
        try:
            asking.cancel()
            await asyncio.to_thread(wait_until, lambda: not in_flight(front), HANG_S, "the coordinator is done with it")
        finally:
            workers.decode.go_on()
    wait_until(lambda: Metrics(workers.decode.url).running == 0, HANG_S, "decode runs no request")
    assert Metrics(workers.decode.url).steps - before < tokens


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("after_s", [0.02, 0.1, 0.2, 0.3, 0.4])
async def test_a_client_may_leave_at_any_moment(
    front: Coordinator, workers: Workers, stream: bool, after_s: float
) -> None:
    """During render, during prefill, as its answer comes, or during decode: no block is left to wait for its lease.

    A prefill that ends in the milliseconds in which its connection is closed can tell nobody what it holds. Such a
    moment does not come three times in a row.
    """
    asked = LONG_PROMPT.ask(max_tokens=300, stream=stream, extra_body={"ignore_eos": True})

    async def leave() -> float:
        """Return how many leases ended for it."""
        before = Metrics(workers.prefill.url).leases_ended
        async with front.async_sdk() as sdk, asyncio.TaskGroup() as group:
            asking = group.create_task(read(sdk, asked))
            await asyncio.sleep(after_s)
            asking.cancel()
        await asyncio.to_thread(wait_until, lambda: not in_flight(front), HANG_S, "the coordinator is done with it")
        await asyncio.to_thread(wait_until, lambda: at_rest(workers), HANG_S, "nothing is left")
        return Metrics(workers.prefill.url).leases_ended - before

    await asyncio.to_thread(wait_until, lambda: at_rest(workers), HANG_S, "nothing is left of other tests")
    ended = [await leave()]
    while ended[-1] and len(ended) < 3:
        ended.append(await leave())
    assert ended[-1] == 0, ended


async def test_after_a_hundred_clients_have_left_nothing_is_held(front: Coordinator, workers: Workers) -> None:
    """They come within two seconds and leave after up to two: while they wait, in between legs, and during decode."""
    asked = [prompt(150).ask(max_tokens=300, stream=s, extra_body={"ignore_eos": True}) for s in [False, True] * 50]

    async def leave(one: dict, after_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(after_s):
                await read(sdk, one)

    async with front.async_sdk() as sdk, asyncio.TaskGroup() as group:
        for i, one in enumerate(asked):
            group.create_task(leave(one, 0.05 + i * 37 % 100 / 50))
            await asyncio.sleep(0.02)

    await asyncio.to_thread(wait_until, lambda: at_rest(workers), HANG_S, "nothing is left")
    (choice,) = front.sdk.chat.completions.create(**CONVERSATIONS["plain"].ask()).choices
    assert choice.finish_reason == "stop"
    assert workers.prefill.alive and workers.decode.alive


def at_rest(workers: Workers) -> bool:
    return all(Metrics(worker.url).at_rest for worker in (workers.prefill, workers.decode))


def in_flight(front: Coordinator) -> float:
    """Return how many requests are under way; a hand-over that one left may still be fetched by a leg of its own."""
    return Metrics(front.url).total("coordinator_requests_in_flight")


async def read(sdk: openai.AsyncOpenAI, asked: dict) -> None:
    answer = await sdk.chat.completions.create(**asked)
    if asked["stream"]:
        async for _ in answer:
            pass


async def begin(sdk: openai.AsyncOpenAI, asked: dict) -> None:
    """Ask, and read no chunk of a stream: thousands of them would leave the interpreter no time for other threads."""
    async with await sdk.chat.completions.create(**asked):
        await asyncio.Event().wait()
