"""data: URIs as vLLM reads them: base64 only, strictly, of a type that is named."""

from __future__ import annotations

import base64

import pytest

from envelope.data_uri import Inline, decoded_bytes, encode, is_data_uri, parse, write
from envelope.media_types import Kind

PNG = base64.b64encode(b"\x89PNG").decode()


@pytest.mark.parametrize(
    ("url", "inline"),
    [
        ("data:image/png;base64,AAAA", Inline("image/png", "AAAA")),
        ("DATA:Image/PNG;charset=x;base64,AAAA", Inline("image/png", "AAAA")),
        ("data:image/png;base64,", Inline("image/png", "")),
        ("data:video/jpeg;base64,AAAA,BBBB", Inline("video/jpeg", "AAAA,BBBB")),
    ],
)
def test_it_is_cut_into_type_and_data(url: str, inline: Inline) -> None:
    assert is_data_uri(url)
    assert parse(url) == inline


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("data:", "must be written as data:TYPE;base64,DATA"),
        ("data:image/png;base64", "must be written as data:TYPE;base64,DATA"),
        ("data:image/png,AAAA", "must be written as data:TYPE;base64,DATA"),
        ("data:image/png;BASE64,AAAA", "must be written as data:TYPE;base64,DATA"),
        ("data:image/png;base64;x=1,AAAA", "must be written as data:TYPE;base64,DATA"),
        ("data:;base64,AAAA", "must name its media type"),
        ("data:;charset=x;base64,AAAA", "must name its media type"),
    ],
)
def test_another_form_is_refused(url: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse(url)


def test_what_is_written_is_what_is_read() -> None:
    inline = parse(write("image/png", encode(b"\x00\xff" * 7)))
    assert inline.media_type == "image/png"
    assert base64.b64decode(inline.payload, validate=True) == b"\x00\xff" * 7


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 1000])
def test_its_size_is_that_of_the_bytes(size: int) -> None:
    assert decoded_bytes(Kind.IMAGE, Inline("image/png", encode(bytes(size)))) == size


def test_the_frames_of_a_video_add_up() -> None:
    assert decoded_bytes(Kind.VIDEO, Inline("video/jpeg", f"{PNG},{PNG}")) == 8


def test_a_video_of_very_many_frames_is_refused_before_they_are_listed() -> None:
    assert decoded_bytes(Kind.VIDEO, Inline("video/jpeg", ",".join([PNG] * 4096))) == 4 * 4096
    with pytest.raises(ValueError, match="it is a video of more than 4096 frames"):
        decoded_bytes(Kind.VIDEO, Inline("video/jpeg", "," * 4096))


@pytest.mark.parametrize(
    "payload",
    ["AAA", "AAAA=", "AA=A", "====", "A A A A ", "AAAA\n", "AA-_", "é", "AAAA,AAAA", "AAAA%3D", "\ud800AAA"],
)
def test_what_is_not_base64_is_refused(payload: str) -> None:
    with pytest.raises(ValueError, match="its data is not base64"):
        decoded_bytes(Kind.IMAGE, Inline("image/png", payload))


@pytest.mark.parametrize("payload", ["", "AAAA,,AAAA"])
def test_what_is_empty_is_refused(payload: str) -> None:
    with pytest.raises(ValueError, match="its data is empty"):
        decoded_bytes(Kind.VIDEO, Inline("video/jpeg", payload))


@pytest.mark.parametrize(
    ("kind", "media_type", "sentence"),
    [
        (Kind.IMAGE, "text/html", r"'text/html' is not the media type of image \(image/...\)"),
        (Kind.IMAGE, "image/svg+xml", "is not the media type of image"),
        (Kind.IMAGE, "application/octet-stream", "is not the media type of image"),
        (Kind.AUDIO, "video/mp4", "is not the media type of audio"),
        (Kind.DOCUMENT, "image/png", r"is not the media type of a PDF \(application/pdf\)"),
        (Kind.IMAGE, "x" * 100, r"'x{57}...' is not"),
    ],
)
def test_another_kind_is_refused(kind: Kind, media_type: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        decoded_bytes(kind, Inline(media_type, PNG))
