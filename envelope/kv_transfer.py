"""``kv_transfer_params``: what prefill must return, where bodies carry them, and that clients may not send them.

A hand-over is opaque JSON that goes from one worker to another untouched. It is used only when it is whole: vLLM's
NIXL connector ends the engine over a decode request that says ``do_remote_prefill`` and names no blocks, and lets
one that lacks the other fields wait for ever.

Source: vLLM 0.33 ``nixl/pull_scheduler.py``; ``example_connector.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from envelope.json_codec import without

if TYPE_CHECKING:
    from collections.abc import Mapping

    from envelope.connectors import KvConnector
    from envelope.json_codec import Json

TRANSFER_FIELDS = ("kv_transfer_params", "ec_transfer_params")

# SGLang takes what ties its two legs, and the rank of either, from the body itself; vLLM takes ranks from a header.
_ROUTING_FIELDS = (
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "routed_dp_rank",
    "data_parallel_rank",
    "disagg_prefill_dp_rank",
)

_NOT_FROM_CLIENTS = frozenset((*TRANSFER_FIELDS, *_ROUTING_FIELDS))

# Where a client can put them: the field itself, or an open map that the worker copies into its extra_args.
_OPEN_MAPS = ("vllm_xargs", "extra_args")

# How the APIs that have no ``finish_reason`` say how an answer ended.
_ENDS: dict[str, tuple[str, dict[Any, str]]] = {
    "message": ("stop_reason", {"max_tokens": "length", "end_turn": "stop", "stop_sequence": "stop", None: "abort"}),
    "response": ("status", {"incomplete": "length", "completed": "stop"}),
}


class HandoverMissing(Exception):
    """Prefill answered, but left nothing (or only half of it) for decode. ``reason`` is one short word."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


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
    if (finish := bad_finish(reply, connector.finishes)) is not None:
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


def bad_finish(reply: Json, good: tuple[str, ...] = ("length", "stop")) -> Any:
    """Return how a leg of one token ended, where that is no good end; what it left is worth nothing then."""
    finish = _finish(reply)
    return None if finish in good else finish


def _finish(reply: Json) -> Any:
    choices = reply.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        return choices[0].get("finish_reason")
    known = _ENDS.get(str(reply.get("type") or reply.get("object")))
    if known is None or known[0] not in reply:
        return None
    name, words = known
    return words.get(reply[name], reply[name])


def put_in_generate(body: Json, params: Mapping[str, Any] | None) -> Json:
    """Return a generate body that carries these params where every vLLM version reads them.

    Since 0.29 the top level is read, and wins; up to 0.28 only ``sampling_params.extra_args`` is.
    """
    if not params:
        return body
    sampling = body.get("sampling_params") or {}
    extra = {**(sampling.get("extra_args") or {}), "kv_transfer_params": params}
    return {**body, "kv_transfer_params": params, "sampling_params": {**sampling, "extra_args": extra}}


def add_params(body: Json, params: Mapping[str, Any], *, generate: bool) -> Json:
    """Return a leg's body with more ``kv_transfer_params``.

    Args:
        generate: the body is in generate format.
    """
    every = {**(body.get("kv_transfer_params") or {}), **params}
    return put_in_generate(body, every) if generate else {**body, "kv_transfer_params": every}


def without_transfer_params(body: Json) -> Json:
    """Return a client's or renderer's body without transfer params and worker ranks, wherever they are read.

    They name hosts to pull from, and half of them ends a worker: only the pipeline may set them.
    """
    clean = without(body, _NOT_FROM_CLIENTS)
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
    return isinstance(value, dict) and not value.keys().isdisjoint(TRANSFER_FIELDS)


def _without(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: item for key, item in value.items() if key not in TRANSFER_FIELDS}


def _present(value: Any) -> bool:
    """Say whether a descriptor field holds something; block ids are lists of lists, one per KV cache group."""
    if isinstance(value, list):
        return bool(value) and [] not in value
    return value is not None and value != ""
