"""NIXL pull semantics: what a prefill leaves behind, and the one decode that may read it.

The store stands for the GPUs' memory and the wire between them, so all workers of a fleet share one. It keeps
what a test wants to know at the end: every breach of the protocol, and every hand-over that nobody came for.

Source: protocol of vLLM 0.33.0; recordings ``nixl_prefill_server/`` and ``kv_load_failure/``.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

BLOCK_SIZE = 32
_NEEDED = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size")

# Hash, offset and length of an item: two pictures of one size have the same tokens, so these tell them apart.
Place = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A finished prefill whose blocks are still held.

    Attributes:
        until: the end of the lease, on the store's clock.
    """

    engine_id: str
    token_ids: tuple[int, ...]
    params: Mapping[str, Any]
    until: float
    media: tuple[Place, ...] = ()


@dataclass(frozen=True, slots=True)
class Violation:
    """A decode leg that a real worker would have died of, failed, or answered wrongly.

    Attributes:
        reason: ``incomplete``, ``unknown``, ``expired``, ``read_twice``, ``altered``, ``own_engine``,
            ``other_tokens``, ``other_media`` or ``other_id``.
    """

    reason: str
    engine_id: str
    params: Mapping[str, Any]
    token_ids: tuple[int, ...]


class BadHandover(Exception):
    """The decode leg cannot load its KV."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(violation.reason)
        self.violation = violation

    @property
    def kills(self) -> bool:
        return self.violation.reason == "incomplete"


@dataclass(slots=True)
class HandoverStore:
    """
    Attributes:
        unread: by ``remote_request_id``: prefilled, and not fetched yet.
        read: ``remote_request_id`` of each hand-over that was fetched, in order.
        reread: those that were released after they had been read.
        freed: those that a worker gave back because it refused the decode request.
        violations: in order.
        lease_s: how long blocks are held for a decode that does not come.
    """

    lease_s: float = 30.0
    clock: Callable[[], float] = time.monotonic
    unread: dict[str, Prefilled] = field(default_factory=dict)
    read: list[str] = field(default_factory=list)
    reread: list[str] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    _blocks: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def register(
        self,
        *,
        engine_id: str,
        request_id: str,
        token_ids: Sequence[int],
        host: str,
        port: int,
        cached: int,
        media: Sequence[Place] = (),
    ) -> dict[str, Any]:
        """Hold a prompt's blocks and return their descriptor, with the flags of the decode leg."""
        blocks = [next(self._blocks) for _ in range(0, len(token_ids), BLOCK_SIZE)]
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [blocks],
            "remote_engine_id": engine_id,
            "remote_request_id": request_id,
            "remote_host": host,
            "remote_port": port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": len(token_ids),
            "remote_blocks_expiry_time": None,
            "remote_registration_generation": 1,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": cached,
        }
        until = self.clock() + self.lease_s
        self.unread[request_id] = Prefilled(engine_id, tuple(token_ids), dict(params), until, tuple(media))
        return params

    def fetch(
        self,
        params: Mapping[str, Any],
        token_ids: Sequence[int],
        *,
        engine_id: str,
        media: Sequence[Place] = (),
        reader: str = "",
        push: bool = False,
    ) -> None:
        """Read the blocks that ``params`` describes, once.

        Args:
            reader: the request's id. One that releases throws its answer away, so a second reading does no harm.
            push: the blocks are written to the request that has prefill's id.

        Raises:
            BadHandover: recorded in ``violations``.
        """
        reason = self._breach(params, tuple(token_ids), tuple(media), engine_id)
        if reason == "read_twice" and "-release" in reader:
            self.reread.append(params["remote_request_id"])
            return
        if reason is None and push and reader != params["remote_request_id"].rpartition("-")[0]:
            reason = "other_id"  # the real one waits for a registration that never comes
        if reason is not None:
            violation = Violation(reason, engine_id, dict(params), tuple(token_ids))
            self.violations.append(violation)
            raise BadHandover(violation)
        request_id = params["remote_request_id"]
        del self.unread[request_id]
        self.read.append(request_id)

    def free(self, params: Mapping[str, Any]) -> None:
        """Give a hand-over up: the worker refused the request that carried it."""
        request_id = params.get("remote_request_id")
        if isinstance(request_id, str) and request_id in self.unread:
            del self.unread[request_id]
            self.freed.append(request_id)

    def _breach(
        self, params: Mapping[str, Any], token_ids: tuple[int, ...], media: tuple[Place, ...], engine_id: str
    ) -> str | None:
        if any(params.get(name) is None for name in _NEEDED):
            return "incomplete"
        request_id = params["remote_request_id"]
        held = self.unread.get(request_id)
        if held is None:
            return "read_twice" if request_id in self.read else "unknown"
        if held.until < self.clock():
            del self.unread[request_id]
            return "expired"
        if held.engine_id == engine_id:
            return "own_engine"
        if dict(held.params) != {**params, "do_remote_prefill": True, "do_remote_decode": False}:
            return "altered"
        if held.token_ids != token_ids:
            return "other_tokens"
        return None if held.media == media else "other_media"
