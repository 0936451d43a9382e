"""The contract of every KV connector, in one table: the rules of the file, both steps and the release go by it.

An operator reads the same table in ``docs/connectors.md``; a test holds the two together.

Source: vLLM 0.33 ``kv_transfer/kv_connector/v1``: ``nixl/pull_scheduler.py``, ``mooncake/mooncake_connector.py``,
``example_connector.py``, ``lmcache_*``, and ``v1/kv_offload/tiering/p2p/manager.py``; SGLang 0.5.23
``srt/entrypoints/openai/protocol.py`` (PDRoutingFields), ``srt/disaggregation``, ``srt/managers/io_struct.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class Order(StrEnum):
    """How the two legs follow one another, which is which steps the file names."""

    SEQUENTIAL = "sequential"  # prefill, then decode
    CONCURRENT = "concurrent"  # both in flight, in a prefill-decode step


class Tie(StrEnum):
    """What a concurrent connector's two legs know one another by; made anew for every attempt."""

    NONE = "none"
    ROOM = "room"
    TRANSFER = "transfer_id"
    KV_REQUEST = "kv_request_id"


class Several(StrEnum):
    """What happens to a request for several answers (``n``): several engine requests, one prompt."""

    SHARED = "shared"  # each reads the blocks
    DECODE_ALONE = "decode_alone"  # the first reader frees them, so decode computes the prompt
    REFUSED = "refused"  # nor can decode


@dataclass(frozen=True, slots=True)
class KvConnector:
    """The contract of one KV connector.

    Attributes:
        name: as the file writes it.
        engine: the engine's connectors that it stands for.
        checked: against which version this was held, and how.
        order: how the legs follow one another.
        tie: what the legs of one attempt have in common.
        prefill: the params that prefill is always sent; empty when the connector needs none.
        prefill_adds: what is made for each attempt and goes on prefill's leg.
        decode_adds: the same on decode's leg.
        required: the fields of prefill's answer without which decode must not be given a hand-over; empty when
            prefill returns none.
        finishes: the ends of prefill after which decode gets its blocks.
        several: what becomes of ``n`` above 1.
        own_body: prefill is sent the client's own request, not one of one token: it samples decode's first token.
        openai_only: the fleet has no routes but the client's own.
        decodes_alone: a decode worker can compute a prompt itself.
        prefill_runs_on: a prefill whose decode is given up runs to its end. Decode keeps room for the blocks until they
            come, and would keep it for minutes if they never did.
        one_id: the engine knows the two legs by their request id, so both bear one, on one kind of route.
        delivered: a hand-over that no decode took is fetched by a decode leg of one token, since nothing else frees it.
        freed: what frees prefill's blocks when decode never comes.
    """

    name: str
    engine: str
    checked: str
    freed: str
    order: Order = Order.SEQUENTIAL
    tie: Tie = Tie.NONE
    prefill: Mapping[str, Any] = field(default_factory=dict)
    prefill_adds: tuple[str, ...] = ()
    decode_adds: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    finishes: tuple[str, ...] = ("length", "stop")
    several: Several = Several.SHARED
    own_body: bool = False
    openai_only: bool = False
    decodes_alone: bool = True
    prefill_runs_on: bool = False
    one_id: bool = False
    delivered: bool = False

    @property
    def needs_handover(self) -> bool:
        return bool(self.required)

    @property
    def concurrent(self) -> bool:
        return self.order is Order.CONCURRENT


_REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}

_NIXL_FIELDS = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")

_TABLE = (
    KvConnector(
        name="kv-nixl",
        engine="NixlConnector, NixlPullConnector; a MultiConnector with one of them",
        checked="vLLM 0.32 and 0.33, end to end",
        freed="a decode leg of ours, else the lease (30 s)",
        prefill=_REMOTE_DECODE,
        required=_NIXL_FIELDS,
        several=Several.DECODE_ALONE,
        delivered=True,
    ),
    KvConnector(
        name="kv-nixl-push",
        engine="NixlPushConnector",
        checked="vLLM 0.33, end to end",
        freed="a decode leg of ours, else the lease (30 s)",
        prefill=_REMOTE_DECODE,
        required=_NIXL_FIELDS,
        several=Several.DECODE_ALONE,
        one_id=True,
        delivered=True,
    ),
    KvConnector(
        name="kv-shared-storage",
        engine="ExampleConnector, MooncakeStoreConnector, HF3FSKVConnector, FlexKVConnectorV1",
        checked="vLLM 0.33, ExampleConnector end to end",
        freed="nothing is held",
    ),
    KvConnector(
        name="kv-lmcache",
        engine="LMCacheConnectorV1 with a store that both share, LMCacheMPConnector",
        checked="vLLM 0.33, LMCacheMPConnector end to end",
        freed="nothing is held",
    ),
    KvConnector(
        name="kv-mooncake",
        engine="MooncakeConnector",
        checked="vLLM 0.33, end to end over TCP",
        freed="a decode leg of ours, else VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT (480 s)",
        order=Order.CONCURRENT,
        tie=Tie.TRANSFER,
        prefill=_REMOTE_DECODE,
        prefill_adds=("transfer_id",),
        decode_adds=(
            *("do_remote_prefill", "do_remote_decode"),
            *("transfer_id", "remote_bootstrap_addr", "remote_engine_id"),
        ),
        finishes=("length",),
        several=Several.DECODE_ALONE,
        prefill_runs_on=True,
        delivered=True,
    ),
    KvConnector(
        name="kv-offloading",
        engine="OffloadingConnector with the P2P tier",
        checked="vLLM 0.33, sources",
        freed="the tier's own time limit (60 s)",
        order=Order.CONCURRENT,
        tie=Tie.KV_REQUEST,
        prefill_adds=("remote_decoder",),
        decode_adds=("remote_prefiller",),
        several=Several.DECODE_ALONE,
    ),
    KvConnector(
        name="kv-sglang",
        engine="SGLang with --disaggregation-mode, any transfer backend",
        checked="SGLang 0.5.23, request models and sources",
        freed="SGLang, when either leg is given up; else its time limits (300 s)",
        order=Order.CONCURRENT,
        tie=Tie.ROOM,
        prefill_adds=("bootstrap_host", "bootstrap_port", "bootstrap_room"),
        decode_adds=("bootstrap_host", "bootstrap_port", "bootstrap_room"),
        finishes=("length", "stop", "tool_calls"),
        several=Several.REFUSED,
        own_body=True,
        openai_only=True,
        decodes_alone=False,
    ),
)

KV_CONNECTORS: dict[str, KvConnector] = {connector.name: connector for connector in _TABLE}
