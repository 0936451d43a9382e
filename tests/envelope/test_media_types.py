"""What bytes are is told by how they begin; what a server says decides only what is refused unread."""

from __future__ import annotations

import pytest

from envelope.media_types import Kind, check_declared, kind_of, settled_type, sniff

MAGIC = {
    "image/png": b"\x89PNG\r\n\x1a\n" + bytes(8),
    "image/jpeg": b"\xff\xd8\xff\xe0\x00\x10JFIF",
    "image/gif": b"GIF89a" + bytes(8),
    "image/webp": b"RIFF\x24\x00\x00\x00WEBPVP8 ",
    "image/bmp": b"BM" + bytes(12) + (40).to_bytes(4, "little"),
    "image/tiff": b"II*\x00" + bytes(8),
    "image/avif": b"\x00\x00\x00\x20ftypavif\x00\x00\x00\x00avifmif1",
    "image/heic": b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic",
    "image/heif": b"\x00\x00\x00\x18ftypmif1\x00\x00\x00\x00mif1",
    "audio/wav": b"RIFF\x24\x00\x00\x00WAVEfmt ",
    "audio/mpeg": b"ID3\x04\x00\x00\x00\x00\x00\x00",
    "audio/flac": b"fLaC\x00\x00\x00\x22",
    "audio/ogg": b"OggS\x00\x02",
    "audio/mp4": b"\x00\x00\x00\x18ftypM4A \x00\x00\x00\x00",
    "audio/aac": b"\xff\xf1\x50\x80",
    "video/mp4": b"\x00\x00\x00\x18ftypisom\x00\x00\x02\x00isomiso2mp41",
    "video/quicktime": b"\x00\x00\x00\x14ftypqt  \x00\x00\x02\x00",
    "video/webm": b"\x1a\x45\xdf\xa3\x9f\x42\x82\x84webm",
    "video/x-matroska": b"\x1a\x45\xdf\xa3\xa3\x42\x82\x88matroska",
    "video/x-msvideo": b"RIFF\x24\x00\x00\x00AVI LIST",
    "application/pdf": b"%PDF-1.7\n",
}


@pytest.mark.parametrize(("media_type", "data"), MAGIC.items(), ids=list(MAGIC))
def test_each_format_is_known_by_its_beginning(media_type: str, data: bytes) -> None:
    kind = kind_of(media_type)
    assert kind is not None
    assert settled_type(kind, data) == media_type
    for other in set(Kind) - {kind_of(found) for found in sniff(data)}:
        with pytest.raises(ValueError, match="what its server sent is no "):
            settled_type(other, data)


@pytest.mark.parametrize("data", MAGIC.values(), ids=list(MAGIC))
def test_a_beginning_that_is_cut_short_is_no_fault_of_ours(data: bytes) -> None:
    for end in range(len(data)):
        sniff(data[:end])


@pytest.mark.parametrize(
    ("kind", "data", "media_type"),
    [
        (Kind.VIDEO, MAGIC["audio/ogg"], "video/ogg"),
        (Kind.AUDIO, MAGIC["video/mp4"], "audio/mp4"),
        (Kind.AUDIO, MAGIC["video/quicktime"], "audio/mp4"),
        (Kind.AUDIO, MAGIC["video/webm"], "audio/webm"),
        (Kind.AUDIO, b"\xff\xfb\x90\x64", "audio/mpeg"),
        (Kind.IMAGE, b"\x00\x00\x00\x1cftypmif1\x00\x00\x00\x00mif1avif", "image/avif"),
        (Kind.IMAGE, b"MM\x00*" + bytes(8), "image/tiff"),
    ],
)
def test_a_container_is_what_the_part_says(kind: Kind, data: bytes, media_type: str) -> None:
    assert settled_type(kind, data) == media_type


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<!DOCTYPE html><html>",
        b"<svg xmlns='http://www.w3.org/2000/svg'>",
        b"<?xml version='1.0'?><svg/>",
        b"BM is no bitmap",
        b"{}",
        b"MZ\x90\x00",
        b"#!/bin/sh",
        b"\xff\xff\xff\xff",
        b"\xff\xe8\x90\x64",  # a frame of the version that is reserved
        b"\xff\xfb\xf0\x64",  # a bit rate that is not
        b"RIFF\x24\x00\x00\x00ABCD",
    ],
)
def test_what_is_no_media_is_of_no_kind(data: bytes) -> None:
    assert sniff(data) == ()
    for kind in Kind:
        with pytest.raises(ValueError, match="what its server sent is no "):
            settled_type(kind, data)


@pytest.mark.parametrize(
    ("media_type", "kind"),
    [
        ("image/png", Kind.IMAGE),
        (" Image/JPEG ", Kind.IMAGE),
        ("audio/x-wav", Kind.AUDIO),
        ("video/mp4", Kind.VIDEO),
        ("application/pdf", Kind.DOCUMENT),
        ("image/svg+xml", None),
        ("text/html", None),
        ("image", None),
        ("image/", None),
        ("image/png;x=1", None),
        ("image/png,x", None),
        ("document/x", None),
        ("", None),
    ],
)
def test_a_media_type_names_a_kind_or_none(media_type: str, kind: Kind | None) -> None:
    assert kind_of(media_type) is kind


@pytest.mark.parametrize(
    ("kind", "declared"),
    [
        (Kind.IMAGE, "image/png"),
        (Kind.IMAGE, "image/anything"),
        (Kind.IMAGE, "application/octet-stream"),
        (Kind.IMAGE, "binary/octet-stream"),
        (Kind.IMAGE, ""),
        (Kind.AUDIO, "video/mp4"),
        (Kind.AUDIO, "application/ogg"),
        (Kind.VIDEO, "audio/ogg"),
        (Kind.DOCUMENT, "application/pdf"),
    ],
)
def test_what_may_be_of_the_kind_is_read(kind: Kind, declared: str) -> None:
    check_declared(kind, declared)


@pytest.mark.parametrize(
    ("kind", "declared", "sentence"),
    [
        (Kind.IMAGE, "text/html", "what its server sent is not called an image"),
        (Kind.IMAGE, "image/svg+xml", "what its server sent is not called an image"),
        (Kind.IMAGE, "video/mp4", "what its server sent is not called an image"),
        (Kind.IMAGE, "application/pdf", "what its server sent is not called an image"),
        (Kind.AUDIO, "image/png", "what its server sent is not called an audio"),
        (Kind.VIDEO, "text/plain", "what its server sent is not called a video"),
        (Kind.DOCUMENT, "text/html", "what its server sent is not called a document"),
    ],
)
def test_what_cannot_be_of_the_kind_is_not_read(kind: Kind, declared: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_declared(kind, declared)
