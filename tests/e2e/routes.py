"""One question on each of the five routes, whole or streamed, by the SDK that users have for it."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, NamedTuple

import anthropic

from tests.bounds import HANG_S
from tests.e2e.conversations import CONVERSATIONS
from tests.e2e.servers import MODEL_NAME
from tests.e2e.wire import post

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.conftest import Coordinator
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
