"""Media that a prompt holds: its identity, how many tokens stand for it, and where.

The identity is a hash of the media's bytes and of everything that changes what becomes of them, so that two servers
agree exactly when they were sent the same. A URL is not fetched: its text stands for what is behind it.

Source: vLLM 0.33 ``renderers/chat_utils/chat_message.py``, ``multimodal/hasher.py``.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from coordinator.sim.refusals import Refusal, value_error

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from coordinator.sim.tokenizer import Tokenizer

# The embedding has three rows more than the tokenizer has tokens: these stand for media, and no text becomes them.
PADS = {"image": 1021, "audio": 1022, "video": 1023}

_KEYS = {
    "image_url": "image", "input_image": "image", "audio_url": "audio", "input_audio": "audio", "video_url": "video",
}  # fmt: skip
_BYTES_PER_TOKEN = 8
_MOST_TOKENS = 256

# Stands in a templated text where media will be; nobody writes it by accident.
_MARK = re.compile("\ue000media-([0-9]+)\ue001")


@dataclass(frozen=True, slots=True)
class Media:
    """One item of a prompt.

    Attributes:
        rows: tokens of its placeholder, which is how many rows its embedding has.
        data: its bytes; None where they are not here, so that no encoder can run on them.
        sized: what sizes and positions it is here.
        offset: of its placeholder in the prompt.
    """

    modality: str
    hash: str
    rows: int
    data: bytes | None
    sized: bool = True
    offset: int = -1

    @property
    def place(self) -> tuple[str, int, int]:
        return self.hash, self.offset, self.rows


def media_of(part: Any, body: Mapping[str, Any]) -> Media | None:
    """Read a content part; None if it is text.

    Args:
        body: of the request, for the options that change what the media becomes.

    Raises:
        Refusal: it is of an unknown type, or has no usable media.
    """
    if not isinstance(part, dict):
        return None
    key = part.get("type") or next((key for key in _KEYS if key in part), None)
    if key not in _KEYS:
        if "text" in part or part.get("type") in ("text", "thinking", "refusal", "tool_reference"):
            return None
        raise value_error(f"Unsupported chat content part type: {key!r}.", param="type", value=key)
    data = _data(key, part)
    modality = _KEYS[key]
    return Media(modality, _hash(modality, data, part.get("uuid"), body), _rows(data, body), data)


def mark(number: int) -> str:
    """Return the text that stands for the media of that number in a templated prompt."""
    return f"\ue000media-{number}\ue001"


def placed(vocabulary: Tokenizer, text: str, found: Sequence[Media]) -> tuple[list[int], tuple[Media, ...]]:
    """Tokenize a templated prompt: each mark becomes as many placeholder tokens as its media takes."""
    pieces = _MARK.split(text)
    token_ids = vocabulary.encode(pieces[0])
    there: list[Media] = []
    for number, after in zip(pieces[1::2], pieces[2::2], strict=True):
        item = found[int(number)]
        there.append(replace(item, offset=len(token_ids)))
        token_ids += [PADS[item.modality]] * item.rows + vocabulary.encode(after)
    return token_ids, tuple(there)


def shown(text: str, found: Sequence[Media]) -> str:
    """Return a templated prompt as people read it."""
    return _MARK.sub(lambda match: f"<{found[int(match[1])].modality}>", text)


def check_trusted(body: Mapping[str, Any], *, trusted: bool) -> None:
    """
    Raises:
        Refusal: the request changes how media is processed, and the server takes that from nobody.
    """
    for name in ("mm_processor_kwargs", "media_io_kwargs"):
        if body.get(name) and not trusted:
            raise value_error(
                f"Per-request {name} are disabled by default because they can change multimodal preprocessing "
                "resource usage. Start the server with --trust-request-mm-kwargs only when clients are trusted.",
                param=name,
            )


def _data(key: str, part: Mapping[str, Any]) -> bytes:
    value = part.get(key) or part.get("image_url" if key == "input_image" else key)
    if key == "input_audio" and isinstance(value, dict):
        return _decoded(value.get("data"))
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str) or not url:
        what = "is not in this server's cache" if part.get("uuid") else "holds no media"
        raise Refusal(f"The {key} part {what}.")
    if not url.startswith("data:"):
        return url.encode()
    return _decoded(url.partition(";base64,")[2])


def _decoded(text: Any) -> bytes:
    try:
        data = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except binascii.Error:
        data = b""
    if not data:
        raise Refusal("Failed to load media: the data is not base64, or empty.")
    return data


def _hash(modality: str, data: bytes, name: Any, body: Mapping[str, Any]) -> str:
    options = [modality, body.get("mm_processor_kwargs"), (body.get("media_io_kwargs") or {}).get(modality), name]
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
    digest.update(b"" if name else data)
    return digest.hexdigest()[:32]


def _rows(data: bytes, body: Mapping[str, Any]) -> int:
    most = (body.get("mm_processor_kwargs") or {}).get("max_pixels") or _MOST_TOKENS
    return min(1 + len(data) // _BYTES_PER_TOKEN, _MOST_TOKENS, most)
