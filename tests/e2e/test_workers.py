"""The workers themselves, with no coordinator: what the other tests here take for granted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.bounds import HANG_S
from tests.e2e.conversations import conversation
from tests.e2e.wire import Metrics, post, wait_until

if TYPE_CHECKING:
    from tests.e2e.conftest import Workers

pytestmark = pytest.mark.e2e

KEEP_BLOCKS = {"do_remote_decode": True, "do_remote_prefill": False}


def test_decode_answers_from_the_blocks_that_prefill_computed(workers: Workers) -> None:
    """render -> prefill -> decode by hand gives the trained answer, and decode computes no token of the prompt."""
    asked = conversation("Say hello in Japanese.")
    rendered = post(f"{workers.render.url}/v1/chat/completions/render", asked.body()).body
    before = Metrics(workers.decode.url)

    one_token = {"sampling_params": {"max_tokens": 1, "temperature": 0}, "kv_transfer_params": KEEP_BLOCKS}
    prefilled = post(f"{workers.prefill.url}/inference/v1/generate", rendered | one_token).body
    handed_over = {"kv_transfer_params": prefilled["kv_transfer_params"], "output_mode": "text"}
    decoded = post(f"{workers.decode.url}/inference/v1/generate", rendered | handed_over).body

    assert decoded["choices"][0]["text"] == asked.expect["text"]
    tokens = len(rendered["token_ids"])
    wait_until(
        lambda: (
            Metrics(workers.decode.url).prompt_tokens("external_kv_transfer")
            == before.prompt_tokens("external_kv_transfer") + tokens
        ),
        HANG_S,
        f"{tokens} prompt tokens come from prefill",
    )
    after = Metrics(workers.decode.url)
    assert after.prompt_tokens("local_compute") == before.prompt_tokens("local_compute")
