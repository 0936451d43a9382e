"""Real workers that are lost: an answer where there can be one, and never a torn one that looks whole.

In the order of this file: decode is paused, then the prefill worker goes, then decode in the middle of a stream.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

import openai
import pytest

from tests.bounds import HANG_S
from tests.e2e.conversations import CONVERSATIONS, conversation, said
from tests.e2e.lineups import LINEUPS
from tests.e2e.wire import Metrics, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from openai.types.chat import ChatCompletionChunk

    from tests.e2e.conftest import Coordinator, Pair, Workers

pytestmark = pytest.mark.e2e

FORMATS = ["openai", "text"]
PLAIN = CONVERSATIONS["plain"]

T = TypeVar("T")


@pytest.mark.parametrize("name", FORMATS)
def test_a_paused_worker_is_waited_for_unless_the_file_sets_a_limit(
    coordinator: Callable[[dict], Coordinator], pair: Pair, workers: Workers, name: str
) -> None:
    """Stopped in the middle of two streams: without a limit the answer comes late and whole, with one it breaks off."""
    urls = workers.render.url, pair.prefill.url, pair.decode.url
    config = LINEUPS[name].config(*urls, kv_connector="kv-shared-storage")
    patient = coordinator(config)
    config["pipeline"]["steps"][-1]["params"]["idle_timeout"] = "2s"
    config["pipeline"]["steps"][-1]["params"]["first_byte_timeout"] = "2s"
    hasty = coordinator(config)
    long = conversation("Never stop.").ask(max_tokens=400, stream=True)
    whole, broken = begun(patient, long), begun(hasty, long | {"max_tokens": 3000})

    pair.decode.pause()
    try:
        with pytest.raises(openai.APIError):
            list(broken)
        with pytest.raises(openai.APIStatusError) as late:
            hasty.sdk.chat.completions.create(**PLAIN.ask())
        assert late.value.status_code == 504
        assert "decode" in late.value.message
    finally:
        pair.decode.go_on()

    assert list(whole)[-1].choices[0].finish_reason == "length"
    for worker in pair:
        wait_until(lambda url=worker.url: Metrics(url).at_rest, HANG_S, "nothing is held")
    for front in (patient, hasty):
        (choice,) = in_time(lambda front=front: front.sdk.chat.completions.create(**PLAIN.ask())).choices
        assert said(choice.message, choice.finish_reason) == PLAIN.answer(parsed=LINEUPS[name].parsed)


def begun(front: Coordinator, asked: dict) -> Iterator[ChatCompletionChunk]:
    """Return a stream that has begun, without its first chunk."""

    def begin() -> Iterator[ChatCompletionChunk]:
        chunks = iter(front.sdk.chat.completions.create(**asked))
        next(chunks)
        return chunks

    return in_time(begin)


def in_time(ask: Callable[[], T]) -> T:
    """Ask until it is answered: on a loaded machine any answer may come later than the limits of two seconds."""
    deadline = time.monotonic() + HANG_S
    while True:
        try:
            return ask()
        except openai.APIError as late:
            if getattr(late, "status_code", 504) != 504 or time.monotonic() > deadline:
                raise


@pytest.fixture(scope="module")
def fronts(
    coordinator: Callable[[dict], Coordinator], pair: Pair, workers: Workers
) -> Callable[[str, str], Coordinator]:
    """Coordinators by wire format and by what they do without prefill; they come up, and then it dies."""
    urls = workers.render.url, pair.prefill.url, pair.decode.url

    def front(name: str, on_prefill_failure: str) -> Coordinator:
        config = LINEUPS[name].config(*urls, kv_connector="kv-shared-storage")
        config["pipeline"]["on_prefill_failure"] = on_prefill_failure
        return coordinator(config)

    for name in FORMATS:
        front(name, "fail")
        front(name, "decode_alone")
    pair.prefill.kill()
    return front


@pytest.mark.parametrize("name", FORMATS)
def test_without_prefill_a_request_fails_and_says_so(fronts: Callable[[str, str], Coordinator], name: str) -> None:
    with pytest.raises(openai.InternalServerError) as failed:
        fronts(name, "fail").sdk.chat.completions.create(**PLAIN.ask())
    assert failed.value.status_code in (502, 503)
    assert "prefill" in failed.value.message


@pytest.mark.parametrize("name", FORMATS)
def test_without_prefill_decode_answers_alone_where_the_file_says_so(
    fronts: Callable[[str, str], Coordinator], name: str
) -> None:
    (choice,) = fronts(name, "decode_alone").sdk.chat.completions.create(**PLAIN.ask()).choices
    assert said(choice.message, choice.finish_reason) == PLAIN.answer(parsed=LINEUPS[name].parsed)


def test_a_stream_whose_worker_dies_is_an_error_to_the_client(
    fronts: Callable[[str, str], Coordinator], pair: Pair
) -> None:
    """Both wire formats at once: there is one worker to lose."""
    asking = [fronts(name, "decode_alone") for name in FORMATS]
    never = conversation("Never stop.").ask(max_tokens=3000, stream=True)
    streams = [iter(front.sdk.chat.completions.create(**never)) for front in asking]
    for stream in streams:
        next(stream)

    pair.decode.kill()

    for stream in streams:
        with pytest.raises(openai.APIError):
            list(stream)
    for front in asking:
        with pytest.raises(openai.InternalServerError) as failed:
            front.sdk.chat.completions.create(**PLAIN.ask())
        assert failed.value.status_code in (502, 503)
        assert "decode" in failed.value.message
