"""``features`` of a rendered prompt: which media stands where in its token ids, by which hash, with which tensors.

Lists per modality (``image``, ``audio``, ``video``, ..) that run in parallel::

    {"mm_hashes": {"image": ["h1"]}, "mm_placeholders": {"image": [{"offset": 8, "length": 70}]},
     "kwargs_data": {"image": ["<base64 tensors>"]}, "mm_metadata": {"image": ["<base64, small>"]}}

``kwargs_data`` is what an encoder needs; ``mm_metadata`` is what sizes and positions the placeholders, all that a
worker needs which gets the encoder's output from elsewhere. Either may be null, as a whole or for one item.

vLLM 0.33 loses here which tokens of a placeholder are the media's and which only frame it. Models that have such
frames (Idefics3, PaliGemma) fail on its generate route, encode worker or not, and work on the OpenAI routes.

Source: vLLM 0.33 ``token_in_token_out/protocol.py`` (MultiModalFeatures), ``mm_features.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from envelope.json_codec import Json

_PAYLOADS = ("kwargs_data", "mm_metadata")


class FeaturesWrong(ValueError):
    """The features contradict themselves, the tokens, or the request; ``where`` is the path of what is wrong."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(f"{where} {why}")
        self.where = where


@dataclass(frozen=True, slots=True)
class Feature:
    """One piece of media in a prompt.

    Attributes:
        index: its place among those of its modality.
        tensors: what an encoder needs is there.
        metadata: what sizes and positions it is there.
    """

    modality: str
    index: int
    hash: str
    offset: int
    length: int
    tensors: bool
    metadata: bool


def check(features: Any, tokens: int, *, interleaved: bool = False) -> list[Feature]:
    """Return every item, in the order of the prompt.

    Args:
        features: as they were sent or rendered; None is a prompt of text.
        tokens: how many the prompt has.
        interleaved: ranges may share tokens: a video's sound stands inside the video.

    Raises:
        FeaturesWrong
    """
    if features is None:
        return []
    if not isinstance(features, dict):
        raise FeaturesWrong("features", "must be an object")
    hashes = _lists(features, "mm_hashes")
    places = _lists(features, "mm_placeholders")
    _check_parallel("mm_placeholders", places, hashes)
    payloads = {name: _payload(features, name, hashes) for name in _PAYLOADS}
    found = [
        Feature(
            modality,
            index,
            _hash(f"features.mm_hashes.{modality}[{index}]", each),
            *_range(f"features.mm_placeholders.{modality}[{index}]", places[modality][index], tokens),
            *(payloads[name].get(modality, [None] * len(row))[index] is not None for name in _PAYLOADS),
        )
        for modality, row in hashes.items()
        for index, each in enumerate(row)
    ]
    found.sort(key=lambda item: (item.offset, item.length))
    if not interleaved:
        _check_apart(found)
    return found


def check_counts(found: list[Feature], asked: Mapping[str, int]) -> None:
    """Hold the items of a rendered prompt against the request's media.

    Models may have modalities of their own (``vision_chunk`` is images and videos alike). Beside one of those it
    cannot be told which parts it stands for, so only kinds that the prompt has under their own name are compared.

    Args:
        asked: by kind, how many pieces of media the request holds.

    Raises:
        FeaturesWrong
    """
    counted: dict[str, int] = {}
    for item in found:
        counted[item.modality] = counted.get(item.modality, 0) + 1
    other_names = bool(counted.keys() - asked.keys())
    for kind, count in asked.items():
        if counted.get(kind, 0) != count and (kind in counted or not other_names):
            raise FeaturesWrong(
                f"features.mm_hashes.{kind}", f"has {counted.get(kind, 0)} items, and the request {count} of that kind"
            )


def normal(features: Json) -> Json:
    """Return rendered features, not checked yet, whose payloads have every modality.

    vLLM's renderer leaves a modality out of ``mm_metadata`` where it has none for it, and vLLM's generate route
    refuses that: null for each item says the same.
    """
    hashes = features.get("mm_hashes")
    for name in _PAYLOADS:
        payload = features.get(name)
        if isinstance(payload, dict) and isinstance(hashes, dict):
            nothing = {key: [None] * len(row) for key, row in hashes.items() if isinstance(row, list)}
            features = {**features, name: {**nothing, **payload}}
    return features


def without_tensors(features: Json, leave_out: Callable[[str], bool]) -> Json:
    """Return features without the tensors of those items whose hash is to be left out and that have metadata."""
    tensors, metadata = features.get("kwargs_data"), features.get("mm_metadata")
    if not tensors or not metadata:
        return features
    hashes = features["mm_hashes"]
    kept = {
        modality: [
            None if small is not None and leave_out(each) else full
            for each, full, small in zip(hashes[modality], row, metadata[modality], strict=True)
        ]
        for modality, row in tensors.items()
    }
    return {**features, "kwargs_data": kept if any(item is not None for row in kept.values() for item in row) else None}


def only(rendered: Json, item: Feature) -> tuple[list[int], Json]:
    """Return a prompt that holds one item and nothing else: its token ids and its features.

    The first token of the whole prompt stands before the placeholder, as models want one that begins a text.
    """
    features, token_ids = rendered["features"], rendered["token_ids"]
    modality, at = item.modality, item.index
    place = {**features["mm_placeholders"][modality][at], "offset": 1}
    one: Json = {"mm_hashes": {modality: [item.hash]}, "mm_placeholders": {modality: [place]}}
    for name in _PAYLOADS:
        payload = features.get(name)
        one[name] = None if payload is None or payload[modality][at] is None else {modality: [payload[modality][at]]}
    return [token_ids[0], *token_ids[item.offset : item.offset + item.length]], one


def _lists(features: Json, name: str) -> dict[str, list[Any]]:
    value = features.get(name)
    if not isinstance(value, dict):
        raise FeaturesWrong(f"features.{name}", "must be an object of lists, one for each modality")
    for modality, row in value.items():
        if not isinstance(row, list):
            raise FeaturesWrong(f"features.{name}.{modality}", "must be a list")
    return value


def _check_parallel(name: str, lists: Mapping[str, list[Any]], hashes: Mapping[str, list[Any]]) -> None:
    if lists.keys() != hashes.keys():
        raise FeaturesWrong(f"features.{name}", "must have the modalities of mm_hashes")
    for modality, row in lists.items():
        if len(row) != len(hashes[modality]):
            raise FeaturesWrong(
                f"features.{name}.{modality}", f"has {len(row)} items, and mm_hashes {len(hashes[modality])}"
            )


def _payload(features: Json, name: str, hashes: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    if features.get(name) is None:
        return {}
    lists = _lists(features, name)
    _check_parallel(name, lists, hashes)
    for where, item in _named(f"features.{name}", lists):
        if item is not None and not isinstance(item, str):
            raise FeaturesWrong(where, "must be a text (base64) or null")
    return lists


def _named(path: str, lists: Mapping[str, list[Any]]) -> Iterator[tuple[str, Any]]:
    return ((f"{path}.{modality}[{i}]", item) for modality, row in lists.items() for i, item in enumerate(row))


def _hash(where: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise FeaturesWrong(where, "must be a text that is not empty")
    return value


def _range(where: str, place: Any, tokens: int) -> tuple[int, int]:
    offset, length = (place.get("offset"), place.get("length")) if isinstance(place, dict) else (None, None)
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 1:
        raise FeaturesWrong(where, "must be an object with offset (0 or more) and length (1 or more)")
    if offset + length > tokens:
        raise FeaturesWrong(where, f"ends at {offset + length}, and the prompt has {tokens} tokens")
    return offset, length


def _check_apart(found: list[Feature]) -> None:
    for one, other in pairwise(found):
        if other.offset < one.offset + one.length:
            raise FeaturesWrong(
                f"features.mm_placeholders.{other.modality}[{other.index}]",
                f"overlaps {one.modality}[{one.index}]: each piece of media has tokens of its own",
            )
