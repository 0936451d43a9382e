"""Streams as clients see them: when the first token came, and the last, and how many there were.

Each client asks again as soon as it was answered. What has not ended when the time is over is cut, and counted as it
was seen until then.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools
import orjson

CHAT, GENERATE = "/v1/chat/completions", "/inference/v1/generate"
WINDOW = 512  # events at an answer's begin and end, to tell how its pace goes with its length

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Look outside.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def chat_body(number: int, tokens: int) -> dict[str, Any]:
    """Return a chat request that has a thought and tools to parse, and is answered with exactly so many tokens."""
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"Count to one hundred, number {number}."}],
        "tools": [TOOL],
        "max_tokens": tokens,
        "min_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def generate_body(number: int, tokens: int) -> dict[str, Any]:
    params = {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True, "temperature": 0}
    ids = [(number * 7 + at * 13) % 900 + 50 for at in range(40)]
    return {"model": "tiny", "token_ids": ids, "sampling_params": params, "stream": True, "output_mode": "tokens"}


@dataclass
class Seen:
    """One request. Times are of the monotonic clock; ``times`` are those of events with content.

    Attributes:
        events: how many there were, each token id for one.
        tokens: None where the stream did not tell.
    """

    began: float
    times: list[float] = field(default_factory=list)
    ended: float | None = None
    events: int = 0
    tokens: int | None = None
    error: str | None = None

    @property
    def ttft_ms(self) -> float | None:
        return (self.times[0] - self.began) * 1e3 if self.times else None

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token; a stream that came at once, or was cut, is told by what it had until then."""
        count = self.tokens or self.events
        if not self.times or count < 2:
            return None
        return (self.times[-1] - self.times[0]) * 1e3 / (count - 1)

    def gap_ms(self, *, late: bool) -> float | None:
        """Time per event among the first or the last ``WINDOW`` events, or the half of them where they were fewer."""
        size = min(WINDOW, len(self.times) // 2)
        if size < 2:
            return None
        times = self.times[-size:] if late else self.times[:size]
        return (times[-1] - times[0]) * 1e3 / (size - 1)


@dataclass
class Stream:
    """Reads one answer. An httptools parser calls it."""

    seen: Seen
    now: float = 0.0
    whole: bool = False
    _left: bytes = b""
    _status: int = 0
    parser: Any = None

    def on_body(self, data: bytes) -> None:
        *lines, self._left = (self._left + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip())

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            return
        event = orjson.loads(data)
        if "error" in event:
            self.seen.error = str(event["error"].get("message"))[:200]
            return
        if event.get("usage"):
            self.seen.tokens = event["usage"]["completion_tokens"]
        for choice in event.get("choices", ()):
            delta = choice.get("delta") or {}
            ids = choice.get("token_ids")
            if ids or any(delta.get(key) for key in ("content", "reasoning", "tool_calls")):
                self.seen.events += len(ids) if ids else 1
                self.seen.times.append(self.now)

    def on_message_complete(self) -> None:
        self.whole = True
        status = self.parser.get_status_code()
        if status != 200 and self.seen.error is None:
            self.seen.error = f"status {status}: {self._left[:200]!r}"


async def one(url: str, path: str, body: dict[str, Any], seen: Seen) -> None:
    """Send a request over a connection of its own, and read its answer to the end."""
    target = urlsplit(url)
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {target.netloc}\r\nConnection: close\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection(target.hostname, target.port)
    try:
        seen.began = time.monotonic()
        writer.write(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        stream = Stream(seen)
        stream.parser = httptools.HttpResponseParser(stream)
        while not stream.whole:
            data = await reader.read(65536)
            stream.now = time.monotonic()
            if not data:
                raise ConnectionError("the answer broke off")
            stream.parser.feed_data(data)
        seen.ended = time.monotonic()
    finally:
        writer.close()


@dataclass
class Load:
    """So many clients that ask one URL."""

    url: str
    path: str
    clients: int
    length: int
    requests: int
    begin_s: float = 3600.0
    seen: list[Seen] = field(default_factory=list)

    async def run(self, limit_s: float) -> None:
        """Ask until all requests are answered, or the time is over."""
        try:
            async with asyncio.timeout(limit_s), asyncio.TaskGroup() as tasks:
                for _ in range(self.clients):
                    tasks.create_task(self._client())
        except TimeoutError:
            pass

    async def _client(self) -> None:
        ends = time.monotonic() + self.begin_s
        while len(self.seen) < self.requests and time.monotonic() < ends:
            seen = Seen(time.monotonic())
            self.seen.append(seen)
            make = chat_body if self.path == CHAT else generate_body
            try:
                await one(self.url, self.path, make(len(self.seen), self.length), seen)
            except (OSError, httptools.HttpParserError, orjson.JSONDecodeError) as error:
                seen.error = f"{type(error).__name__}: {error}"

    def told(self, wall_s: float) -> dict[str, Any]:
        """Return what was seen, for the record of a cell."""
        good = [seen for seen in self.seen if seen.error is None]
        errors = [seen.error for seen in self.seen if seen.error is not None]
        done = [seen for seen in good if seen.ended is not None]
        short = [seen.tokens for seen in done if seen.tokens not in (None, self.length)]
        return {
            "ok": len(done),
            "cut": len(good) - len(done),
            "errors": len(errors) + len(short),
            "error": errors[0] if errors else f"{short[0]} tokens came" if short else None,
            "tokens": sum(seen.tokens if seen.tokens is not None else seen.events for seen in good),
            "wall_s": round(wall_s, 2),
            "ttft_ms": quantiles([seen.ttft_ms for seen in good]),
            "tpot_ms": quantiles([seen.tpot_ms for seen in good]),
            "early_ms": quantiles([seen.gap_ms(late=False) for seen in good]),
            "late_ms": quantiles([seen.gap_ms(late=True) for seen in good]),
            "whole_ms": quantiles([(seen.ended - seen.began) * 1e3 for seen in done if seen.ended is not None]),
        }


def quantiles(values: list[float | None]) -> dict[str, float] | None:
    found = sorted(value for value in values if value is not None)
    if not found:
        return None
    at = {"p50": 0.5, "p99": 0.99}
    return {name: round(found[min(int(len(found) * q), len(found) - 1)], 2) for name, q in at.items()}
