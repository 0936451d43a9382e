"""``data:`` URIs: read, checked, written. Only the base64 form, which is the only one that vLLM takes.

Source: RFC 2397; vLLM 0.33 ``multimodal/media/connector.py`` (the form) and ``video.py`` (``video/jpeg`` is a list of
frames, with commas between them).
"""

from __future__ import annotations

import string
from base64 import b64encode
from typing import NamedTuple

from envelope.media_types import Kind, kind_of

_FRAMES = "video/jpeg"
_MOST_FRAMES = 4096  # a list of as many empty ones as a body can hold would take half a gigabyte
_ALPHABET = f"{string.ascii_letters}{string.digits}+/".encode()


class Inline(NamedTuple):
    """Media that stands in the body: its type, without parameters, and its base64 text."""

    media_type: str
    payload: str


def is_data_uri(url: str) -> bool:
    return url[:5].lower() == "data:"


def parse(url: str) -> Inline:
    """Cut a data: URI into its media type and its base64 text, which is not looked at.

    Raises:
        ValueError: it is not of the form ``data:TYPE;base64,DATA``.
    """
    head, comma, payload = url[5:].partition(",")
    media_type, semicolon, encoding = head.rpartition(";")
    media_type = media_type.partition(";")[0].strip().lower()
    if not comma or not semicolon or encoding != "base64":
        raise ValueError("a data: URI must be written as data:TYPE;base64,DATA")
    if not media_type:
        raise ValueError("a data: URI must name its media type, such as data:image/png;base64,DATA")
    return Inline(media_type, payload)


def decoded_bytes(kind: Kind, inline: Inline) -> int:
    """Return how many bytes some inline media is, once it is known to be valid base64 of that kind.

    Raises:
        ValueError: it is of another kind, or empty, or not base64.
    """
    if kind_of(inline.media_type) is not kind:
        raise ValueError(f"{_shown(inline.media_type)} is not the media type of {_wanted(kind)}")
    if inline.media_type != _FRAMES:
        return _decoded(inline.payload)
    if inline.payload.count(",") >= _MOST_FRAMES:
        raise ValueError(f"it is a video of more than {_MOST_FRAMES} frames")
    return sum(map(_decoded, inline.payload.split(",")))


def encode(data: bytes) -> str:
    return b64encode(data).decode("ascii")


def write(media_type: str, payload: str) -> str:
    return f"data:{media_type};base64,{payload}"


def _decoded(payload: str) -> int:
    """Return the size of what a text decodes to, without decoding it: other requests wait meanwhile.

    Strict as vLLM's own decoder: the standard alphabet, padded, without white space.
    """
    try:
        raw = payload.encode("ascii")
        data = raw.rstrip(b"=")
        padding = len(raw) - len(data)
        if len(raw) % 4 or padding > 2 or data.translate(None, _ALPHABET):
            raise ValueError
    except ValueError:  # UnicodeEncodeError is one
        raise ValueError("its data is not base64 (the standard alphabet, padded, without white space)") from None
    if not data:
        raise ValueError("its data is empty")
    return len(raw) // 4 * 3 - padding


def _wanted(kind: Kind) -> str:
    return "a PDF (application/pdf)" if kind is Kind.DOCUMENT else f"{kind} ({kind}/...)"


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
