"""Kinds of media, and what bytes are: told by how they begin, never by what a server calls them.

Only what a worker can open is known here. HTML, SVG and everything else that is text has no kind.

Source: the formats' own specifications; WHATWG MIME Sniffing, section 6, for images and containers.
"""

from __future__ import annotations

import re
from enum import StrEnum


class Kind(StrEnum):
    """What a part of a request may hold beside text."""

    IMAGE = "image"
    AUDIO = "audio"
    VIDEO = "video"
    DOCUMENT = "document"


NAMES: dict[Kind, str] = {
    Kind.IMAGE: "PNG, JPEG, GIF, WebP, BMP, TIFF, AVIF or HEIC image",
    Kind.AUDIO: "WAV, MP3, FLAC, Ogg, M4A, AAC or WebM audio",
    Kind.VIDEO: "MP4, WebM, MOV, AVI, Matroska or Ogg video",
    Kind.DOCUMENT: "PDF document",
}

# What servers say of bytes that they know nothing about.
_UNTOLD = frozenset(("", "application/octet-stream", "binary/octet-stream", "application/binary"))
_CONTAINERS = frozenset(("application/ogg", "application/mp4", "application/x-matroska"))

_MEDIA_TYPE = re.compile(r"[a-z0-9][a-z0-9!#$&^_.+-]*/[a-z0-9][a-z0-9!#$&^_.+-]*", re.ASCII)

_BEGINNINGS: tuple[tuple[bytes, str], ...] = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"II*\x00", "image/tiff"),
    (b"MM\x00*", "image/tiff"),
    (b"fLaC", "audio/flac"),
    (b"ID3", "audio/mpeg"),
    (b"%PDF-", "application/pdf"),
)

# "BM" alone begins many a text; the size of the second header is one of a few.
_BMP_HEADERS = frozenset((12, 40, 52, 56, 64, 108, 124))

_RIFF = {b"WEBP": "image/webp", b"WAVE": "audio/wav", b"AVI ": "video/x-msvideo"}

# The first brand of an ISO file (ISO/IEC 14496-12, section 4.3); any other one is MP4.
_BRANDS = {
    **dict.fromkeys((b"avif", b"avis"), ("image/avif",)),
    **dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx"), ("image/heic",)),
    **dict.fromkeys((b"mif1", b"msf1"), ("image/heif",)),
    **dict.fromkeys((b"M4A ", b"M4B ", b"M4P "), ("audio/mp4",)),
    b"qt  ": ("video/quicktime", "audio/mp4"),
}


def sniff(data: bytes) -> tuple[str, ...]:
    """Return the media types that bytes may be by how they begin: none, one, or a container's several."""
    for beginning, media_type in _BEGINNINGS:
        if data.startswith(beginning):
            return (media_type,)
    if data[:2] == b"BM" and int.from_bytes(data[14:18], "little") in _BMP_HEADERS:
        return ("image/bmp",)
    if data[:4] == b"RIFF":
        return (found,) if (found := _RIFF.get(data[8:12])) else ()
    if data[4:8] == b"ftyp":
        return _brand(data)
    if data[:4] == b"OggS":
        return ("audio/ogg", "video/ogg")
    if data[:4] == b"\x1a\x45\xdf\xa3":  # EBML; the name of what is inside stands in its header
        name = "webm" if b"webm" in data[:64] else "x-matroska"
        return (f"video/{name}", f"audio/{name}")
    return _frames(data)


def kind_of(media_type: str) -> Kind | None:
    """Return the kind that a media type names; None for SVG, which is text that can fetch and run things."""
    media_type = media_type.strip().lower()
    if media_type == "application/pdf":
        return Kind.DOCUMENT
    if not _MEDIA_TYPE.fullmatch(media_type):
        return None
    main, _, sub = media_type.partition("/")
    if sub.startswith("svg"):
        return None
    return Kind(main) if main in (Kind.IMAGE, Kind.AUDIO, Kind.VIDEO) else None


def check_declared(kind: Kind, media_type: str) -> None:
    """Refuse by a server's ``Content-Type`` alone what cannot be of that kind.

    Raises:
        ValueError: saying why, in words for the client.
    """
    if media_type in _UNTOLD or kind_of(media_type) is kind:
        return
    if kind in (Kind.AUDIO, Kind.VIDEO) and (
        media_type in _CONTAINERS or kind_of(media_type) in (Kind.AUDIO, Kind.VIDEO)
    ):
        return  # one container holds either, and servers name it by its file name
    raise ValueError(f"what its server sent is not called {_a(kind)}")


def settled_type(kind: Kind, data: bytes) -> str:
    """Return the media type of fetched bytes, which is the one that they begin like.

    Raises:
        ValueError: they are of no known format of that kind.
    """
    for media_type in sniff(data):
        if kind_of(media_type) is kind:
            return media_type
    raise ValueError(f"what its server sent is no {NAMES[kind]}")


def _brand(data: bytes) -> tuple[str, ...]:
    brand = data[8:12]
    if brand in (b"mif1", b"msf1"):  # a general brand first; the coding stands among the compatible ones
        compatible = {data[at : at + 4] for at in range(16, min(len(data), 64), 4)}
        if compatible & {b"avif", b"avis"}:
            return ("image/avif",)
    return _BRANDS.get(brand, ("video/mp4", "audio/mp4"))


def _frames(data: bytes) -> tuple[str, ...]:
    """Know MPEG audio, which may begin with its first frame (ISO/IEC 11172-3: 11 bits set, then valid fields)."""
    if len(data) < 3 or data[0] != 0xFF or data[1] & 0xE0 != 0xE0:
        return ()
    version, layer = data[1] >> 3 & 3, data[1] >> 1 & 3
    if layer == 0:
        return ("audio/aac",) if data[1] & 0xF6 == 0xF0 else ()
    bitrate, rate = data[2] >> 4, data[2] >> 2 & 3
    return () if version == 1 or bitrate in (0, 15) or rate == 3 else ("audio/mpeg",)


def _a(kind: Kind) -> str:
    return f"{'an' if kind in (Kind.IMAGE, Kind.AUDIO) else 'a'} {kind}"
