"""What a worker lacks is found by questions that it refuses, and one that would answer is not asked."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from coordinator.routing.router import Worker
from coordinator.sim import Canned, Fault, Settings, SimWorker
from coordinator.workers.capability import GENERATE, MODE_QUESTION, Asker, Unanswered

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

BOTH = ("derender", "text")
CHAT = "/v1/chat/completions"
RENDER = "/v1/chat/completions/render"


@asynccontextmanager
async def started(**settings: Any) -> AsyncIterator[SimWorker]:
    worker = SimWorker("decode", settings=Settings(**settings))
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop()


async def lacking(
    worker: SimWorker | str,
    modes: tuple[str, ...] = BOTH,
    our_key: str | None = None,
    texts: tuple[str, ...] = (),
    paths: tuple[str, ...] = (GENERATE, RENDER),
) -> dict[str, str]:
    url = worker if isinstance(worker, str) else worker.url
    async with aiohttp.ClientSession() as session:
        found = await Asker(session, paths, modes, texts, None, our_key).lacks(Worker(url))
    return {need: sentence.removeprefix(url) for need, sentence in found.items()}


async def test_a_worker_with_all_that_is_needed_lacks_nothing_and_has_generated_nothing() -> None:
    async with started() as worker:
        assert await lacking(worker) == {}
        assert worker.core.generated == 0
        assert [received.path for received in worker.received] == [GENERATE, RENDER, "/version", GENERATE]


OLD = " is vLLM 0.31, without output_mode {}: run vLLM {} or later with a tokenizer (no --tokens-only), or write "
BY_OURSELVES = "output_mode: tokens and derender: coordinator"
WITHOUT = " has no tokenizer, which {} needs: start it without --tokens-only"


@pytest.mark.parametrize(
    ("settings", "lacks"),
    [
        (
            {"version": "0.32.0"},
            {"derender": OLD.replace("31", "32").format("derender", "0.33") + "output_mode: text"},
        ),
        (
            {"version": "0.31.0"},
            {
                "derender": OLD.format("derender", "0.33") + BY_OURSELVES,
                "text": OLD.format("text", "0.32") + BY_OURSELVES,
            },
        ),
        (
            {"tokens_only": True},
            dict.fromkeys(BOTH, f"{WITHOUT}, or write {BY_OURSELVES}".replace("{}", "output_mode {}")),
        ),
        (
            {"scale_out": False},
            {
                **dict.fromkeys(
                    (GENERATE, *BOTH), f" answers 403 on {GENERATE}: start vllm serve with --enable-scale-out"
                ),
                RENDER: f" answers 403 on {RENDER}: start vllm serve with --enable-scale-out",
            },
        ),
    ],
)
async def test_what_a_worker_lacks_is_told_with_what_helps(settings: Any, lacks: dict[str, str]) -> None:
    """H26 and its kind: an old version, no tokenizer, a missing flag."""
    async with started(**settings) as worker:
        assert await lacking(worker) == {need: sentence.format(need) for need, sentence in lacks.items()}
        assert worker.core.generated == 0


async def test_a_version_that_would_answer_is_not_asked_for_a_mode() -> None:
    """Before 0.32 the field is ignored: the question would be a request."""
    async with started(version="0.31.0") as worker:
        await lacking(worker)
        assert MODE_QUESTION not in [received.body for received in worker.received]


@pytest.mark.parametrize(
    "answer",
    [
        Canned(404, "{}"),
        Canned(200, "no json"),
        Canned(200, '{"version": "0.1.dev1+g0123"}'),
        Canned(200, '["0.33"]'),
        Canned(200, "{}"),
    ],
)
async def test_a_server_that_does_not_tell_its_version_is_taken_as_it_is(answer: Canned) -> None:
    async with started() as worker:
        worker.behave.fault = Fault(path="/version", canned=answer)
        assert await lacking(worker) == {}
        assert MODE_QUESTION not in [received.body for received in worker.received]


@pytest.mark.parametrize("version", ["0.33.1.dev12+gabc", "0.40.0rc1", "1.2.3"])
async def test_a_later_version_is_asked(version: str) -> None:
    async with started() as worker:
        worker.behave.fault = Fault(path="/version", canned=Canned(200, f'{{"version": "{version}"}}'))
        assert await lacking(worker) == {}
        assert MODE_QUESTION in [received.body for received in worker.received]


@pytest.mark.parametrize("flags", [{}, {"scale_out": False}, {"version": "0.31.0"}, {"tokens_only": True}])
async def test_a_route_in_text_needs_a_tokenizer(flags: Any) -> None:
    """Legs in the client's format, a render server and a derender service; a worker that is not asked tells nothing."""
    async with started(**flags) as worker:
        found = await lacking(worker, modes=(), texts=(CHAT, RENDER), paths=())
        assert found == ({path: WITHOUT.format(path) for path in (CHAT, RENDER)} if "tokens_only" in flags else {})
        assert worker.core.generated == 0


async def test_modes_that_nobody_asks_for_are_not_asked_about() -> None:
    async with started(tokens_only=True) as worker:
        assert await lacking(worker, modes=()) == {}
        assert "/version" not in [received.path for received in worker.received]


async def test_a_key_of_ours_that_is_refused_is_named_and_one_that_clients_have_is_none_of_ours() -> None:
    async with started(api_key="k") as worker:
        assert await lacking(worker) == {}
        found = await lacking(worker, our_key="pools.decode.api_key")
    assert found["text"].startswith(f" answers 401 on {GENERATE}: pools.decode.api_key must be the key")


async def test_a_worker_whose_queue_is_full_is_taken_as_it_is() -> None:
    async with started(tokens_only=True) as worker:
        refused, full = (Fault(path=GENERATE, canned=Canned(status, "{}")) for status in (400, 503))
        worker.behave.next(refused, full)
        assert await lacking(worker) == {}


async def test_a_worker_that_is_not_there_tells_nothing() -> None:
    with pytest.raises(Unanswered, match="cannot be reached"):
        await lacking("http://127.0.0.1:1")
