"""The media of each API as parts of a chat message, in the order in which workers see it, and how much there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from envelope.errors import BadRequest
from envelope.features import Feature
from envelope.formats import Format
from envelope.media_items import check_kinds, counts, hashes_of, media_items
from envelope.media_types import Kind

Pure = Callable[..., Any]

CHAT, COMPLETIONS, RESPONSES, MESSAGES, GENERATE = Format

PNG = "data:image/png;base64,AAAA"
TEXT = {"type": "text", "text": "what is this?"}
IMAGE = {"type": "image_url", "image_url": {"url": PNG, "detail": "low"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "BBBB", "format": "wav"}}
VIDEO = {"type": "video_url", "video_url": {"url": "https://example.com/v.mp4"}}


def chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], **fields}


def block(data: str = "AAAA") -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def result(*blocks: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t", "content": list(blocks)}


def as_image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


FOUND: dict[str, tuple[Format, dict[str, Any], list[tuple[str, Kind, Any]]]] = {
    "chat": (
        CHAT,
        chat(TEXT, IMAGE, AUDIO, VIDEO),
        [
            ("messages[0].content[1]", Kind.IMAGE, IMAGE),
            ("messages[0].content[2]", Kind.AUDIO, AUDIO),
            ("messages[0].content[3]", Kind.VIDEO, VIDEO),
        ],
    ),
    "chat, bare": (
        CHAT,
        chat({"type": "input_image", "image_url": PNG}, {"audio_url": "https://a/b"}),
        [
            ("messages[0].content[0]", Kind.IMAGE, {"type": "input_image", "image_url": PNG}),
            ("messages[0].content[1]", Kind.AUDIO, {"audio_url": "https://a/b"}),
        ],
    ),
    "chat, in a worker's cache": (
        CHAT,
        chat({"type": "image_url", "image_url": None, "uuid": "u1"}, {"type": "input_audio", "uuid": "u2"}),
        [
            ("messages[0].content[0]", Kind.IMAGE, {"type": "image_url", "image_url": None, "uuid": "u1"}),
            ("messages[0].content[1]", Kind.AUDIO, {"type": "input_audio", "uuid": "u2"}),
        ],
    ),
    "chat, tensors": (
        CHAT,
        chat({"type": "image_embeds", "image_embeds": "x"}, {"type": "prompt_embeds", "data": "y"}),
        [
            ("messages[0].content[0]", Kind.IMAGE, {"type": "image_embeds", "image_embeds": "x"}),
        ],
    ),
    "a named text": (CHAT, chat({**TEXT, "uuid": "u"}), []),
    "text": (
        CHAT,
        {"messages": [{"role": "user", "content": "hi"}, {"role": "user", "content": [TEXT, "x", None]}]},
        [],
    ),
    "responses": (
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": [{"type": "input_image", "image_url": PNG, "detail": "auto"}]},
                {
                    "type": "function_call_output",
                    "output": [{"type": "input_file", "file_data": "data:application/pdf;base64,CC"}],
                },
            ]
        },
        [
            ("input[0].content[0]", Kind.IMAGE, {"type": "input_image", "image_url": PNG, "detail": "auto"}),
            (
                "input[1].output[0]",
                Kind.DOCUMENT,
                {"type": "input_file", "file_data": "data:application/pdf;base64,CC"},
            ),
        ],
    ),
    "messages, a tool's images first": (
        MESSAGES,
        {
            "system": [TEXT],
            "messages": [
                {"role": "user", "content": [block("AAAA")]},
                {
                    "role": "user",
                    "content": [block("BBBB"), result(TEXT, block("CCCC")), block("DDDD"), result(block("EEEE"))],
                },
            ],
        },
        [
            ("messages[0].content[0]", Kind.IMAGE, as_image("data:image/png;base64,AAAA")),
            ("messages[1].content[1].content[1]", Kind.IMAGE, as_image("data:image/png;base64,CCCC")),
            ("messages[1].content[3].content[0]", Kind.IMAGE, as_image("data:image/png;base64,EEEE")),
            ("messages[1].content[0]", Kind.IMAGE, as_image("data:image/png;base64,BBBB")),
            ("messages[1].content[2]", Kind.IMAGE, as_image("data:image/png;base64,DDDD")),
        ],
    ),
    "messages, by URL": (
        MESSAGES,
        chat({"type": "image", "source": {"type": "url", "url": "https://a/b.png"}}),
        [
            ("messages[0].content[0]", Kind.IMAGE, as_image("https://a/b.png")),
        ],
    ),
    "messages, a document": (
        MESSAGES,
        chat({"type": "document", "source": {"type": "url", "url": "https://a/b.pdf"}}),
        [
            (
                "messages[0].content[0]",
                Kind.DOCUMENT,
                {"type": "document", "source": {"type": "url", "url": "https://a/b.pdf"}},
            ),
        ],
    ),
    "messages, an image of the system": (
        MESSAGES,
        {"system": [block()], "messages": []},
        [
            ("system[0]", Kind.IMAGE, as_image(PNG)),
        ],
    ),
    "completions": (COMPLETIONS, {"prompt": "hi"}, []),
    "generate": (GENERATE, {"token_ids": [1], "content_parts": [{"type": "image_url", "url": PNG}]}, []),
}


@pytest.mark.parametrize(("api", "body", "found"), FOUND.values(), ids=FOUND)
def test_media_is_listed_as_parts_of_a_chat_message(
    pure: Pure, api: Format, body: dict[str, Any], found: list[tuple[str, Kind, Any]]
) -> None:
    listed = pure(media_items, api, body)
    assert [(item.where, item.kind, item.part) for item in listed] == found


def same(*parts: Any) -> list[int]:
    """Return the number of each part's media, counted from 0 as it is met."""
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(item.same, len(numbers)) for item in media_items(CHAT, chat(*parts))]


def test_the_same_media_is_known_by_what_it_is_and_by_its_name() -> None:
    other_detail = {"type": "image_url", "image_url": {"url": PNG, "detail": "high"}}
    as_other_type = {"type": "input_image", "image_url": PNG}
    assert same(IMAGE, IMAGE, other_detail, as_other_type) == [0, 0, 0, 0]
    assert same(IMAGE, as_image("data:image/png;base64,AAAB"), {**IMAGE, "uuid": "u"}, {**IMAGE, "uuid": "v"}) == [
        0,
        1,
        2,
        3,
    ]
    assert same(
        {"type": "audio_url", "audio_url": {"url": "https://a/b"}},
        {"type": "video_url", "video_url": {"url": "https://a/b"}},
    ) == [0, 1]
    named = {"type": "image_url", "uuid": "u"}
    assert same(named, dict(named), {**named, "uuid": "v"}) == [0, 0, 1]


@pytest.mark.parametrize("part", [{"type": "hologram"}, {"type": "image_url"}, {"type": "image_url", "image_url": 7}])
def test_what_cannot_be_read_is_refused_by_name(part: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        media_items(CHAT, chat(TEXT, part))
    assert caught.value.param == "messages[0].content[1]"


def test_a_part_can_be_refused_later_by_its_name() -> None:
    (item,) = media_items(CHAT, chat(IMAGE))
    error = item.wrong("it is too odd")
    assert (error.message, error.param) == (
        "messages[0].content[0] (image_url): it is too odd",
        "messages[0].content[0]",
    )


def test_media_is_counted_by_kind_and_a_videos_sound_when_it_is_asked_for(pure: Pure) -> None:
    body = chat(IMAGE, IMAGE, AUDIO, VIDEO)
    found = media_items(CHAT, body)
    assert pure(counts, body, found) == {"image": 2, "audio": 1, "video": 1}
    with_sound = {**body, "mm_processor_kwargs": {"use_audio_in_video": True}}
    assert pure(counts, with_sound, found) == {"image": 2, "audio": 2, "video": 1}
    assert counts({"mm_processor_kwargs": 7}, []) == {"image": 0, "audio": 0, "video": 0}


def named(**rows: list[str]) -> list[Feature]:
    """Return features in the order of a prompt in which each modality stands in its order."""
    return [
        Feature(modality, i, each, 10 * i, 1, tensors=True, metadata=True)
        for modality, row in rows.items()
        for i, each in enumerate(row)
    ]


def test_media_is_known_by_the_renderers_hashes_in_their_order(pure: Pure) -> None:
    body = chat(AUDIO, IMAGE, TEXT, IMAGE)
    found = media_items(CHAT, body)
    in_prompt = sorted(named(image=["i1", "i2"], audio=["a1"]), key=lambda item: -item.index)
    assert [name for _, name in pure(hashes_of, body, found, in_prompt)] == ["a1", "i1", "i2"]


@pytest.mark.parametrize(
    ("features", "fields"),
    [
        ([], {}),
        (named(vision_chunk=["c1", "c2"]), {}),
        (named(image=["i1"]), {}),
        (named(image=["i1", "i2"]), {"mm_processor_kwargs": {"use_audio_in_video": True}}),
    ],
)
def test_no_hash_is_guessed(features: list[Feature], fields: dict[str, Any]) -> None:
    body = chat(IMAGE, IMAGE, **fields)
    assert [name for _, name in hashes_of(body, media_items(CHAT, body), features)] == [None, None]


def test_documents_are_refused_by_name() -> None:
    check_kinds(media_items(CHAT, chat(IMAGE, AUDIO, VIDEO)))
    source = {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}
    found = media_items(MESSAGES, chat(TEXT, {"type": "document", "source": source}))
    with pytest.raises(BadRequest, match=r"messages\[0\]\.content\[1\] \(document\): the model is shown no documents"):
        check_kinds(found)
