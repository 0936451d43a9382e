"""``ec_transfer_params``: what an encode leg must leave, by connector; merged by hash; put where prefill reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from envelope.ec_transfer import EC_CONNECTORS, EntriesConflict, EntryMissing, key_of, merge, put, read_entries

Pure = Callable[..., Any]

NIXL, SHARED = EC_CONNECTORS["ec-nixl"], EC_CONNECTORS["ec-shared-storage"]

# As vLLM 0.33 writes it, with numbers of both kinds and a key that nobody here knows.
ENTRY = {
    "modality": "image",
    "item_indices": [0],
    "metadata": {"image_grid_thw": [1, 24, 24]},
    "peer_host": "10.0.0.9",
    "peer_port": 5502,
    "size_bytes": 2**53 + 1,
    "shape": [576, 2048],
    "brand_new": [1.5, None],
}
BARE = {"modality": "image", "item_indices": [0], "metadata": {}}


def reply(params: Any, finish: Any = "length") -> dict[str, Any]:
    return {"choices": [{"index": 0, "finish_reason": finish}], "ec_transfer_params": params}


GOOD: dict[str, tuple[Any, Any, Any, tuple[str, ...], Any]] = {
    "an entry, verbatim": (NIXL, reply({"h1": ENTRY}), "h1", (), {"h1": ENTRY}),
    "ended by a stop": (NIXL, reply({"h1": ENTRY}, "stop"), "h1", (), {"h1": ENTRY}),
    "an answer without choices": (NIXL, {"ec_transfer_params": {"h1": ENTRY}}, "h1", (), {"h1": ENTRY}),
    "odd choices": (NIXL, {"choices": [None], "ec_transfer_params": {"h1": ENTRY}}, "h1", (), {"h1": ENTRY}),
    "an answer of messages": (NIXL, {"choices": [], "ec_transfer_params": {"h1": ENTRY}}, "h1", (), {"h1": ENTRY}),
    "nulls and empty ones dropped": (
        NIXL,
        reply({"h1": ENTRY, "h2": None, "h3": {}}),
        "h1",
        ("h2", "h3"),
        {"h1": ENTRY},
    ),
    "others of the request kept": (
        NIXL,
        reply({"v1": ENTRY, "a1": ENTRY}),
        "v1",
        ("v1", "a1", "h9"),
        {"v1": ENTRY, "a1": ENTRY},
    ),
    "what the request does not hold dropped": (
        NIXL,
        reply({"h1": ENTRY, "zz": ENTRY}),
        "h1",
        ("h1", "h2"),
        {"h1": ENTRY},
    ),
    "nobody named it": (NIXL, reply({"h1": ENTRY}), None, (), {"h1": ENTRY}),
    "behind a LoRA's name": (NIXL, reply({"lora:h1": ENTRY}), "h1", (), {"lora:h1": ENTRY}),
    "a shared folder's entry": (SHARED, reply({"h1": BARE}), "h1", (), {"h1": BARE}),
    "a shared folder, null": (SHARED, reply(None), "h1", (), {}),
    "a shared folder, missing": (SHARED, {"choices": []}, "h1", (), {}),
    "a shared folder, a list": (SHARED, reply([]), "h1", (), {}),
    "a shared folder, a text": (SHARED, reply("x"), "h1", (), {}),
    "a shared folder, null for the item": (SHARED, reply({"h1": None}), "h1", (), {}),
}


@pytest.mark.parametrize(("connector", "given", "item", "known", "kept"), GOOD.values(), ids=GOOD)
def test_what_prefill_can_use_is_kept(
    pure: Pure, connector: Any, given: Any, item: Any, known: tuple[str, ...], kept: Any
) -> None:
    assert pure(read_entries, connector, given, item, known) == kept


BAD: dict[str, tuple[Any, Any, str]] = {
    "null": (NIXL, reply(None), "absent"),
    "missing": (NIXL, {"choices": []}, "absent"),
    "a list": (NIXL, reply([]), "absent"),
    "a list of entries": (NIXL, reply([ENTRY]), "absent"),
    "a text": (NIXL, reply("x"), "absent"),
    "empty": (NIXL, reply({}), "absent"),
    "null for the item": (NIXL, reply({"h1": None}), "absent"),
    "not cached, so without an address": (NIXL, reply({"h1": BARE}), "incomplete"),
    "half an address": (NIXL, reply({"h1": {**ENTRY, "peer_port": None}}), "incomplete"),
    "an entry that is a text": (NIXL, reply({"h1": "x"}), "incomplete"),
    "other media": (NIXL, reply({"h2": ENTRY}), "other_hash"),
    "other media in a shared folder": (SHARED, reply({"h2": BARE}), "other_hash"),
    "aborted": (NIXL, reply({"h1": ENTRY}, "abort"), "bad_finish"),
    "aborted in a shared folder": (SHARED, reply(None, "abort"), "bad_finish"),
    "a list for an answer": (NIXL, [], "not_an_object"),
}


@pytest.mark.parametrize(("connector", "given", "reason"), BAD.values(), ids=BAD)
def test_what_leads_nowhere_is_a_failure(pure: Pure, connector: Any, given: Any, reason: str) -> None:
    with pytest.raises(EntryMissing) as caught:
        pure(read_entries, connector, given, "h1")
    assert caught.value.reason == reason


def test_an_incomplete_entry_is_named_with_what_it_lacks() -> None:
    with pytest.raises(EntryMissing, match="ec_transfer_params of h1 lacks peer_host, peer_port"):
        read_entries(NIXL, reply({"h1": BARE}), "h1")


def test_entries_are_merged_by_hash_and_equal_ones_are_one(pure: Pure) -> None:
    assert pure(merge, [{"h1": ENTRY}, {}, {"h2": BARE}, {"h1": dict(ENTRY)}]) == {"h1": ENTRY, "h2": BARE}
    assert pure(merge, []) == {}


def test_two_descriptors_of_one_item_are_a_conflict() -> None:
    with pytest.raises(EntriesConflict, match="ec_transfer_params of h1 was given twice and differs"):
        merge([{"h1": ENTRY}, {"h1": {**ENTRY, "peer_port": 5503}}])


def test_params_stand_at_top_level_and_only_where_there_are_any(pure: Pure) -> None:
    body = {"model": "m", "sampling_params": {"extra_args": {"a": 1}}}
    assert pure(put, body, {"h1": ENTRY}) == {**body, "ec_transfer_params": {"h1": ENTRY}}
    assert put(body, None) is body
    assert put(body, {}) is body


def test_a_hash_is_found_under_a_loras_name_and_under_no_other() -> None:
    assert key_of("h1", {"h1": ENTRY, "lora:h1": ENTRY}) == "h1"
    assert key_of("h1", {"lora:h1": ENTRY}) == "lora:h1"
    assert key_of("h1", {"xh1": ENTRY, "h1:x": ENTRY}) is None
