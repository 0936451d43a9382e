"""What vLLM refuses reaches the SDK as vLLM's own error: its class, its status and its message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.e2e.conversations import CONVERSATIONS
from tests.e2e.wire import Metrics

if TYPE_CHECKING:
    from tests.e2e.conftest import Coordinator, Workers

pytestmark = pytest.mark.e2e

PLAIN = CONVERSATIONS["plain"]

# What prefill's capped body would hide until decode is found here, before any worker is asked, in words of our own.
OURS: dict[str, tuple[dict[str, Any], str]] = {
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens"),
    "max_tokens -1": ({"max_tokens": -1}, "max_tokens"),
    "max_completion_tokens 0": ({"max_completion_tokens": 0}, "max_completion_tokens"),
    "min_tokens over max_tokens": ({"max_tokens": 3, "extra_body": {"min_tokens": 9}}, "min_tokens"),
    "cache_salt": ({"extra_body": {"cache_salt": "a" * 1025}}, "cache_salt"),
    "top_logprobs alone": ({"top_logprobs": 2}, "top_logprobs"),
}
WORKERS: dict[str, tuple[dict[str, Any], str]] = {
    "more tokens than the context": ({"max_tokens": 4097}, "cannot be greater than max_model_len=4096"),
    "temperature": ({"temperature": 2.1}, "temperature must be in [0, 2], got 2.1."),
    "top_p": ({"top_p": 0}, "top_p must be in (0, 1], got 0.0."),
    "n of a greedy request": ({"n": 2}, "n must be 1 when using greedy sampling, got 2."),
    "an empty stop string": ({"stop": [""]}, "stop cannot contain an empty string."),
    "logit_bias": ({"logit_bias": {"99999": 1}}, "token_id(s) [99999] in logit_bias contain out-of-vocab token ids."),
    "a schema error": ({"extra_body": {"seed": "many"}}, "body.seed"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("case", OURS)
def test_what_prefill_would_hide_is_refused_before_it(
    front: Coordinator, workers: Workers, case: str, stream: bool
) -> None:
    fields, param = OURS[case]
    prefilled = Metrics(workers.prefill.url).total("vllm:request_success_total")
    with pytest.raises(openai.BadRequestError) as refused:
        front.sdk.chat.completions.create(**PLAIN.ask(stream=stream, **fields))
    assert refused.value.param == param
    assert param in refused.value.message
    assert Metrics(workers.prefill.url).total("vllm:request_success_total") == prefilled


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("case", WORKERS)
def test_what_a_worker_refuses_is_a_bad_request_in_its_words(front: Coordinator, case: str, stream: bool) -> None:
    """A streamed request too gets a status, also where vLLM finds the mistake only after it began to answer."""
    fields, message = WORKERS[case]
    with pytest.raises(openai.BadRequestError) as refused:
        front.sdk.chat.completions.create(**PLAIN.ask(stream=stream, **fields))
    assert message in refused.value.message
    assert refused.value.body["code"] == 400


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_unknown_model_is_not_found(front: Coordinator, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        front.sdk.chat.completions.create(**PLAIN.ask(model="gpt-0", stream=stream))
    assert "The model `gpt-0` does not exist." in refused.value.message
    assert refused.value.type == "NotFoundError"
    assert refused.value.param == "model"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_prompt_longer_than_the_context_is_a_bad_request(front: Coordinator, stream: bool) -> None:
    messages = [{"role": "user", "content": "word " * 5000}]
    with pytest.raises(openai.BadRequestError) as refused:
        front.sdk.chat.completions.create(**PLAIN.ask(messages=messages, stream=stream))
    assert "This model's maximum context length is 4096 tokens." in refused.value.message


def test_refusals_leave_the_workers_in_service(front: Coordinator, workers: Workers) -> None:
    """A client's mistakes are not the worker's: more of them than any breaker allows, and the next request works."""
    for _ in range(30):
        with pytest.raises(openai.BadRequestError):
            front.sdk.chat.completions.create(**PLAIN.ask(max_tokens=0))
    answer = front.sdk.chat.completions.create(**PLAIN.ask())
    assert answer.choices[0].finish_reason == "stop"
    assert workers.prefill.alive
    assert workers.decode.alive
