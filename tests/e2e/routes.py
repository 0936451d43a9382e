"""One question on each of the five routes, whole or streamed, by the SDK that users have for it.

Below: what holds of a pair of workers on each of them, and with data-parallel ranks, whatever their connector is.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, NamedTuple

import anthropic
import pytest

from tests.bounds import HANG_S
from tests.e2e.conversations import CONVERSATIONS
from tests.e2e.pairs import Taken, at_rest, by_rank, until
from tests.e2e.servers import MODEL_NAME
from tests.e2e.wire import post

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.conftest import Coordinator, Pair
    from tests.e2e.servers import Process

TALK = CONVERSATIONS["accents"]
# Thinking is on unless the template is told otherwise, which only chat has a field for.
_QUIET = {"chat_template_kwargs": {"enable_thinking": False}}


class Told(NamedTuple):
    """What was answered, and the length of the prompt."""

    text: str
    prompt_tokens: int


def chat(front: Coordinator, worker: Process, stream: bool) -> Told:
    create, asked = front.sdk.chat.completions.create, TALK.ask()
    if not stream:
        answer = create(**asked)
        return Told(answer.choices[0].message.content, answer.usage.prompt_tokens)
    *chunks, last = create(**asked, stream=True, stream_options={"include_usage": True})
    return Told("".join(chunk.choices[0].delta.content or "" for chunk in chunks), last.usage.prompt_tokens)


def completions(front: Coordinator, worker: Process, stream: bool) -> Told:
    rendered = render(worker)
    asked = {"model": MODEL_NAME, "prompt": rendered["token_ids"], "temperature": 0, "max_tokens": 600}
    asked |= {"extra_body": {"cache_salt": uuid.uuid4().hex}}
    if not stream:
        answer = front.sdk.completions.create(**asked)
        return Told(answer.choices[0].text, answer.usage.prompt_tokens)
    *chunks, last = front.sdk.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    return Told("".join(chunk.choices[0].text for chunk in chunks), last.usage.prompt_tokens)


def responses(front: Coordinator, worker: Process, stream: bool) -> Told:
    asked = {"model": MODEL_NAME, "input": TALK.request["messages"], "temperature": 0, "store": False}
    asked |= {"extra_body": _QUIET | {"cache_salt": uuid.uuid4().hex}}
    if stream:
        answer = list(front.sdk.responses.create(**asked, stream=True))[-1].response
    else:
        answer = front.sdk.responses.create(**asked)
    return Told(answer.output_text, answer.usage.input_tokens)


def messages(front: Coordinator, worker: Process, stream: bool) -> Told:
    asked = {"model": MODEL_NAME, "max_tokens": 600, "messages": TALK.request["messages"]}
    asked |= {"extra_body": _QUIET | {"temperature": 0, "cache_salt": uuid.uuid4().hex}}
    with anthropic.Anthropic(base_url=front.url, api_key="none", max_retries=0, timeout=HANG_S) as sdk:
        if stream:
            with sdk.messages.stream(**asked) as events:
                answer = events.get_final_message()
        else:
            answer = sdk.messages.create(**asked)
    used = answer.usage
    # Each token of the prompt is counted in one of the three; what came from prefill is read from a cache.
    tokens = used.input_tokens + (used.cache_read_input_tokens or 0) + (used.cache_creation_input_tokens or 0)
    return Told("".join(block.text for block in answer.content), tokens)


def generate(front: Coordinator, worker: Process, stream: bool) -> Told:
    rendered = render(worker)
    answer = post(f"{front.url}/inference/v1/generate", rendered | {"output_mode": "text", "stream": stream})
    assert answer.status == 200, answer.raw
    answers = answer.events if stream else [answer.body]
    text = "".join(choice["text"] for each in answers for choice in each["choices"])
    return Told(text, len(rendered["token_ids"]))


def render(worker: Process) -> dict:
    """Return the question in tokens, by a worker's own render route."""
    return post(f"{worker.url}/v1/chat/completions/render", TALK.body()).body


ROUTES: dict[str, Callable[[Coordinator, Process, bool], Told]] = {
    "chat": chat,
    "completions": completions,
    "responses": responses,
    "messages": messages,
    "generate": generate,
}


def each_route(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test with each ``route``, with ``stream`` and without."""
    test = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])(test)
    return pytest.mark.parametrize("route", ROUTES)(test)


def check_whole_prompt_is_taken(front: Coordinator, pair: Pair, route: str, stream: bool) -> None:
    """Expect an answer to a prompt of which decode has computed nothing, and neither worker to hold anything then."""
    taken = Taken(pair.decode)
    told = ROUTES[route](front, pair.decode, stream)
    assert told.text.strip("\n") == TALK.expect["content"]
    taken.check(told.prompt_tokens)
    until(lambda: at_rest(*pair), "nothing is left")


async def prompts_of_ranks(front: Coordinator, pair: Pair) -> tuple[list[float], list[float]]:
    """Ask 16 times at once of workers with two ranks each; expect right answers, and each prompt to be taken.

    Each client names a rank that no worker has.

    Returns:
        The part of the prompt tokens that each rank of prefill has computed, and that each of decode has taken.
    """
    nowhere = {"X-data-parallel-rank": "7"}
    for worker in pair:
        assert post(f"{worker.url}/v1/chat/completions", TALK.body(), nowhere).status == 400
    await asyncio.to_thread(until, lambda: at_rest(*pair), "nothing is left of other tests")
    taken, before = Taken(pair.decode), _counted(pair)
    async with front.async_sdk() as sdk:
        asked = [sdk.chat.completions.create(**TALK.ask(extra_headers=nowhere)) for _ in range(16)]
        answers = await asyncio.gather(*asked)
    for answer in answers:
        assert answer.choices[0].message.content.strip("\n") == TALK.expect["content"]
    tokens = sum(answer.usage.prompt_tokens for answer in answers)
    taken.check(tokens)
    await asyncio.to_thread(until, lambda: at_rest(*pair), "nothing is left")
    computed, came = (
        [(count - then) / tokens for count, then in zip(counts, old, strict=True)]
        for counts, old in zip(_counted(pair), before, strict=True)
    )
    assert sum(computed) == sum(came) == 1
    return computed, came


def _counted(pair: Pair) -> tuple[list[float], list[float]]:
    return by_rank(pair.prefill, "local_compute"), by_rank(pair.decode, "external_kv_transfer")
