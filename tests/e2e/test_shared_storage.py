"""The shared-folder connector: nothing is sent, and decode still takes the prompt from what prefill wrote."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pytest

from tests.bounds import HANG_S
from tests.e2e.conversations import CONVERSATIONS, said
from tests.e2e.lineups import LINEUPS
from tests.e2e.servers import BLOCK_TOKENS
from tests.e2e.wire import Metrics, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.conftest import Coordinator, Pair, Workers

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("name", ["openai", "text"])
def test_whole_blocks_of_the_prompt_come_from_the_folder(
    coordinator: Callable[[dict], Coordinator], pair: Pair, workers: Workers, name: str
) -> None:
    """The connector ignores the salt: a first line that was never sent makes the blocks new."""
    prefill, decode = pair
    config = LINEUPS[name].config(workers.render.url, prefill.url, decode.url, kv_connector="kv-shared-storage")
    talk = CONVERSATIONS["tool result"]
    asked = talk.ask()
    asked["messages"] = [{"role": "system", "content": uuid.uuid4().hex}, *asked["messages"]]
    before = Metrics(decode.url)

    answer = coordinator(config).sdk.chat.completions.create(**asked)

    choice = answer.choices[0]
    assert said(choice.message, choice.finish_reason) == talk.answer(parsed=LINEUPS[name].parsed)
    blocks = (answer.usage.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    wanted = before.prompt_tokens("external_kv_transfer") + blocks
    wait_until(lambda: Metrics(decode.url).prompt_tokens("external_kv_transfer") >= wanted, HANG_S, f"{blocks} come")
    assert Metrics(decode.url).prompt_tokens("external_kv_transfer") == wanted
