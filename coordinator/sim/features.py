"""``features`` on the wire: written by render, checked and read by generate.

What real servers send as tensors is here the media itself, beside the identity and the size that it must have: so a
list in the wrong order, or one item in another's place, is found out.

Source: vLLM 0.33 ``token_in_token_out/protocol.py``, ``mm_features.py``, ``serving.py`` (cache handles).
"""

from __future__ import annotations

import base64
import itertools
import json
from typing import TYPE_CHECKING, Any

from coordinator.sim.media import PADS, Media
from coordinator.sim.refusals import Refusal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from coordinator.sim.schema import Schema

_PAYLOADS = ("kwargs_data", "mm_metadata")


def written(media: Sequence[Media], *, payload: bool) -> dict[str, Any] | None:
    """Return the features of a rendered prompt; null for text.

    Args:
        payload: ``mm_payload`` is not ``none``.
    """
    if not media:
        return None
    features: dict[str, Any] = {"mm_hashes": {}, "mm_placeholders": {}}
    features |= {name: {} if payload else None for name in _PAYLOADS}
    for item in media:
        features["mm_hashes"].setdefault(item.modality, []).append(item.hash)
        place = {"offset": item.offset, "length": item.rows}
        features["mm_placeholders"].setdefault(item.modality, []).append(place)
        if payload:
            assert item.data is not None
            small = {"hash": item.hash, "rows": item.rows}
            whole = {**small, "data": base64.b64encode(item.data).decode()}
            features["kwargs_data"].setdefault(item.modality, []).append(_packed(whole))
            features["mm_metadata"].setdefault(item.modality, []).append(_packed(small))
    return features


def check_schema(schema: Schema) -> None:
    """Report what pydantic refuses of ``features``, and of what stands beside it."""
    features, body = schema.body.get("features"), schema.body
    if features is None:
        return
    if body.get("content_parts"):
        schema.invalid("body", "content_parts and features are mutually exclusive", body)
        return
    for name in ("mm_hashes", "mm_placeholders"):
        if not _is_lists(features.get(name)):
            schema.wrong(f"body.features.{name}", "dict_type", "Input should be a valid dictionary", features.get(name))
            return
    fault = _fault(features)
    if fault is not None:
        schema.invalid("body.features", fault, features)
    elif _last(features) > len(body["token_ids"]):
        schema.invalid("body", "mm_placeholders must remain within the token_ids sequence", body)
    elif _metadata_alone(features) and not body.get("ec_transfer_params"):
        schema.invalid("body", "metadata-only multimodal items require ec_transfer_params", body)


def read(features: Mapping[str, Any] | None, token_ids: Sequence[int]) -> tuple[Media, ...]:
    """Return the items of a prompt whose features have passed ``check_schema``, in its order.

    Raises:
        Refusal: an item is not what its hash or its placeholder says, or stands where the prompt has other tokens.
    """
    if features is None:
        return ()
    found = []
    for modality, hashes in features["mm_hashes"].items():
        for at, hash in enumerate(hashes):
            place = features["mm_placeholders"][modality][at]
            offset, rows = place["offset"], place["length"]
            given = [
                _unpacked(((features.get(name) or {}).get(modality) or [None] * len(hashes))[at]) for name in _PAYLOADS
            ]
            for item in given:
                if item is not None and (item["hash"], item["rows"]) != (hash, rows):
                    raise Refusal(f"multimodal item {modality}[{at}] does not match mm_hash {hash!r}")
            if any(id != PADS.get(modality) for id in token_ids[offset : offset + rows]):
                raise Refusal(f"the tokens of placeholder {modality}[{at}] are not those of that modality")
            whole, small = given
            data = base64.b64decode(whole["data"]) if whole else None
            found.append(Media(modality, hash, rows, data, sized=bool(whole or small), offset=offset))
    return tuple(sorted(found, key=lambda item: item.offset))


def _fault(features: Mapping[str, Any]) -> str | None:
    hashes, places = features["mm_hashes"], features["mm_placeholders"]
    if hashes.keys() != places.keys():
        return "mm_hashes and mm_placeholders must use the same modalities"
    for name in _PAYLOADS:
        if features.get(name) is not None and features[name].keys() != hashes.keys():
            return f"{name} must use the same modalities as mm_hashes"
    for modality, row in hashes.items():
        if not all(isinstance(hash, str) for hash in row):
            return "Input should be a valid string"
        if len(row) != len(places[modality]):
            return f"{modality} mm_hashes and mm_placeholders must have the same length"
        for name in _PAYLOADS:
            if features.get(name) is not None and len(features[name][modality]) != len(row):
                return f"{modality} {name} and mm_hashes must have the same length"
    spans = sorted((place["offset"], place["offset"] + place["length"]) for row in places.values() for place in row)
    if any(end > start for (_, end), (start, _) in itertools.pairwise(spans)):
        return "mm_placeholders must be globally non-overlapping and sorted"
    return None


def _last(features: Mapping[str, Any]) -> int:
    places: Iterable[Mapping[str, int]] = itertools.chain.from_iterable(features["mm_placeholders"].values())
    return max((place["offset"] + place["length"] for place in places), default=0)


def _metadata_alone(features: Mapping[str, Any]) -> bool:
    tensors = features.get("kwargs_data") or {}
    return any(
        small is not None and (tensors.get(modality) or [None] * len(row))[at] is None
        for modality, row in (features.get("mm_metadata") or {}).items()
        for at, small in enumerate(row)
    )


def _is_lists(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(row, list) for row in value.values())


def _packed(item: Mapping[str, Any]) -> str:
    return base64.b64encode(json.dumps(item).encode()).decode()


def _unpacked(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        item = json.loads(base64.b64decode(text, validate=True))
    except ValueError as error:
        raise Refusal("a multimodal item could not be decoded") from error
    return item if isinstance(item, dict) else None
