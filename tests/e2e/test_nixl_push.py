"""NIXL in push mode: prefill writes to the decode that bears its request's id, on every route."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import VLLM_VERSION, Pair
from tests.e2e.lineups import LINEUPS
from tests.e2e.pairs import RANKS
from tests.e2e.routes import check_whole_prompt_is_taken, each_route, prompts_of_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.conftest import Coordinator
    from tests.e2e.servers import Process

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(VLLM_VERSION == "0.32", reason="held against vLLM 0.33 alone"),
]


@pytest.fixture(scope="module")
def pushing(start_for_module: Callable[..., list[Process]]) -> Pair:
    return Pair(*start_for_module("prefill", "decode", connector="NixlPushConnector", **RANKS))


@pytest.fixture(params=["openai", "text"])
def front(request: pytest.FixtureRequest, coordinator: Callable[[dict], Coordinator], pushing: Pair) -> Coordinator:
    prefill, decode = pushing
    return coordinator(LINEUPS[request.param].config(decode.url, prefill.url, decode.url, kv_connector="kv-nixl-push"))


@each_route
def test_decode_takes_the_whole_prompt_from_prefill(
    front: Coordinator, pushing: Pair, route: str, stream: bool
) -> None:
    check_whole_prompt_is_taken(front, pushing, route, stream)


async def test_any_rank_of_prefill_writes_to_any_rank_of_decode(front: Coordinator, pushing: Pair) -> None:
    """The hand-over names prefill's; nobody is told which to be, and each worker spreads what comes at once."""
    computed, taken = await prompts_of_ranks(front, pushing)
    assert all(computed)
    assert all(taken)
