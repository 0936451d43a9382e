"""LMCache in a server of its own, which both workers store in and load from: nothing is sent, on every route."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e import lmcache_env, routes
from tests.e2e.conftest import BOOT_S, VLLM_VERSION, Pair
from tests.e2e.conversations import conversation
from tests.e2e.lineups import LINEUPS
from tests.e2e.pairs import at_rest, until
from tests.e2e.routes import ROUTES, each_route
from tests.e2e.servers import BLOCK_TOKENS, lmcache
from tests.e2e.wire import Metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.e2e.conftest import Coordinator
    from tests.e2e.servers import Process

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(VLLM_VERSION == "0.32", reason="held against vLLM 0.33 alone"),
]

# Longer than two blocks, and the answer is in the first.
TALK = conversation(
    "The code word is star. five moon island door five right gamma 771 hammer left coffee ticket beta horse sea 🙂 "
    "seven red umbrella map ocean orange sun walnut table six kettle car 371 🙂 What is the code word?"
)
_SOURCES = ("external_kv_transfer", "local_compute", "local_cache_hit")


@pytest.fixture(scope="module")
def store(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    try:
        packages = lmcache_env.ensure(VLLM_VERSION)
    except RuntimeError as error:
        pytest.skip(str(error))
    server = lmcache(vllm_python, packages, tmp_path_factory.mktemp("lmcache"))
    try:
        yield server.wait_until_ready("/healthcheck", BOOT_S)
    finally:
        server.stop()


@pytest.fixture(scope="module")
def sharing(store: Process, start_for_module: Callable[..., list[Process]]) -> Pair:
    """Two workers that end before the store does: each takes its leave of it."""
    return Pair(*start_for_module("prefill", "decode", connector="LMCacheMPConnector", store=store))


@pytest.fixture(params=["openai", "text"])
def front(request: pytest.FixtureRequest, coordinator: Callable[[dict], Coordinator], sharing: Pair) -> Coordinator:
    prefill, decode = sharing
    return coordinator(LINEUPS[request.param].config(decode.url, prefill.url, decode.url, kv_connector="kv-lmcache"))


@pytest.fixture(autouse=True)
def long_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask on every route what has blocks to share: the usual question is shorter than one."""
    monkeypatch.setattr(routes, "TALK", TALK)


@each_route
def test_whole_blocks_of_the_prompt_come_from_the_store(
    front: Coordinator, sharing: Pair, route: str, stream: bool
) -> None:
    """The salt is new and LMCache goes by it, so it is this request's prefill that has stored them."""
    before = _prompt_tokens(sharing)

    told = ROUTES[route](front, sharing.decode, stream)

    assert told.text.strip("\n") == TALK.expect["content"]
    blocks = (told.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert blocks == 2 * BLOCK_TOKENS
    wanted = [(0, told.prompt_tokens, 0), (blocks, told.prompt_tokens - blocks, 0)]
    until(lambda: sum(_since(before, sharing)[1]) >= told.prompt_tokens, "decode has counted the prompt")
    assert _since(before, sharing) == wanted
    until(lambda: at_rest(*sharing), "nothing is left")


def _prompt_tokens(pair: Pair) -> list[tuple[float, ...]]:
    return [tuple(Metrics(worker.url).prompt_tokens(source) for source in _SOURCES) for worker in pair]


def _since(before: list[tuple[float, ...]], pair: Pair) -> list[tuple[float, ...]]:
    now = _prompt_tokens(pair)
    return [tuple(a - b for a, b in zip(new, old, strict=True)) for new, old in zip(now, before, strict=True)]
