"""The media of each API's parts: found, judged, and replaced; what is not known is refused by name."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from envelope.data_uri import Inline
from envelope.errors import BadRequest
from envelope.formats import Format
from envelope.media_parts import items, with_media
from envelope.media_types import Kind

URL = "http://media.example/x"
DATA = "data:image/png;base64,AAAA"
MP4 = "data:video/mp4;base64,CCCC"
UUID = {"uuid": "u"}
CHAT, RESPONSES, MESSAGES, GENERATE = Format.CHAT, Format.RESPONSES, Format.MESSAGES, Format.GENERATE

# The same media under its URL, by kind, once it has been fetched.
FETCHED = {
    (Kind.IMAGE, URL): Inline("image/png", "AAAA"),
    (Kind.AUDIO, URL): Inline("audio/wav", "BBBB"),
    (Kind.VIDEO, URL): Inline("video/mp4", "CCCC"),
    (Kind.DOCUMENT, URL): Inline("application/pdf", "DDDD"),
}


def body_of(api: Format, part: Any) -> dict[str, Any]:
    if api is GENERATE:
        return {"token_ids": [1], "content_parts": ["text", part]}
    if api is RESPONSES:
        return {"input": [{"role": "user", "content": ["text", part]}]}
    return {"messages": [{"role": "user", "content": ["text", part]}]}


def where(api: Format) -> str:
    return {GENERATE: "content_parts[1]", RESPONSES: "input[0].content[1]"}.get(api, "messages[0].content[1]")


def source(**fields: Any) -> dict[str, Any]:
    return {"source": fields}


IMAGE_SOURCE = source(type="base64", media_type="image/png", data="AAAA")
PNG, PDF, WAV = Inline("image/png", "AAAA"), Inline("application/pdf", "AAAA"), Inline("audio/wav", "AAAA")
PDF_SOURCE = source(type="base64", media_type="application/pdf", data="DDDD")

REPLACED: list[tuple[Format, dict[str, Any], Kind, dict[str, Any]]] = [
    (CHAT, {"type": "image_url", "image_url": {"url": URL, "detail": "low"}, "uuid": "u"}, Kind.IMAGE,
     {"type": "image_url", "image_url": {"url": DATA, "detail": "low"}, "uuid": "u"}),
    (CHAT, {"type": "image_url", "image_url": URL}, Kind.IMAGE, {"type": "image_url", "image_url": DATA}),
    (CHAT, {"image_url": URL}, Kind.IMAGE, {"image_url": DATA}),
    (CHAT, {"type": "input_image", "image_url": URL}, Kind.IMAGE, {"type": "input_image", "image_url": DATA}),
    (CHAT, {"type": "text", "text": "x", "image_url": {"url": URL}} | UUID, Kind.IMAGE,
     {"type": "text", "text": "x", "image_url": {"url": DATA}} | UUID),
    (CHAT, {"type": "audio_url", "audio_url": {"url": URL}}, Kind.AUDIO,
     {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,BBBB"}}),
    (CHAT, {"type": "video_url", "video_url": {"url": URL}}, Kind.VIDEO,
     {"type": "video_url", "video_url": {"url": MP4}}),
    (RESPONSES, {"type": "input_image", "image_url": URL, "detail": "auto"}, Kind.IMAGE,
     {"type": "input_image", "image_url": DATA, "detail": "auto"}),
    (RESPONSES, {"type": "input_file", "file_url": URL, "filename": "a.pdf"}, Kind.DOCUMENT,
     {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,DDDD"}),
    (MESSAGES, {"type": "image", **source(type="url", url=URL), "cache_control": {"type": "ephemeral"}}, Kind.IMAGE,
     {"type": "image", **IMAGE_SOURCE, "cache_control": {"type": "ephemeral"}}),
    (MESSAGES, {"type": "document", **source(type="url", url=URL), "title": "t"}, Kind.DOCUMENT,
     {"type": "document", **PDF_SOURCE, "title": "t"}),
    (MESSAGES, {"type": "tool_result", "content": [{"type": "image", **source(type="url", url=URL)}]}, Kind.IMAGE,
     {"type": "tool_result", "content": [{"type": "image", **IMAGE_SOURCE}]}),
    (GENERATE, {"type": "image_url", "url": URL}, Kind.IMAGE, {"type": "image_url", "url": DATA}),
    (GENERATE, {"type": "video_url", "url": URL}, Kind.VIDEO, {"type": "video_url", "url": MP4}),
]  # fmt: skip


@pytest.mark.parametrize(("api", "part", "kind", "new"), REPLACED)
def test_a_url_is_found_and_replaced_in_a_copy(api: Format, part: Any, kind: Kind, new: Any) -> None:
    body = body_of(api, part)
    before = copy.deepcopy(body)
    (item,) = items(api, body)
    assert (item.kind, item.source) == (kind, URL)
    assert item.where.startswith(where(api))
    assert with_media(api, body, FETCHED) == body_of(api, new)
    assert body == before
    (item,) = items(api, with_media(api, body, FETCHED))
    assert item.source == FETCHED[kind, URL]


@pytest.mark.parametrize(("api", "part", "kind", "new"), REPLACED)
def test_what_was_not_fetched_stays(api: Format, part: Any, kind: Kind, new: Any) -> None:
    body = body_of(api, part)
    assert with_media(api, body, {}) is body


INLINE: list[tuple[Format, dict[str, Any], Kind, Inline]] = [
    (CHAT, {"type": "image_url", "image_url": {"url": DATA}}, Kind.IMAGE, PNG),
    (CHAT, {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "WAV"}}, Kind.AUDIO, WAV),
    (CHAT, {"input_audio": {"data": "AAAA", "format": "mp3"}}, Kind.AUDIO, Inline("audio/mp3", "AAAA")),
    (RESPONSES, {"type": "input_image", "image_url": DATA}, Kind.IMAGE, PNG),
    (RESPONSES, {"type": "input_file", "file_data": "data:application/pdf;base64,AAAA"}, Kind.DOCUMENT, PDF),
    (RESPONSES, {"type": "input_file", "file_data": "AAAA"}, Kind.DOCUMENT, PDF),
    (MESSAGES, {"type": "image", **source(type="base64", media_type="Image/PNG", data="AAAA")}, Kind.IMAGE, PNG),
    (MESSAGES, {"type": "image", **source(media_type="image/png", data="AAAA")}, Kind.IMAGE, PNG),
    (MESSAGES, {"type": "image", **source(type="url", url=DATA)}, Kind.IMAGE, PNG),
    (GENERATE, {"type": "image_url", "url": DATA}, Kind.IMAGE, PNG),
]  # fmt: skip


@pytest.mark.parametrize(("api", "part", "kind", "inline"), INLINE)
def test_what_is_inline_is_found_and_stays(api: Format, part: Any, kind: Kind, inline: Inline) -> None:
    body = body_of(api, part)
    (item,) = items(api, body)
    assert (item.kind, item.source) == (kind, inline)
    assert with_media(api, body, FETCHED) is body


NO_MEDIA: list[tuple[Format, Any]] = [
    (CHAT, "text"),
    (CHAT, None),
    (CHAT, {"type": "text", "text": "see http://a.example/", "image_url": None}),
    (CHAT, {"type": "refusal", "refusal": "no"}),
    (CHAT, {"type": "thinking", "thinking": "hm"}),
    (CHAT, {"type": "image_embeds", "image_embeds": "AAAA"}),
    (CHAT, {"image_embeds": "AAAA"}),
    (CHAT, {"type": "prompt_embeds", "data": "AAAA"}),
    (CHAT, {"type": "image_url", "image_url": None} | UUID),
    (CHAT, {"type": "image_url"} | UUID),
    (CHAT, {"type": "image_url", "image_url": {"url": None}} | UUID),
    (CHAT, {"type": "input_audio", "input_audio": {"data": "", "format": ""}} | UUID),
    (RESPONSES, {"type": "output_text", "text": "x"}),
    (RESPONSES, {"type": "reasoning_text", "text": "x"}),
    (MESSAGES, {"type": "text", "text": "x"}),
    (MESSAGES, {"type": "tool_use", "id": "t", "name": "n", "input": {"image_url": URL}}),
    (MESSAGES, {"type": "document", **source(type="text", media_type="text/plain", data="x")}),
    (MESSAGES, {"type": "document", **source(type="content", content="x")}),
    (MESSAGES, {"type": "search_result", "source": "http://a.example/", "content": []}),
    (GENERATE, {"type": "image_url", "url": None} | UUID),
]


@pytest.mark.parametrize(("api", "part"), NO_MEDIA)
def test_what_holds_no_media_passes_untouched(api: Format, part: Any) -> None:
    body = body_of(api, part)
    assert items(api, body) == []
    assert with_media(api, body, FETCHED) is body


UNKNOWN = "parts of this type are not handled here"
NO_TYPE = "a part must say its type"
EMPTY = "it holds no media"
BAD_URL = "its URL must be a text"
AUDIO = "input_audio must be an object with data (base64) and format, such as wav"
FORM = "a data: URI must be written as data:TYPE;base64,DATA"
SOURCE = "its source must be of type url or base64"
BASE64 = "a base64 source must have media_type and data"
KEPT = "files are not kept here; send its URL or its data"

REFUSED: list[tuple[Format, Any, str, str]] = [
    (CHAT, {"type": "foo"}, "foo", UNKNOWN),
    (CHAT, {"type": "f" * 99}, "f" * 57 + "...", UNKNOWN),
    (CHAT, {"type": "image", "image": URL}, "image", UNKNOWN),
    (CHAT, {"type": "image_pil", "image_pil": "x"}, "image_pil", UNKNOWN),
    (CHAT, {"type": "file", "file": {"file_data": "AAAA"}}, "file", UNKNOWN),
    (CHAT, {"type": "foo", "image_url": URL}, "foo", UNKNOWN),
    (CHAT, {"text": "x"}, "no type", NO_TYPE),
    (CHAT, {}, "no type", NO_TYPE),
    (CHAT, {"type": 5}, "no type", NO_TYPE),
    (CHAT, {"type": ["image_url"]}, "no type", NO_TYPE),
    (CHAT, {"type": "image_url"}, "image_url", EMPTY),
    (CHAT, {"type": "image_url", "image_url": None}, "image_url", EMPTY),
    (CHAT, {"type": "image_url", "image_url": {}}, "image_url", BAD_URL),
    (CHAT, {"type": "image_url", "image_url": {"url": 5}}, "image_url", BAD_URL),
    (CHAT, {"type": "image_url", "image_url": ""}, "image_url", BAD_URL),
    (CHAT, {"type": "image_url", "image_url": [URL]}, "image_url", BAD_URL),
    (CHAT, {"type": "image_url", "image_url": "data:image/png,x"}, "image_url", FORM),
    (CHAT, {"type": "input_audio", "input_audio": URL}, "input_audio", AUDIO),
    (CHAT, {"type": "input_audio", "input_audio": {"data": "AAAA"}}, "input_audio", AUDIO),
    (CHAT, {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav;base64,"}}, "input_audio", AUDIO),
    (CHAT, {"type": "input_audio", "input_audio": {"data": 5, "format": "wav"}}, "input_audio", AUDIO),
    (RESPONSES, {"type": "input_image", "file_id": "f"}, "input_image", KEPT),
    (RESPONSES, {"type": "input_file", "file_id": "f"}, "input_file", KEPT),
    (RESPONSES, {"type": "input_file", "file_data": 5}, "input_file", "file_data must be a text"),
    (RESPONSES, {"type": "image", **source(type="url", url=URL)}, "image", UNKNOWN),
    (MESSAGES, {"type": "image_url", "image_url": {"url": URL}}, "image_url", UNKNOWN),
    (MESSAGES, {"image_url": URL}, "no type", NO_TYPE),
    (MESSAGES, {"type": "image"}, "image", "it holds no source"),
    (MESSAGES, {"type": "image", "source": URL}, "image", "it holds no source"),
    (MESSAGES, {"type": "image", **source(type="url")}, "image", BAD_URL),
    (MESSAGES, {"type": "image", **source(type="file", file_id="f")}, "image", SOURCE),
    (MESSAGES, {"type": "image", **source(type="text", data="x")}, "image", SOURCE),
    (MESSAGES, {"type": "image", **source(type=["url"])}, "image", SOURCE),
    (MESSAGES, {"type": "image", **source(type="base64", data="AAAA")}, "image", BASE64),
    (GENERATE, {"type": "input_image", "url": URL}, "input_image", UNKNOWN),
    (GENERATE, {"url": URL}, "no type", NO_TYPE),
    (GENERATE, {"type": "image_url", "image_url": {"url": URL}}, "image_url", BAD_URL),
]  # fmt: skip


@pytest.mark.parametrize(("api", "part", "named", "why"), REFUSED)
def test_what_cannot_be_handled_is_refused_by_name(api: Format, part: Any, named: str, why: str) -> None:
    with pytest.raises(BadRequest) as caught:
        items(api, body_of(api, part))
    assert caught.value.message == f"{where(api)} ({named}): {why}"
    assert caught.value.param == where(api)


def test_media_come_in_the_order_in_which_they_stand() -> None:
    parts = [{"type": "image_url", "image_url": {"url": f"http://a.example/{i}"}} for i in range(3)]
    body = {"messages": [{"content": parts[:2]}, {"content": parts[2:]}]}
    assert [item.source for item in items(CHAT, body)] == [f"http://a.example/{i}" for i in range(3)]


def test_a_part_with_several_urls_keeps_none() -> None:
    """Which of them a worker would take is its own affair."""
    part = {"type": "image_url", "image_url": {"url": URL}, "video_url": URL, "audio_url": {"url": URL}, "uuid": "u"}
    body = body_of(CHAT, part)
    assert [item.kind for item in items(CHAT, body)] == [Kind.IMAGE, Kind.AUDIO, Kind.VIDEO]
    assert URL not in json.dumps(with_media(CHAT, body, FETCHED))


def test_completions_have_no_media() -> None:
    assert items(Format.COMPLETIONS, {"prompt": URL}) == []
