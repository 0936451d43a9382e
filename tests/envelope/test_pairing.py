"""What ties the two legs of one attempt: exact fields, in the place where the engine reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from envelope.connectors import KV_CONNECTORS, Tie
from envelope.pairing import Pair, by_kv_request, by_room, by_transfer, put

if TYPE_CHECKING:
    from collections.abc import Callable

ROOM = {"bootstrap_host": "10.0.0.5", "bootstrap_port": 8998, "bootstrap_room": 2**63 - 1}

PAIRS: dict[str, tuple[Pair, dict[str, Any], dict[str, Any]]] = {
    "room": (by_room("10.0.0.5", 8998, 2**63 - 1), ROOM, ROOM),
    "transfer_id": (
        by_transfer("xfer-7f", "http://10.0.0.5:8998", "e-0"),
        {"transfer_id": "xfer-7f"},
        {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": "xfer-7f",
         "remote_bootstrap_addr": "http://10.0.0.5:8998", "remote_engine_id": "e-0"},
    ),
    "kv_request_id": (
        by_kv_request("k", "10.0.0.5", 7000),
        {"remote_decoder": {"kv_request_id": "k"}},
        {"remote_prefiller": {"kv_request_id": "k", "remote_host": "10.0.0.5", "remote_port": 7000}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("tie", PAIRS)
def test_each_leg_has_its_half(tie: str) -> None:
    pair, prefill, decode = PAIRS[tie]
    assert (pair.prefill, pair.decode) == (prefill, decode)


def test_the_contract_names_the_fields_of_every_pair() -> None:
    """What the docs say is sent is what is sent."""
    tied = {kind.tie: kind for kind in KV_CONNECTORS.values() if kind.concurrent}
    assert set(tied) == {*map(Tie, PAIRS)} == {*Tie} - {Tie.NONE}
    for tie, (pair, _, _) in PAIRS.items():
        contract = tied[Tie(tie)]
        assert (set(pair.prefill), set(pair.decode)) == (set(contract.prefill_adds), set(contract.decode_adds))


BODY = {"messages": [], "kv_transfer_params": {"do_remote_decode": True}}
GENERATE = {"token_ids": [1], "sampling_params": {"max_tokens": 1, "extra_args": {"k": 1}}}
EVERY = {"do_remote_decode": True, "transfer_id": "x"}

PUT = {
    "SGLang reads the body itself": ("kv-sglang", {"messages": []}, ROOM, False, {"messages": [], **ROOM}),
    "vLLM its params": (
        "kv-mooncake", BODY, {"transfer_id": "x"}, False, {"messages": [], "kv_transfer_params": EVERY}),
    "where there were none": (
        "kv-mooncake", {"messages": []}, {"transfer_id": "x"}, False,
        {"messages": [], "kv_transfer_params": {"transfer_id": "x"}}),
    "and on the generate route both of its places": (
        "kv-mooncake", {**GENERATE, "kv_transfer_params": {"do_remote_decode": True}}, {"transfer_id": "x"}, True,
        {"token_ids": [1], "kv_transfer_params": EVERY,
         "sampling_params": {"max_tokens": 1, "extra_args": {"k": 1, "kv_transfer_params": EVERY}}}),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "body", "fields", "generate", "sent"), PUT.values(), ids=PUT)
def test_it_is_put_where_the_engine_reads_it(
    pure: Callable[..., Any], kind: str, body: Any, fields: Any, generate: bool, sent: Any
) -> None:
    assert pure(put, KV_CONNECTORS[kind], body, fields, generate=generate) == sent
