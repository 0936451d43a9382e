"""What the two legs of a concurrent connector know one another by: fields made anew for every attempt.

A pair that is sent twice would have a worker wait for a partner that has gone, so nothing here is ever used again.

Source: vLLM 0.33 ``mooncake_connector.py`` (``update_state_after_alloc``), ``kv_offload/tiering/p2p/manager.py``;
SGLang 0.5.23 ``PDRoutingFields``, whose router sends the same fields in both bodies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from envelope.kv_transfer import add_params

if TYPE_CHECKING:
    from collections.abc import Mapping

    from envelope.connectors import KvConnector
    from envelope.json_codec import Json


@dataclass(frozen=True, slots=True)
class Pair:
    """The fields of either leg; which fields they are is ``prefill_adds`` and ``decode_adds`` of the contract."""

    prefill: Mapping[str, Any]
    decode: Mapping[str, Any]


def by_room(host: str, port: int, room: int) -> Pair:
    """Return the pair of an SGLang fleet: both legs name prefill's bootstrap server, and one room in it.

    Args:
        room: 1 to 2**63 - 1. SGLang counts on from it where one body holds several prompts, and a data-parallel
            prefill takes its rank from it.
    """
    fields = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room}
    return Pair(fields, fields)


def by_transfer(transfer_id: str, bootstrap: str, engine_id: str) -> Pair:
    """Return the pair of a Mooncake fleet: decode asks the engine that the bootstrap server of prefill told of.

    Args:
        bootstrap: base URL of that server.
    """
    decode = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "remote_bootstrap_addr": bootstrap,
        "remote_engine_id": engine_id,
    }
    return Pair({"transfer_id": transfer_id}, decode)


def by_kv_request(kv_request_id: str, host: str, port: int) -> Pair:
    """Return the pair of a fleet with offloading's P2P tier: decode fetches from the tier on prefill's host."""
    return Pair(
        {"remote_decoder": {"kv_request_id": kv_request_id}},
        {"remote_prefiller": {"kv_request_id": kv_request_id, "remote_host": host, "remote_port": port}},
    )


def put(connector: KvConnector, body: Json, fields: Mapping[str, Any], *, generate: bool) -> Json:
    """Return a leg's body with its half of the pair, where the engine looks for it."""
    return {**body, **fields} if connector.own_body else add_params(body, fields, generate=generate)
