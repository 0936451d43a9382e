"""The media of a client's request: where it stands in each API's body, and the same body with it inlined.

Parts are judged by their keys as well as by their type, because workers do: beside a ``uuid``, or without a type, vLLM
takes whichever media key a part has. A type that is not known here is refused, so that no URL reaches a worker unseen.

Source: vLLM 0.33 ``renderers/chat_utils/chat_message.py`` (MM_PARSER_MAP), ``entrypoints/anthropic``,
``entrypoints/openai/responses``, ``entrypoints/scale_out/token_in_token_out`` (``content_parts``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from envelope.data_uri import Inline, is_data_uri, parse, write
from envelope.formats import Format
from envelope.media_types import Kind
from envelope.media_walk import map_parts, wrong

if TYPE_CHECKING:
    from envelope.errors import BadRequest
    from envelope.json_codec import Json


class Item(NamedTuple):
    """One piece of media.

    Attributes:
        where: the path of its part, such as ``messages[0].content[1]``.
        type: the part's type.
        source: the URL that it is to be fetched from, or what stands in the body.
    """

    where: str
    type: str
    kind: Kind
    source: str | Inline

    def wrong(self, why: str) -> BadRequest:
        return wrong(self.where, self.type, why)


Fetched = Mapping[tuple[Kind, str], Inline]

# Keys that hold a URL, bare or as {"url": ...}.
_URL_KEYS = {
    "image_url": Kind.IMAGE,
    "audio_url": Kind.AUDIO,
    "video_url": Kind.VIDEO,
    "file_url": Kind.DOCUMENT,
}
_TEXT = frozenset(("text", "input_text", "output_text", "refusal", "thinking", "tool_reference"))
# Tensors, inline always.
_EMBEDS = frozenset(("image_embeds", "audio_embeds", "video_embeds", "prompt_embeds"))
_NO_MEDIA = _TEXT | _EMBEDS | {"reasoning_text", "summary_text"}
_CHAT = _TEXT | _EMBEDS | {"image_url", "input_image", "audio_url", "input_audio", "video_url"}

_TYPES: dict[Format, frozenset[str]] = {
    Format.CHAT: _CHAT,
    Format.RESPONSES: _CHAT | _NO_MEDIA | {"input_file", "computer_screenshot"},
    Format.MESSAGES: frozenset(
        ("text", "image", "document", "thinking", "redacted_thinking", "tool_use", "tool_result", "tool_reference")
    )
    | {"tool_addition", "tool_removal", "search_result"},
    Format.GENERATE: frozenset(("image_url", "audio_url", "video_url")),
}
_SOURCES = {"image": Kind.IMAGE, "document": Kind.DOCUMENT}
_AUDIO_FORMAT = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]{0,30}", re.ASCII)


def items(api: Format, body: Json) -> list[Item]:
    """List the media of a body in the order in which it stands there.

    Raises:
        BadRequest: a part is of a type that is not known, or has no usable media; it is named.
    """
    found: list[Item] = []

    def look(where: str, part: Any) -> Any:
        found.extend(_items(api, where, part))
        return part

    map_parts(api, body, look)
    return found


def with_media(api: Format, body: Json, fetched: Fetched) -> Json:
    """Return a copy of the body with fetched media in the place of its URLs; what it shares with the body is unchanged.

    Args:
        fetched: by kind and URL.
    """

    def put(where: str, part: Any) -> Any:
        return _put(api, part, fetched) if isinstance(part, dict) else part

    return map_parts(api, body, put)


def _items(api: Format, where: str, part: Any) -> list[Item]:
    if not isinstance(part, dict):
        return []  # text, or the worker's to judge
    part_type = part.get("type")
    if part_type is None and api in (Format.CHAT, Format.RESPONSES):
        part_type = next((key for key in (*_URL_KEYS, "input_audio", *_EMBEDS) if part.get(key) is not None), None)
    if not isinstance(part_type, str):
        raise wrong(where, "no type", "a part must say its type")
    if part_type not in _TYPES[api]:
        raise wrong(where, _shown(part_type), "parts of this type are not handled here")
    if api is Format.MESSAGES:
        return _sourced(where, part_type, part)
    if api is Format.GENERATE:
        return _located(where, part_type, _URL_KEYS[part_type], part.get("url"), part)
    return _keyed(where, part_type, part)


def _keyed(where: str, part_type: str, part: Json) -> list[Item]:
    """Find media under the keys that OpenAI's APIs have for it."""
    found: list[Item] = []
    for key, kind in _URL_KEYS.items():
        value = part.get(key)
        if value is None or (key == "file_url" and part_type != "input_file"):
            continue
        found += _located(where, part_type, kind, value.get("url") if isinstance(value, dict) else value, part)
    if part.get("input_audio") is not None:
        found += _input_audio(where, part_type, part)
    if part_type == "input_file" and part.get("file_data") is not None:
        found.append(_file(where, part_type, part["file_data"]))
    if not found and part_type not in _NO_MEDIA and not _by_uuid(part):
        why = "files are not kept here; send its URL or its data" if part.get("file_id") else "it holds no media"
        raise wrong(where, part_type, why)
    return found


def _located(where: str, part_type: str, kind: Kind, url: Any, part: Json) -> list[Item]:
    if not url and _by_uuid(part):
        return []  # the worker has it already
    if not isinstance(url, str) or not url:
        raise wrong(where, part_type, "its URL must be a text")
    if not is_data_uri(url):
        return [Item(where, part_type, kind, url)]
    try:
        return [Item(where, part_type, kind, parse(url))]
    except ValueError as error:
        raise wrong(where, part_type, str(error)) from None


def _input_audio(where: str, part_type: str, part: Json) -> list[Item]:
    audio = part["input_audio"]
    data, named = (audio.get("data"), audio.get("format")) if isinstance(audio, dict) else (None, None)
    if not data and _by_uuid(part):
        return []
    if not isinstance(data, str) or not isinstance(named, str) or not _AUDIO_FORMAT.fullmatch(named):
        raise wrong(where, part_type, "input_audio must be an object with data (base64) and format, such as wav")
    return [Item(where, part_type, Kind.AUDIO, Inline(f"audio/{named.lower()}", data))]


def _file(where: str, part_type: str, data: Any) -> Item:
    """Return a file's data, which clients send as a data: URI or as bare base64."""
    if not isinstance(data, str):
        raise wrong(where, part_type, "file_data must be a text")
    if is_data_uri(data):
        return _located(where, part_type, Kind.DOCUMENT, data, {})[0]
    return Item(where, part_type, Kind.DOCUMENT, Inline("application/pdf", data))


def _sourced(where: str, part_type: str, part: Json) -> list[Item]:
    """Find the media of an Anthropic block under its ``source``."""
    if part_type not in _SOURCES:
        return []
    kind, source = _SOURCES[part_type], part.get("source")
    if not isinstance(source, dict):
        raise wrong(where, part_type, "it holds no source")
    form = source.get("type", "base64")
    if form == "url":
        return _located(where, part_type, kind, source.get("url"), {})
    if form == "base64":
        media_type, data = source.get("media_type"), source.get("data")
        if not isinstance(media_type, str) or not isinstance(data, str):
            raise wrong(where, part_type, "a base64 source must have media_type and data")
        return [Item(where, part_type, kind, Inline(media_type.lower(), data))]
    if kind is Kind.DOCUMENT and form in ("text", "content"):
        return []
    raise wrong(where, part_type, "its source must be of type url or base64")


def _put(api: Format, part: Json, fetched: Fetched) -> Json:
    if api is Format.MESSAGES:
        return _put_source(part, fetched)
    if api is Format.GENERATE:
        media = fetched.get((_URL_KEYS[part["type"]], part.get("url") or ""))
        return {**part, "url": write(*media)} if media else part
    for key, kind in _URL_KEYS.items():
        value = part.get(key)
        url = value.get("url") if isinstance(value, dict) else value
        media = fetched.get((kind, url)) if isinstance(url, str) else None
        if media is None:
            continue
        text = write(*media)
        if key == "file_url":
            part = {name: value for name, value in part.items() if name != key} | {"file_data": text}
        else:
            part = {**part, key: {**value, "url": text} if isinstance(value, dict) else text}
    return part


def _put_source(part: Json, fetched: Fetched) -> Json:
    source, kind = part.get("source"), _SOURCES.get(part.get("type", ""))
    if kind is None or not isinstance(source, dict) or source.get("type") != "url":
        return part
    media = fetched.get((kind, source["url"]))
    if media is None:
        return part
    return {**part, "source": {"type": "base64", "media_type": media.media_type, "data": media.payload}}


def _by_uuid(part: Json) -> bool:
    return part.get("uuid") is not None


def _shown(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
