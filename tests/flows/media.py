"""Requests that hold pictures, sound and video, and what simulated workers say of them."""

from __future__ import annotations

import base64
import re
from typing import Any

CAT, DOG, OWL = b"a cat in the sun", b"a dog in the rain, seen from behind", b"an owl, asleep"

# The shapes of ``coordinator`` fixtures with a render step, where they have one: each wire format of a leg.
FORMATS = ("openai", "text", "derender")


def uri(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def image(data: bytes = CAT, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri(data)}, **more}


def sound(data: bytes = b"la la la") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}


def film(data: bytes = b"a film of some length") -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": uri(data, "video/mp4")}}


def with_media(*parts: Any, text: str = "Say hello.", **fields: Any) -> dict[str, Any]:
    """Return a chat request; thinking is off unless the fields say otherwise."""
    content = [{"type": "text", "text": text}, *parts]
    thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], **thinking, **fields}


def shown(text: str) -> list[str]:
    """Return what an answer says that its model has seen: kind and hash of each piece, in order."""
    return re.findall(r"(?:image|audio|video) [0-9a-f]{6}", text.partition(". ")[0])
