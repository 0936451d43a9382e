"""What a route gets and what it gives: a call, and a whole answer or a stream of frames.

Routes build these; ``faults`` alone writes them to a socket, so every misbehaviour works on every route.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Received:
    """A request as it came in, for tests to look at.

    Attributes:
        headers: in order, repeated names kept, spelled as sent.
        body: parsed, or None if it is no JSON.
        at: ``time.monotonic()``.
    """

    method: str
    path: str
    headers: Headers
    raw: bytes
    body: Any
    at: float
    query: str = ""

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)


@dataclass(slots=True)
class Call:
    """A request whose body is a JSON object.

    Attributes:
        itl_s: seconds between tokens, for this request.
        created: Unix seconds, as answers show them.
    """

    received: Received
    body: dict[str, Any]
    itl_s: float = 0.0
    tokens_per_step: int = 1
    created: int = field(default_factory=lambda: int(time.time()))
    _random: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def id(self) -> str:
        """The request's id: ``X-Request-Id``, else the body's ``request_id``, else random; the same every time."""
        return self.received.header("x-request-id") or self.body.get("request_id") or self._random

    @property
    def wants_stream(self) -> bool:
        return bool(self.body.get("stream"))


@dataclass(frozen=True, slots=True)
class Frame:
    """One server-sent event.

    Attributes:
        data: a JSON object, or ``[DONE]`` as it is.
        spaced: written with Python's default separators, as the error events of some routes are.
    """

    data: Mapping[str, Any] | str
    event: str | None = None
    spaced: bool = False

    def encode(self) -> bytes:
        if isinstance(self.data, str):
            data = self.data.encode()
        elif self.spaced:
            data = json.dumps(self.data, ensure_ascii=False).encode()
        else:
            data = orjson.dumps(self.data)
        name = b"event: " + self.event.encode() + b"\n" if self.event else b""
        return name + b"data: " + data + b"\n\n"


DONE = Frame("[DONE]")


@dataclass(frozen=True, slots=True)
class Whole:
    """A JSON answer; a plain text if ``body`` is a string, and no body at all if it is None."""

    body: Any
    status: int = 200
    headers: Headers = ()


class Cut(Exception):
    """A route's stream ends here without an end: the connection is closed (``/v1/responses`` on an error)."""


@dataclass(frozen=True, slots=True)
class Stream:
    frames: AsyncGenerator[Frame, None]


Answer = Whole | Stream
