"""``kv_transfer_params`` of every connector: what prefill is asked, what it must return, what decode is given.

A hand-over is opaque JSON that goes from one worker to another untouched. It is used only when it is whole: vLLM's
NIXL connector ends the engine over a decode request that says ``do_remote_prefill`` and names no blocks, and lets
one that lacks the other fields wait for ever.

Source: vLLM 0.33 ``nixl/pull_scheduler.py``; ``example_connector.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from envelope.json_codec import Json

TRANSFER_FIELDS = ("kv_transfer_params", "ec_transfer_params")

# Where a client can put them: the field itself, or an open map that the worker copies into its extra_args.
_OPEN_MAPS = ("vllm_xargs", "extra_args")

_GOOD_FINISH = ("length", "stop")


class HandoverMissing(Exception):
    """Prefill answered, but left nothing (or only half of it) for decode. ``reason`` is one short word."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class KvConnector:
    """The contract of one KV connector.

    Attributes:
        name: as the file writes it.
        prefill: the params that ask prefill to keep its blocks; empty when the connector needs none.
        required: the fields without which decode must not be given a hand-over; empty when prefill returns none.
        single_reader: the blocks are freed by their first reader, so ``n`` > 1 (several engine requests) must not
            share them.
    """

    name: str
    prefill: Mapping[str, Any]
    required: tuple[str, ...]
    single_reader: bool

    @property
    def needs_handover(self) -> bool:
        return bool(self.required)


KV_CONNECTORS: dict[str, KvConnector] = {
    "kv-nixl": KvConnector(
        name="kv-nixl",
        prefill={"do_remote_decode": True, "do_remote_prefill": False},
        required=("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port"),
        single_reader=True,
    ),
    "kv-shared-storage": KvConnector(name="kv-shared-storage", prefill={}, required=(), single_reader=False),
}


def read_handover(connector: KvConnector, reply: Any) -> Json | None:
    """Return what a finished prefill leaves for decode, ready to be sent; None where the connector needs nothing.

    Args:
        reply: the prefill leg's whole answer, in any format.

    Raises:
        HandoverMissing: the prefill did not end well, or its hand-over is absent or incomplete.
    """
    if not isinstance(reply, dict):
        raise HandoverMissing("not_an_object", "the answer is not a JSON object")
    if reply.get("error"):
        raise HandoverMissing("error", "the answer tells of an error, although its status does not")
    if (finish := bad_finish(reply)) is not None:
        raise HandoverMissing("bad_finish", f"prefill ended with finish_reason {finish!r}")
    if not connector.needs_handover:
        return None
    params = reply.get("kv_transfer_params")
    if not isinstance(params, dict) or not params:
        raise HandoverMissing("absent", "the answer carries no kv_transfer_params")
    missing = [name for name in connector.required if not _present(params.get(name))]
    if missing:
        raise HandoverMissing("incomplete", f"kv_transfer_params lacks {', '.join(missing)}")
    return {**params, "do_remote_prefill": True, "do_remote_decode": False}


def bad_finish(reply: Json) -> Any:
    """Return how a leg of one token ended, where that is no good end; what it left is worth nothing then."""
    choices = reply.get("choices")
    if not (isinstance(choices, list) and choices and isinstance(choices[0], dict)):
        return None
    finish = choices[0].get("finish_reason")
    return None if finish in _GOOD_FINISH else finish


def put_in_generate(body: Json, params: Mapping[str, Any] | None) -> Json:
    """Return a generate body that carries these params where every vLLM version reads them.

    Since 0.29 the top level is read, and wins; up to 0.28 only ``sampling_params.extra_args`` is.
    """
    if not params:
        return body
    sampling = body.get("sampling_params") or {}
    extra = {**(sampling.get("extra_args") or {}), "kv_transfer_params": params}
    return {**body, "kv_transfer_params": params, "sampling_params": {**sampling, "extra_args": extra}}


def without_transfer_params(body: Json) -> Json:
    """Return a client's or renderer's body without transfer params, wherever they are read.

    They name hosts to pull from, and half of them ends a worker: only the pipeline may set them.
    """
    clean = {key: value for key, value in body.items() if key not in TRANSFER_FIELDS}
    for name in _OPEN_MAPS:
        if _holds_transfer(clean.get(name)):
            clean[name] = _without(clean[name])
    sampling = clean.get("sampling_params")
    if isinstance(sampling, dict) and any(_holds_transfer(sampling.get(name)) for name in _OPEN_MAPS):
        clean["sampling_params"] = {
            key: _without(value) if key in _OPEN_MAPS else value for key, value in sampling.items()
        }
    return clean


def _holds_transfer(value: Any) -> bool:
    return isinstance(value, dict) and any(name in value for name in TRANSFER_FIELDS)


def _without(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: item for key, item in value.items() if key not in TRANSFER_FIELDS}


def _present(value: Any) -> bool:
    """Say whether a descriptor field holds something; block ids are lists of lists, one per KV cache group."""
    if isinstance(value, list):
        return bool(value) and all(item != [] for item in value)
    return value is not None and value != ""
