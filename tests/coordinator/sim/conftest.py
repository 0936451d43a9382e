"""A fleet per test, and a client that reads its answers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from coordinator.sim import SimFleet, SimWorker
from tests.bounds import HANG_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

RECORDINGS = Path(__file__).parents[2] / "data" / "recordings"
BOUND = aiohttp.ClientTimeout(total=HANG_S)


@dataclass
class Got:
    """An answer that was read to its end.

    Attributes:
        body: of a JSON answer.
        events: of a stream: the parsed data of each event, ``[DONE]`` as a string.
        names: of the events, None where one has none.
    """

    status: int
    headers: Any
    raw: bytes
    body: Any = None
    events: list[Any] = field(default_factory=list)
    names: list[str | None] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.raw.decode()


def events_of(raw: bytes) -> tuple[list[Any], list[str | None]]:
    """Split a stream of ``event:`` and ``data:`` lines; every event must end with a blank line."""
    assert raw.endswith(b"\n\n") or not raw, raw[-100:]
    events: list[Any] = []
    names: list[str | None] = []
    for block in raw.decode().split("\n\n")[:-1]:
        name = None
        for line in block.split("\n"):
            kind, _, value = line.partition(": ")
            if kind == "event":
                name = value
            elif kind == "data":
                events.append(value if value == "[DONE]" else json.loads(value))
        names.append(name)
    return events, names


class Client:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def post(self, worker: SimWorker, path: str, body: Any, **options: Any) -> Got:
        kind = {"data": body} if isinstance(body, bytes | str) else {"json": body}
        async with self.session.post(worker.url + path, **kind, **options) as response:
            return await self._read(response)

    async def get(self, worker: SimWorker, path: str, **options: Any) -> Got:
        async with self.session.get(worker.url + path, **options) as response:
            return await self._read(response)

    async def _read(self, response: aiohttp.ClientResponse) -> Got:
        raw = await response.read()
        got = Got(response.status, response.headers, raw)
        if response.content_type == "text/event-stream":
            got.events, got.names = events_of(raw)
        elif raw and response.content_type == "application/json":
            got.body = json.loads(raw)
        return got


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(timeout=BOUND) as session:
        yield Client(session)


@pytest.fixture
async def fleet() -> AsyncIterator[SimFleet]:
    async with SimFleet() as fleet:
        yield fleet


@pytest.fixture
def recorded() -> Any:
    """Return a recording by its name below ``recordings/vllm-0.33.0``, with its events where it is a stream."""

    def load(name: str) -> dict[str, Any]:
        path = RECORDINGS / "vllm-0.33.0" / f"{name}.json"
        recording: dict[str, Any] = json.loads(path.read_text())
        sse = recording["response"].get("sse_file")
        if sse:
            raw = (path.parent / sse).read_bytes()
            if recording["response"].get("truncated"):
                raw = raw[: raw.rindex(b"\n\n") + 2]
            recording["response"]["events"], recording["response"]["names"] = events_of(raw)
        return recording

    return load
