"""``ec_transfer_params`` of every encoder-cache connector: what an encode leg must return, and what prefill is given.

Each encoded item is described by an entry under its hash, opaque JSON that goes to prefill untouched: its keys differ
between releases. It is used only when it says where the embedding is; without an address, prefill would look for
tensors that it was not sent.

Source: vLLM 0.33 ``ec_transfer/ec_connector/cpu/scheduler`` (NIXL), ``example_connector.py`` (a shared folder).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from envelope.kv_transfer import bad_finish

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from envelope.json_codec import Json

_FIELD = "ec_transfer_params"


class EntryMissing(Exception):
    """An encode leg answered, but left nothing that prefill could fetch. ``reason`` is one short word."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


class EntriesConflict(Exception):
    """Two legs describe one item differently, so at most one of them can be right."""


@dataclass(frozen=True, slots=True)
class EcConnector:
    """The contract of one encoder-cache connector.

    Attributes:
        name: as the file writes it.
        required: the fields without which an entry leads nowhere; empty where prefill finds the embedding by its hash
            alone and needs no entry.
        tells: prefill fails a request whose embedding is gone. Where it does not, it runs its own encoder, and a
            prefill that was sent no tensors for that ends.
    """

    name: str
    required: tuple[str, ...]
    tells: bool


EC_CONNECTORS: dict[str, EcConnector] = {
    "ec-nixl": EcConnector("ec-nixl", required=("peer_host", "peer_port"), tells=True),
    "ec-shared-storage": EcConnector("ec-shared-storage", required=(), tells=False),
}


def read_entries(connector: EcConnector, reply: Any, item: str | None, known: Collection[str] = ()) -> Json:
    """Return what a finished encode leg left for prefill, by hash; empty where the connector needs nothing.

    Args:
        reply: the leg's whole answer, in any format.
        item: the hash of what was to be encoded; None where nobody has named it.
        known: all hashes of the request. A leg may leave several of them: a video has pictures and sound.

    Raises:
        EntryMissing: the leg did not end well, or an entry is absent or leads nowhere.
    """
    if not isinstance(reply, dict):
        raise EntryMissing("not_an_object", "the answer is not a JSON object")
    if (finish := bad_finish(reply)) is not None:
        raise EntryMissing("bad_finish", f"the leg ended with finish_reason {finish!r}")
    given = reply.get(_FIELD)
    entries = {key: entry for key, entry in given.items() if entry} if isinstance(given, dict) else {}
    if not entries:
        if connector.required:
            raise EntryMissing("absent", f"the answer carries no {_FIELD}")
        return {}
    if item is not None:
        if key_of(item, entries) is None:
            raise EntryMissing(
                "other_hash",
                f"{_FIELD} is about other media than the renderer saw; do both run the same vLLM with the same flags?",
            )
        named = {key_of(each, entries) for each in {item, *known}}
        entries = {key: entry for key, entry in entries.items() if key in named}
    for key, entry in entries.items():
        if lacking := [name for name in connector.required if _absent(entry, name)]:
            raise EntryMissing("incomplete", f"{_FIELD} of {key} lacks {', '.join(lacking)}")
    return entries


def merge(parts: Iterable[Mapping[str, Any]]) -> Json:
    """Put the entries of several legs together.

    Raises:
        EntriesConflict: one hash, two descriptors.
    """
    merged: Json = {}
    for part in parts:
        for key, entry in part.items():
            if merged.setdefault(key, entry) != entry:
                raise EntriesConflict(f"{_FIELD} of {key} was given twice and differs")
    return merged


def put(body: Json, params: Mapping[str, Any] | None) -> Json:
    """Return a leg's body that carries these params: at top level, where every route reads them since vLLM 0.29."""
    return {**body, _FIELD: params} if params else body


def key_of(item: str, entries: Collection[str]) -> str | None:
    """Return the key under which a hash stands: itself, or behind the name of a LoRA that changes the encoder."""
    if item in entries:
        return item
    return next((key for key in entries if key.endswith(f":{item}")), None)


def _absent(entry: Any, name: str) -> bool:
    return not isinstance(entry, dict) or entry.get(name) in (None, "")
