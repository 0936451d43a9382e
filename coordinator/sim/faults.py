"""Ways to misbehave, per worker, switchable while it runs.

A ``Fault`` is what goes wrong with one request; its fields combine. ``Behaviour`` is a worker's current manners and
the queue of faults for its next requests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from coordinator.sim.answers import Headers, Received

Rewrite = Callable[[dict[str, Any]], Any]
CacheRule = Literal["always_hit", "always_miss", "seen_before"] | Callable[[Received], bool]
ABSENT: Any = object()


@dataclass(frozen=True, slots=True)
class Canned:
    """An answer of choice in place of ours, e.g. ``Canned(429, "<html>..", (("Retry-After", "3"),))``."""

    status: int = 200
    body: str | bytes = b""
    headers: Headers = ()
    content_type: str = "application/json"


@dataclass(frozen=True, slots=True)
class Fault:
    """
    Counts of events are of our own: after three events the connection is cut, and the like; 0 is before the first.

    Attributes:
        path: only requests whose path ends so.
        first_byte_s: wait before the head of the answer.
        first_event_s: wait between the head and the first event of a stream.
        itl_s: seconds between tokens.
        hang: never answer.
        hang_after: so many events, then silence with an open connection.
        drop: close the connection without a byte.
        canned: answer this instead.
        die_after: so many events, then reset the connection.
        end_after: so many events, then end the body cleanly: no finish, no ``[DONE]``.
        half_event_after: so many events, then half of the next one, then reset the connection.
        error_after: so many events, then an error event as the route has it, then ``[DONE]`` (not on messages).
        only_done: nothing but ``[DONE]``.
        comments: a comment line before each event, as a server with ``--sse-keep-alive-interval`` may send.
        slice_bytes: write events in slices of that many bytes, so that they arrive cut anywhere.
        truncate: a whole answer's first half: ``cut`` breaks the connection, ``clean`` is a valid HTTP answer.
        rewrite: changes each JSON object, whole answer or chunk, before it is sent.
        content_type: sent instead of ours.
        gzip: compress, whatever the client accepts.
    """

    path: str = ""
    first_byte_s: float = 0.0
    first_event_s: float = 0.0
    itl_s: float | None = None
    hang: bool = False
    hang_after: int | None = None
    drop: bool = False
    canned: Canned | None = None
    die_after: int | None = None
    end_after: int | None = None
    half_event_after: int | None = None
    error_after: int | None = None
    only_done: bool = False
    comments: bool = False
    slice_bytes: int | None = None
    truncate: Literal["cut", "clean"] | None = None
    rewrite: Rewrite | None = None
    content_type: str | None = None
    gzip: bool = False


@dataclass(slots=True)
class Behaviour:
    """
    Attributes:
        first_byte_s: wait before the head of each answer.
        itl_s: seconds between two tokens.
        tokens_per_step: tokens that one event holds.
        fault: what is wrong with every request.
        cache_rule: decides whether ``Prefer: if-available`` is answered 412; None ignores the header, as vLLM does.
    """

    first_byte_s: float = 0.0
    itl_s: float = 0.0
    tokens_per_step: int = 1
    fault: Fault | None = None
    cache_rule: CacheRule | None = None
    _next: list[Fault] = field(default_factory=list)

    def next(self, *faults: Fault, times: int = 1) -> None:
        """Let the next requests go wrong: each fault in turn, the whole list ``times`` times."""
        self._next += list(faults) * times

    def clear(self) -> None:
        """Behave again."""
        self.fault = None
        self._next.clear()

    def take(self, path: str, *, probe: bool) -> Fault:
        """Return what goes wrong with a request for ``path``, and take it off the queue.

        Args:
            probe: health and the like: only a fault that names the path is meant for it.
        """

        def meant(fault: Fault) -> bool:
            return path.endswith(fault.path) and bool(fault.path or not probe)

        for at, fault in enumerate(self._next):
            if meant(fault):
                return self._with_manners(self._next.pop(at))
        if self.fault is not None and meant(self.fault):
            return self._with_manners(self.fault)
        return Fault() if probe else self._with_manners(Fault())

    def _with_manners(self, fault: Fault) -> Fault:
        return dataclasses.replace(
            fault,
            first_byte_s=fault.first_byte_s or self.first_byte_s,
            itl_s=self.itl_s if fault.itl_s is None else fault.itl_s,
        )


def echo(mode: Any) -> Rewrite:
    """Answer with another ``output_mode``; ABSENT leaves the key out, as a server that does not know it."""

    def rewrite(body: dict[str, Any]) -> dict[str, Any]:
        return _with(body, "output_mode", mode) if "output_mode" in body else body

    return rewrite


def handover(params: Any) -> Rewrite:
    """Answer with other ``kv_transfer_params``; ABSENT leaves the key out."""

    def rewrite(body: dict[str, Any]) -> dict[str, Any]:
        return _with(body, "kv_transfer_params", params)

    return rewrite


def encodings(params: Any) -> Rewrite:
    """Answer with other ``ec_transfer_params``; ABSENT leaves the key out."""

    def rewrite(body: dict[str, Any]) -> dict[str, Any]:
        return _with(body, "ec_transfer_params", params)

    return rewrite


def uncached(body: dict[str, Any]) -> dict[str, Any]:
    """Answer as an encode worker that had no room to keep what it made: entries without an address."""
    bare = {
        hash: {"modality": entry["modality"], "item_indices": entry["item_indices"], "metadata": {}}
        for hash, entry in (body.get("ec_transfer_params") or {}).items()
    }
    return {**body, "ec_transfer_params": bare}


def half_handover(body: dict[str, Any]) -> dict[str, Any]:
    """Answer with a descriptor that says where, but not which blocks."""
    params = body.get("kv_transfer_params")
    if not params:
        return body
    return {**body, "kv_transfer_params": {**params, "remote_block_ids": None}}


def aborted(body: dict[str, Any]) -> dict[str, Any]:
    """Answer as an aborted request is: ``finish_reason`` abort, and nothing handed over."""
    choices = [{**choice, "finish_reason": "abort"} for choice in body.get("choices", [])]
    return {**body, "choices": choices, "kv_transfer_params": None}


def _with(body: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    if value is ABSENT:
        return {name: item for name, item in body.items() if name != key}
    return {**body, key: value}
