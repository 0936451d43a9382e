"""The encoder cache: what encode workers hold, and the workers that fetch it.

The store stands for the encoders' memory and the wire, or for the shared folder, so all workers of a fleet share one.
A real consumer runs its own encoder where it cannot fetch and has the tensors; here that is a breach, since somebody
sent it a descriptor that leads nowhere.

Source: vLLM 0.33 ``ec_transfer/ec_connector/cpu/scheduler``, ``example_connector.py``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from coordinator.sim.media import Media

_WIDTH = 64
_BYTES_PER_VALUE = 2


@dataclass(frozen=True, slots=True)
class EncodingViolation:
    """A request that no real worker could have answered rightly.

    Attributes:
        reason: ``unknown`` (nobody holds it: stale, or another's), ``altered``, ``other_size``, ``incomplete`` (no
            address), ``foreign`` (a descriptor of media that the prompt does not hold), ``no_input`` (neither a
            descriptor nor tensors).
    """

    reason: str
    hash: str
    entry: Any = None


class BadEncoding(Exception):
    """The worker cannot get the embedding of an item."""

    def __init__(self, violation: EncodingViolation) -> None:
        super().__init__(violation.reason)
        self.violation = violation


@dataclass(slots=True)
class EncodingStore:
    """
    Attributes:
        encoded: hashes in the order in which encode workers ran on them.
        fetched: hashes in the order in which others took what they made.
        violations: in order.
    """

    encoded: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    violations: list[EncodingViolation] = field(default_factory=list)
    _held: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)

    def hold(self, media: Sequence[Media], *, host: str, port: int, addressed: bool) -> dict[str, Any]:
        """Keep what an encode worker made, and return its entries by hash.

        Args:
            addressed: the entries say where to fetch it (NIXL); a shared folder has no address.
        """
        entries: dict[str, Any] = {}
        for index, item in enumerate(media):
            if item.hash in entries:
                entries[item.hash]["item_indices"].append(index)
                continue
            entry: dict[str, Any] = {
                "modality": item.modality,
                "item_indices": [index],
                "metadata": {"rows": item.rows},
            }
            if addressed:
                entry |= {"peer_host": host, "peer_port": port}
                entry |= {"size_bytes": item.rows * _WIDTH * _BYTES_PER_VALUE, "shape": [item.rows, _WIDTH]}
            entries[item.hash] = entry
            self._held[item.hash, port if addressed else 0] = entry
            self.encoded.append(item.hash)
        return entries

    def evict(self, hash: str) -> None:
        """Forget an item, as an encoder that was restarted or is full."""
        for key in [key for key in self._held if key[0] == hash]:
            del self._held[key]

    def take(self, media: Sequence[Media], params: Mapping[str, Any], *, addressed: bool) -> Counter[str]:
        """Get the embeddings of a prompt's items; count how: ``remote``, or ``local`` by the worker's own encoder.

        Raises:
            BadEncoding: recorded in ``violations``.
        """
        for violation in self._breaches(media, params, addressed=addressed):
            self.violations.append(violation)
            raise BadEncoding(violation)
        remote = [item for item in media if (item.hash in params if addressed else self._in_folder(item))]
        self.fetched += [item.hash for item in remote]
        return Counter(remote=len(remote), local=len(media) - len(remote))

    def _breaches(
        self, media: Sequence[Media], params: Mapping[str, Any], *, addressed: bool
    ) -> Iterator[EncodingViolation]:
        for hash in params.keys() - {item.hash for item in media}:
            yield EncodingViolation("foreign", hash, params[hash])
        for item in media:
            entry = params.get(item.hash)
            if addressed and entry is not None:
                reason = self._breach(item, entry)
            else:
                there = item.data is not None or (not addressed and self._in_folder(item))
                reason = None if there else "no_input"
            if reason is not None:
                yield EncodingViolation(reason, item.hash, entry)

    def _breach(self, item: Media, entry: Any) -> str | None:
        if not isinstance(entry, dict) or not entry.get("peer_host") or not entry.get("peer_port"):
            return "incomplete"
        held = self._held.get((item.hash, entry["peer_port"]))
        if held is None:
            return "unknown"
        if held["shape"][0] != item.rows:
            return "other_size"
        return None if held == entry else "altered"

    def _in_folder(self, item: Media) -> bool:
        return (item.hash, 0) in self._held
