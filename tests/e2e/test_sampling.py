"""The fields that shape an answer have the meaning that vLLM gives them, in both wire formats."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.conversations import CONVERSATIONS, conversation, joined, said
from tests.e2e.servers import MODEL_NAME
from tests.e2e.wire import post

if TYPE_CHECKING:
    from tests.e2e.conftest import Coordinator, Workers
    from tests.e2e.lineups import Lineup

pytestmark = pytest.mark.e2e

COUNT = CONVERSATIONS["numbers"]
STOP = conversation("Say stop in the middle.")
NEVER = conversation("Never stop.")
# The chat prompt of COUNT, as the template writes it.
RAW_PROMPT = "<|im_start|>user\nCount to twenty.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.mark.parametrize("cap", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("tokens", [1, 16])
def test_the_cap_is_kept_to_the_token(front: Coordinator, cap: str, tokens: int) -> None:
    """16 is the engine's default, which vLLM's render leaves out."""
    asked = NEVER.ask()
    del asked["max_tokens"]
    answer = front.sdk.chat.completions.create(**asked, **{cap: tokens})
    assert answer.usage.completion_tokens == tokens
    assert answer.choices[0].finish_reason == "length"


def test_a_streamed_answer_keeps_the_cap(front: Coordinator) -> None:
    asked = NEVER.ask(max_tokens=16, stream=True, stream_options={"include_usage": True})
    chunks = list(front.sdk.chat.completions.create(**asked))
    assert chunks[-1].usage.completion_tokens == 16
    assert joined(chunks)[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_stop_string_ends_the_answer_before_it(front: Coordinator, stream: bool) -> None:
    answer = front.sdk.chat.completions.create(**STOP.ask(stop=["STOP"], stream=stream))
    if stream:
        chunks = list(answer)
        text, reason = joined(chunks)[0].content, joined(chunks)[0].finish_reason
        stopped_by = [c.choices[0].stop_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    else:
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
        stopped_by = [answer.choices[0].stop_reason]
    assert (text, reason, stopped_by) == ("This is before ", "stop", ["STOP"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_n_gives_so_many_choices(front: Coordinator, lineup: Lineup, stream: bool) -> None:
    """vLLM refuses n > 1 with temperature 0; the likeliest token only is as good."""
    talk = CONVERSATIONS["reasoning"]
    asked = talk.ask(n=3, temperature=1, seed=1, stream=stream)
    asked["extra_body"]["top_k"] = 1
    answer = front.sdk.chat.completions.create(**asked)
    got = joined(answer) if stream else {c.index: said(c.message, c.finish_reason) for c in answer.choices}
    assert got == dict.fromkeys(range(3), talk.answer(parsed=lineup.parsed))


def test_a_seed_gives_what_one_worker_alone_gives(front: Coordinator, workers: Workers) -> None:
    """The same seed samples the same text as on decode alone, also one that a float64 cannot hold."""

    def sampled(seed: int) -> dict:
        return COUNT.body(temperature=1.8, seed=seed, max_tokens=60, logprobs=True, top_k=0, top_p=1.0)

    texts = set()
    for seed in (9007199254740993, 9007199254740992):
        alone = post(f"{workers.decode.url}/v1/chat/completions", sampled(seed)).body
        ours = post(f"{front.url}/v1/chat/completions", sampled(seed)).body
        tokens = [t["token"] for t in ours["choices"][0]["logprobs"]["content"]]
        assert tokens == [t["token"] for t in alone["choices"][0]["logprobs"]["content"]]
        texts.add(tuple(tokens))
    assert len(texts) == 2


def test_logprobs_hold_the_likeliest_tokens(front: Coordinator) -> None:
    answer = front.sdk.chat.completions.create(**STOP.ask(logprobs=True, top_logprobs=2))
    (choice,) = answer.choices
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    for token in choice.logprobs.content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].token == token.token, "greedy"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kind", ["string", "token ids"])
def test_completions_take_a_string_or_token_ids(front: Coordinator, workers: Workers, kind: str, stream: bool) -> None:
    prompt: str | list[int] = RAW_PROMPT
    if kind == "token ids":
        rendered = post(f"{workers.render.url}/v1/completions/render", {"model": MODEL_NAME, "prompt": RAW_PROMPT})
        prompt = rendered.body[0]["token_ids"]
    answer = front.sdk.completions.create(model=MODEL_NAME, prompt=prompt, temperature=0, max_tokens=100, stream=stream)
    if stream:
        chunks = list(answer)
        text, reasons = "".join(c.choices[0].text for c in chunks), {c.choices[0].finish_reason for c in chunks}
        assert {c.object for c in chunks} == {"text_completion"}
    else:
        text, reasons = answer.choices[0].text, {answer.choices[0].finish_reason}
        assert answer.object == "text_completion"
        assert answer.id.startswith("cmpl-")
    assert text == COUNT.expect["text"]
    assert "stop" in reasons


def test_completions_make_16_tokens_by_default(front: Coordinator) -> None:
    answer = front.sdk.completions.create(model=MODEL_NAME, prompt=RAW_PROMPT, temperature=0)
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


def test_completions_have_logprobs_of_their_own_shape(front: Coordinator, workers: Workers) -> None:
    asked = {"model": MODEL_NAME, "prompt": RAW_PROMPT, "temperature": 0, "max_tokens": 9, "logprobs": 2}
    ours = post(f"{front.url}/v1/completions", asked).body
    alone = post(f"{workers.decode.url}/v1/completions", asked).body
    assert ours["choices"][0]["logprobs"] == alone["choices"][0]["logprobs"]
