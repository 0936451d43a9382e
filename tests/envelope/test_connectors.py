"""The table of contracts: what must hold among its columns, whatever is added to it."""

from __future__ import annotations

from typing import get_args

import pytest

from coordinator.config import KvConnectorName
from envelope.connectors import KV_CONNECTORS, KvConnector, Several, Tie

EVERY = pytest.mark.parametrize("kind", KV_CONNECTORS.values(), ids=KV_CONNECTORS)


def test_the_file_may_name_each_connector_of_the_table_and_no_other() -> None:
    assert set(get_args(KvConnectorName)) == set(KV_CONNECTORS)
    assert all(kind.name == name for name, kind in KV_CONNECTORS.items())


@EVERY
def test_legs_are_tied_if_and_only_if_they_are_in_flight_together(kind: KvConnector) -> None:
    assert kind.concurrent is (kind.tie is not Tie.NONE)
    assert kind.concurrent is bool(kind.prefill_adds and kind.decode_adds)


@EVERY
def test_a_hand_over_that_prefill_returns_is_for_a_decode_that_comes_later(kind: KvConnector) -> None:
    assert not (kind.needs_handover and kind.concurrent)


@EVERY
def test_what_is_delivered_is_held_for_one_reader(kind: KvConnector) -> None:
    """Else a delivery would cost a prompt and free nothing."""
    if kind.delivered:
        assert kind.several is Several.DECODE_ALONE


@EVERY
def test_only_a_decode_that_computes_prompts_is_asked_to_do_it_alone(kind: KvConnector) -> None:
    if kind.several is Several.DECODE_ALONE:
        assert kind.decodes_alone


def test_the_contract_of_nixl_and_of_a_shared_store() -> None:
    """G5: what each asks of prefill, and what decode cannot do without."""
    nixl, shared = KV_CONNECTORS["kv-nixl"], KV_CONNECTORS["kv-shared-storage"]
    assert nixl.prefill == {"do_remote_decode": True, "do_remote_prefill": False}
    assert nixl.required == (
        "remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port"
    )  # fmt: skip
    assert (shared.prefill, shared.required) == ({}, ())
    assert KV_CONNECTORS["kv-lmcache"].prefill == {}
