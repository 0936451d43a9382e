"""``features``: checked against itself, the tokens and the request; taken apart for the legs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from envelope.features import (
    Feature,
    FeaturesWrong,
    check,
    check_counts,
    normal,
    only,
    without_tensors,
)

Pure = Callable[..., Any]

IMAGES = {
    "mm_hashes": {"image": ["h1", "h2"], "audio": ["a1"]},
    "mm_placeholders": {
        "image": [{"offset": 1, "length": 3}, {"offset": 7, "length": 2, "is_embed": [True, False]}],
        "audio": [{"offset": 4, "length": 3}],
    },
    "kwargs_data": {"image": ["T1", "T2"], "audio": ["TA"]},
    "mm_metadata": {"image": ["m1", None], "audio": ["ma"]},
    "brand_new": 1,
}
TOKENS = [10, 91, 91, 91, 92, 92, 92, 91, 91, 11]


def features(**changes: Any) -> dict[str, Any]:
    """Return features of two images with some fields in place of the usual ones."""
    usual = {
        "mm_hashes": {"image": ["h1", "h2"]},
        "mm_placeholders": {"image": [{"offset": 1, "length": 3}, {"offset": 4, "length": 2}]},
        "kwargs_data": {"image": ["T1", "T2"]},
        "mm_metadata": {"image": ["m1", "m2"]},
    }
    return usual | changes


def test_items_come_in_the_order_of_the_prompt_with_what_is_there_of_them(pure: Pure) -> None:
    assert pure(check, IMAGES, len(TOKENS)) == [
        Feature("image", 0, "h1", 1, 3, tensors=True, metadata=True),
        Feature("audio", 0, "a1", 4, 3, tensors=True, metadata=True),
        Feature("image", 1, "h2", 7, 2, tensors=True, metadata=False),
    ]


GOOD: dict[str, tuple[Any, int]] = {
    "no features": (None, 0),
    "no items": ({"mm_hashes": {}, "mm_placeholders": {}}, 0),
    "a modality without items": ({"mm_hashes": {"image": []}, "mm_placeholders": {"image": []}}, 0),
    "no tensors and no metadata": (features(kwargs_data=None, mm_metadata=None), 2),
    "payloads left out": ({key: features()[key] for key in ("mm_hashes", "mm_placeholders")}, 2),
    "one item without tensors": (features(kwargs_data={"image": [None, "T2"]}), 2),
    "one hash twice": (features(mm_hashes={"image": ["h1", "h1"]}), 2),
    "up to the last token": (
        features(mm_placeholders={"image": [{"offset": 0, "length": 3}, {"offset": 3, "length": 3}]}),
        2,
    ),
    "a second item that stands first": (
        features(mm_placeholders={"image": [{"offset": 3, "length": 2}, {"offset": 0, "length": 2}]}),
        2,
    ),
}


@pytest.mark.parametrize(("given", "count"), GOOD.values(), ids=GOOD)
def test_what_a_worker_takes_is_taken(pure: Pure, given: Any, count: int) -> None:
    assert len(pure(check, given, 6)) == count


def places(*pairs: tuple[Any, Any]) -> dict[str, Any]:
    return {"image": [{"offset": offset, "length": length} for offset, length in pairs]}


BAD: dict[str, tuple[Any, str]] = {
    "a list": ([], "features must be an object"),
    "no hashes": (features(mm_hashes=None), "features.mm_hashes must be an object of lists, one for each modality"),
    "hashes as a list": (
        features(mm_hashes=["h1"]),
        "features.mm_hashes must be an object of lists, one for each modality",
    ),
    "a modality's hashes as a text": (features(mm_hashes={"image": "h1"}), "features.mm_hashes.image must be a list"),
    "no placeholders": (
        {"mm_hashes": {}},
        "features.mm_placeholders must be an object of lists, one for each modality",
    ),
    "another modality": (
        features(mm_placeholders={"audio": []}),
        "features.mm_placeholders must have the modalities of mm_hashes",
    ),
    "a placeholder too few": (
        features(mm_placeholders=places((1, 3))),
        "features.mm_placeholders.image has 1 items, and mm_hashes 2",
    ),
    "an empty hash": (
        features(mm_hashes={"image": ["h1", ""]}),
        "features.mm_hashes.image[1] must be a text that is not empty",
    ),
    "a hash that is a number": (
        features(mm_hashes={"image": [7, "h2"]}),
        "features.mm_hashes.image[0] must be a text that is not empty",
    ),
    "a hash that is null": (
        features(mm_hashes={"image": [None, "h2"]}),
        "features.mm_hashes.image[0] must be a text that is not empty",
    ),
    "a placeholder that is none": (
        features(mm_placeholders={"image": [None, [1, 2]]}),
        "features.mm_placeholders.image[0] must be an object with offset (0 or more) and length (1 or more)",
    ),
    "before the prompt": (
        features(mm_placeholders=places((-1, 3), (4, 2))),
        "features.mm_placeholders.image[0] must be an object with offset (0 or more) and length (1 or more)",
    ),
    "no tokens": (
        features(mm_placeholders=places((1, 0), (4, 2))),
        "features.mm_placeholders.image[0] must be an object with offset (0 or more) and length (1 or more)",
    ),
    "true is no number": (
        features(mm_placeholders=places((True, 1), (4, 2))),
        "features.mm_placeholders.image[0] must be an object with offset (0 or more) and length (1 or more)",
    ),
    "a fraction": (
        features(mm_placeholders=places((1.0, 1), (4, 2))),
        "features.mm_placeholders.image[0] must be an object with offset (0 or more) and length (1 or more)",
    ),
    "behind the prompt": (
        features(mm_placeholders=places((1, 3), (4, 3))),
        "features.mm_placeholders.image[1] ends at 7, and the prompt has 6 tokens",
    ),
    "overlapping": (
        features(mm_placeholders=places((1, 3), (3, 2))),
        "features.mm_placeholders.image[1] overlaps image[0]: each piece of media has tokens of its own",
    ),
    "one inside the other": (
        features(mm_placeholders=places((0, 6), (2, 1))),
        "features.mm_placeholders.image[1] overlaps image[0]: each piece of media has tokens of its own",
    ),
    "the same range twice": (
        features(mm_placeholders=places((1, 2), (1, 2))),
        "features.mm_placeholders.image[1] overlaps image[0]: each piece of media has tokens of its own",
    ),
    "tensors of another modality": (
        features(kwargs_data={"audio": []}),
        "features.kwargs_data must have the modalities of mm_hashes",
    ),
    "tensors too few": (
        features(kwargs_data={"image": ["T1"]}),
        "features.kwargs_data.image has 1 items, and mm_hashes 2",
    ),
    "tensors that are no text": (
        features(kwargs_data={"image": ["T1", 7]}),
        "features.kwargs_data.image[1] must be a text (base64) or null",
    ),
    "metadata too many": (
        features(mm_metadata={"image": ["m1", "m2", "m3"]}),
        "features.mm_metadata.image has 3 items, and mm_hashes 2",
    ),
    "metadata as a list": (
        features(mm_metadata=["m1"]),
        "features.mm_metadata must be an object of lists, one for each modality",
    ),
}


@pytest.mark.parametrize(("given", "sentence"), BAD.values(), ids=BAD)
def test_what_contradicts_itself_is_refused_by_its_place(pure: Pure, given: Any, sentence: str) -> None:
    with pytest.raises(FeaturesWrong) as caught:
        pure(check, given, 6)
    assert str(caught.value) == sentence
    assert sentence.startswith(caught.value.where)


def test_overlaps_across_modalities_are_seen_too() -> None:
    given = {
        "mm_hashes": {"image": ["h"], "audio": ["a"]},
        "mm_placeholders": {"image": [{"offset": 0, "length": 4}], "audio": [{"offset": 3, "length": 2}]},
    }
    with pytest.raises(FeaturesWrong, match=r"audio\[0\] overlaps image\[0\]"):
        check(given, 9)


def test_a_videos_sound_may_stand_inside_the_video() -> None:
    given = {
        "mm_hashes": {"video": ["v"], "audio": ["a"]},
        "mm_placeholders": {"video": [{"offset": 0, "length": 6}], "audio": [{"offset": 1, "length": 2}]},
    }
    assert len(check(given, 6, interleaved=True)) == 2


COUNTS: dict[str, tuple[dict[str, int], dict[str, int], str | None]] = {
    "as many": ({"image": 2, "audio": 1}, {"image": 2, "audio": 1, "video": 0}, None),
    "none": ({}, {"image": 0, "audio": 0, "video": 0}, None),
    "one too few": (
        {"image": 1},
        {"image": 2, "audio": 0, "video": 0},
        "features.mm_hashes.image has 1 items, and the request 2 of that kind",
    ),
    "one too many": (
        {"image": 1},
        {"image": 0, "audio": 0, "video": 0},
        "features.mm_hashes.image has 1 items, and the request 0 of that kind",
    ),
    "a kind left out": (
        {"image": 1},
        {"image": 1, "audio": 1, "video": 0},
        "features.mm_hashes.audio has 0 items, and the request 1 of that kind",
    ),
    "all left out": (
        {},
        {"image": 0, "audio": 0, "video": 1},
        "features.mm_hashes.video has 0 items, and the request 1 of that kind",
    ),
    "a model's own name": ({"vision_chunk": 3}, {"image": 1, "audio": 0, "video": 1}, None),
    "a model's own name beside ours": (
        {"vision_chunk": 3, "audio": 1},
        {"image": 1, "audio": 2, "video": 0},
        "features.mm_hashes.audio has 1 items, and the request 2 of that kind",
    ),
}


@pytest.mark.parametrize(("has", "asked", "sentence"), COUNTS.values(), ids=COUNTS)
def test_a_renderer_finds_what_the_request_holds(has: dict[str, int], asked: dict[str, int], sentence: Any) -> None:
    found = [
        Feature(modality, i, "h", 0, 1, tensors=True, metadata=False)
        for modality, count in has.items()
        for i in range(count)
    ]
    if sentence is None:
        check_counts(found, asked)
        return
    with pytest.raises(FeaturesWrong) as caught:
        check_counts(found, asked)
    assert str(caught.value) == sentence


def test_a_payload_gets_the_modalities_it_lacks(pure: Pure) -> None:
    given = {**IMAGES, "mm_metadata": {"audio": ["ma"]}}
    whole = pure(normal, given)
    assert whole["mm_metadata"] == {"audio": ["ma"], "image": [None, None]}
    assert {**whole, "mm_metadata": 0} == {**given, "mm_metadata": 0}
    assert normal(IMAGES) == IMAGES
    for odd in ({"mm_hashes": {"image": ["h"]}, "kwargs_data": None}, {"mm_hashes": 7, "kwargs_data": {}}, {}):
        assert normal(odd) == odd


LEFT_OUT: dict[str, tuple[set[str], dict[str, Any], Any]] = {
    "all that have metadata": ({"h1", "h2", "a1"}, IMAGES, {"image": [None, "T2"], "audio": [None]}),
    "one of them": ({"a1"}, IMAGES, {"image": ["T1", "T2"], "audio": [None]}),
    "none": (set(), IMAGES, IMAGES["kwargs_data"]),
    "all": ({"h1", "h2"}, features(), None),
    "no metadata": ({"h1", "h2"}, features(mm_metadata=None), {"image": ["T1", "T2"]}),
    "no tensors": ({"h1", "h2"}, features(kwargs_data=None), None),
}


@pytest.mark.parametrize(("hashes", "given", "kept"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_tensors_are_left_out_where_metadata_stands_in(
    pure: Pure, hashes: set[str], given: dict[str, Any], kept: Any
) -> None:
    small = pure(without_tensors, given, hashes.__contains__)
    assert small["kwargs_data"] == kept
    assert {**small, "kwargs_data": 0} == {**given, "kwargs_data": 0}


def test_one_item_becomes_a_prompt_of_its_own(pure: Pure) -> None:
    rendered = {"token_ids": TOKENS, "features": IMAGES}
    first, sound, second = check(IMAGES, len(TOKENS))
    assert pure(only, rendered, first) == (
        [10, 91, 91, 91],
        {
            "mm_hashes": {"image": ["h1"]},
            "mm_placeholders": {"image": [{"offset": 1, "length": 3}]},
            "kwargs_data": {"image": ["T1"]},
            "mm_metadata": {"image": ["m1"]},
        },
    )
    token_ids, alone = pure(only, rendered, second)
    assert token_ids == [10, 91, 91]
    assert alone["mm_placeholders"] == {"image": [{"offset": 1, "length": 2, "is_embed": [True, False]}]}
    assert (alone["kwargs_data"], alone["mm_metadata"]) == ({"image": ["T2"]}, None)
    assert pure(only, rendered, sound)[1]["kwargs_data"] == {"audio": ["TA"]}
    assert [len(check(pure(only, rendered, item)[1], item.length + 1)) for item in (first, sound, second)] == [1, 1, 1]
