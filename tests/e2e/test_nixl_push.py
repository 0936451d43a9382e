"""NIXL in push mode: prefill writes to the decode that bears its request's id, on every route."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import VLLM_VERSION, Pair
from tests.e2e.lineups import LINEUPS
from tests.e2e.pairs import Taken, at_rest, until
from tests.e2e.routes import ROUTES, TALK

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
    return Pair(*start_for_module("prefill", "decode", connector="NixlPushConnector"))


@pytest.fixture(params=["openai", "text"])
def front(request: pytest.FixtureRequest, coordinator: Callable[[dict], Coordinator], pushing: Pair) -> Coordinator:
    prefill, decode = pushing
    return coordinator(LINEUPS[request.param].config(decode.url, prefill.url, decode.url, kv_connector="kv-nixl-push"))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", ROUTES)
def test_decode_takes_the_whole_prompt_from_prefill(
    front: Coordinator, pushing: Pair, route: str, stream: bool
) -> None:
    taken = Taken(pushing.decode)
    told = ROUTES[route](front, pushing.decode, stream)
    assert told.text.strip("\n") == TALK.expect["content"]
    taken.check(told.prompt_tokens)
    until(lambda: at_rest(*pushing), "nothing is left")
