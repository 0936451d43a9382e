"""The media of a client's request as parts of a chat message: what an encode leg is sent, and what is counted.

Source: vLLM 0.33 ``entrypoints/anthropic/serving.py`` (the order of a tool's images), ``renderers/chat_utils``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from envelope.data_uri import write
from envelope.formats import Format
from envelope.json_codec import dumps
from envelope.media_parts import items
from envelope.media_types import Kind
from envelope.media_walk import map_parts, wrong

if TYPE_CHECKING:
    from collections.abc import Iterator

    from envelope.errors import BadRequest
    from envelope.features import Feature
    from envelope.json_codec import Json
    from envelope.media_parts import Item

ENCODED = (Kind.IMAGE, Kind.AUDIO, Kind.VIDEO)

# Tensors, and what a worker has in its cache by the client's own name, are media as well; neither holds a URL.
_EMBEDS = {f"{kind}_embeds": kind for kind in ENCODED}
_URL_PARTS = {kind: f"{kind}_url" for kind in ENCODED}
_BY_NAME = {
    **{name: kind for kind, name in _URL_PARTS.items()},
    "input_image": Kind.IMAGE,
    "input_audio": Kind.AUDIO,
    **_EMBEDS,
}

_IN_MESSAGE = re.compile(r"messages\[(\d+)\]\.content\[\d+\](\.)?")


class MediaItem(NamedTuple):
    """One piece of media.

    Attributes:
        where: the path of its part, such as ``messages[0].content[1]``.
        type: its part's type.
        part: it alone, as a part of a chat message.
        same: equal for parts that hold the same media.
    """

    where: str
    type: str
    kind: Kind
    part: Json
    same: tuple[Any, ...]

    def wrong(self, why: str) -> BadRequest:
        return wrong(self.where, self.type, why)


def media_items(api: Format, body: Json) -> list[MediaItem]:
    """List the media of a body in the order in which workers see it.

    Raises:
        BadRequest: a part is of a type that is not known, or has no usable media; it is named.
    """
    if api in (Format.COMPLETIONS, Format.GENERATE):
        return []  # text alone, and media that has been rendered or is a worker's to fetch
    located: dict[str, list[Item]] = {}
    for item in items(api, body):
        located.setdefault(item.where, []).append(item)
    found: list[MediaItem] = []

    def look(where: str, part: Any) -> Any:
        if where in located:
            found.extend(_of_item(api, item, part) for item in located[where])
        elif isinstance(part, dict) and (kind := _kind_of(part)) is not None:
            found.append(MediaItem(where, str(part.get("type")), kind, part, (kind, dumps(part))))
        return part

    map_parts(api, body, look)
    # The images of a message's tool results become a message of their own, before the one they came in.
    return sorted(found, key=lambda item: _place(item.where)) if api is Format.MESSAGES else found


def check_kinds(found: list[MediaItem]) -> None:
    """Refuse media that no worker makes anything of; the messages route of vLLM would drop it without a word.

    Raises:
        BadRequest: naming the part.
    """
    for item in found:
        if item.kind not in ENCODED:
            raise item.wrong("the model is shown no documents; send text, or pictures of the pages")


def hashes_of(body: Json, found: list[MediaItem], features: list[Feature]) -> Iterator[tuple[MediaItem, str | None]]:
    """Yield each piece of media with the hash that the renderer gave it, or None where that cannot be told.

    Lists of a modality are in the order of the request's media of that kind, unless a video counts twice.
    """
    by_kind: dict[str, list[str]] = {}
    for feature in sorted(features, key=lambda feature: feature.index):
        by_kind.setdefault(feature.modality, []).append(feature.hash)
    rows = {kind: iter(row) for kind, row in by_kind.items() if len(row) == sum(item.kind == kind for item in found)}
    for item in found:
        yield item, None if has_sound_in_video(body) else next(rows.get(item.kind, iter(())), None)


def counts(body: Json, found: list[MediaItem]) -> dict[str, int]:
    """Return how many items a renderer must have found, by modality."""
    asked = {str(kind): sum(item.kind is kind for item in found) for kind in ENCODED}
    if has_sound_in_video(body):
        asked[Kind.AUDIO] += asked[Kind.VIDEO]
    return asked


def has_sound_in_video(body: Json) -> bool:
    """Say whether each video counts as two items, its pictures and its sound, whose tokens are interleaved."""
    kwargs = body.get("mm_processor_kwargs")
    return isinstance(kwargs, dict) and bool(kwargs.get("use_audio_in_video"))


def _of_item(api: Format, item: Item, part: Any) -> MediaItem:
    name = part.get("uuid")
    same = (item.kind, name, item.source if isinstance(item.source, str) else item.source.payload)
    if api is Format.MESSAGES and item.kind in _URL_PARTS:
        url = item.source if isinstance(item.source, str) else write(*item.source)
        key = _URL_PARTS[item.kind]
        part = {"type": key, key: {"url": url}}
    return MediaItem(item.where, item.type, item.kind, part, same)


def _kind_of(part: Json) -> Kind | None:
    """Return the kind of a part that holds no URL and no data: tensors, or a name that a worker knows."""
    part_type = part.get("type")
    if part_type in _EMBEDS:
        return _EMBEDS[part_type]
    if part.get("uuid") is None and part_type is not None:
        return None
    return next((kind for key, kind in _BY_NAME.items() if key == part_type or key in part), None)


def _place(where: str) -> tuple[int, bool]:
    """Return the number of a part's message, and whether it is the message's own rather than a tool result's."""
    match = _IN_MESSAGE.match(where)
    return (int(match[1]), not match[2]) if match else (-1, True)
