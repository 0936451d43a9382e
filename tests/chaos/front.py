"""A coordinator before workers that take anything, and a client that sends bytes and reads whatever comes."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coordinator.config import Config
from coordinator.workers.retry import RetryBudget
from tests.bounds import HANG_S
from tests.chaos.parrot import Parrot
from tests.flows.conftest import Running, listening, merged, poll

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from tests.chaos.stage import Lines

# An input may look like half a request, whose rest is waited for, but not for ever.
_LIMITS = {"read_timeout": "150ms", "read_header_timeout": "150ms", "heartbeat_after": 0, "max_request_body_size": 1}

SHAPES: dict[str, tuple[bool, dict[str, dict[str, Any]]]] = {
    "openai": (True, {"conditional-decode": {}, "prefill": {}, "decode": {}}),
    "text": (False, {"render": {}, "prefill": {}, "decode": {"output_mode": "text", "wrap": "all"}}),
    "derender": (False, {"render": {}, "prefill": {}, "decode": {"output_mode": "derender", "wrap": "all"}}),
    "unwrapped": (False, {"render": {}, "prefill": {}, "decode": {"output_mode": "text"}}),
    "ids": (True, {"render": {}, "prefill": {}, "decode": {"send_prompt_token_ids": True}}),
}


@dataclass(slots=True)
class Answer:
    """One answer as it stood on the wire.

    Attributes:
        whole: its framing is complete.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    whole: bool


@asynccontextmanager
async def fronted(shape: str, **limits: str) -> AsyncIterator[tuple[Running, Parrot]]:
    """Start a coordinator of a shape; ``limits`` are of every leg."""
    openai, steps = SHAPES[shape]
    async with AsyncExitStack() as stack:
        parrot = await stack.enter_async_context(Parrot())
        pools = {"prefill": {"endpoints": [parrot.prefill_url]}, "decode": {"endpoints": [parrot.url]}}
        own = {"render": {"address": parrot.url, **({"timeout": "300ms"} if limits else {})}}
        tree = {
            "server": {"listen_addr": "127.0.0.1:0", "readiness_interval": "1h", **_LIMITS},
            "pools": pools,
            "pipeline": {
                "kv_connector": "kv-nixl",
                "use_openai_format": openai,
                "steps": [
                    {"type": kind, "params": merged(params, own.get(kind, limits))} for kind, params in steps.items()
                ],
            },
        }
        yield await listening(stack, Config.model_validate(tree)), parrot


async def say(at: Running, raw: bytes, *, expects: int = 1) -> bytes:
    """Send bytes; return all that comes back until so many answers are whole, or the other side hangs up."""
    host, _, port = at.url.removeprefix("http://").partition(":")
    got = b""
    async with asyncio.timeout(HANG_S):
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(raw)
            while piece := await reader.read(2**16):
                got += piece
                if len(whole := answers(got)) >= expects and whole[-1].whole:
                    break
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()
    return got


def answers(raw: bytes) -> list[Answer]:
    """Take apart what came; the last answer may be unfinished."""
    found = []
    while raw:
        head, middle, rest = raw.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        status = int(first.split(" ")[1])
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        if not middle:
            return [*found, Answer(status, headers, b"", whole=False)]
        if status < 200:
            raw = rest
            continue
        body, raw, whole = _body(headers, rest)
        found.append(Answer(status, headers, body, whole))
    return found


def _body(headers: Mapping[str, str], raw: bytes) -> tuple[bytes, bytes, bool]:
    if "chunked" not in headers.get("transfer-encoding", ""):
        size = int(headers.get("content-length", len(raw)))
        return raw[:size], raw[size:], len(raw) >= size
    body = b""
    while True:
        line, found, raw = raw.partition(b"\r\n")
        if not found:
            return body, b"", False
        size = int(line, 16)
        if len(raw) < size + 2:
            return body + raw[:size], b"", False
        body, raw = body + raw[:size], raw[size + 2 :]
        if not size:
            return body, raw, True


def post(path: str, body: bytes, *headers: str) -> bytes:
    """Return a right request."""
    lines = (f"POST {path} HTTP/1.1", "Host: here", "Content-Type: application/json", f"Content-Length: {len(body)}")
    return "\r\n".join((*lines, *headers, "", "")).encode() + body


def wrong(answer: Answer) -> str:
    """Return what no answer may be, or ""."""
    if answer.status == 500:
        return f"500 {answer.body[:300]!r}"
    if answer.status < 400 or not answer.whole or not answer.body:
        return ""
    try:
        body = json.loads(answer.body)
    except ValueError:
        return f"{answer.status} whose body is no JSON: {answer.body[:200]!r}"
    if not isinstance(body, dict) or "error" not in body or "x-request-id" not in answer.headers:
        return f"{answer.status} {answer.body[:200]!r} with {answer.headers}"
    return ""


async def leaks(at: Running, lines: Lines) -> dict[str, str]:
    """Wait until all is quiet; return what is not."""
    found = {}
    try:
        await poll(lambda: not at.in_flight() and not at.front.plan.releaser._tasks)
    except AssertionError:
        found["in flight"] = str(at.in_flight())
    gauges = [sample.value for family in at.front._metrics.in_flight.collect() for sample in family.samples]
    if any(gauges):
        found["gauges"] = str(gauges)
    if lines.tracebacks:
        found["traceback"] = lines.tracebacks[-1]
        lines.tracebacks.clear()
    at.upstream._budget = RetryBudget()
    return found
