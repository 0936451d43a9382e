"""What a request held is free when the request is over: nothing of it waits for the garbage collector.

The collector comes seldom, and a prompt may have a megabyte.
"""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING, Any

import pytest

from coordinator.sim import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

CHAT = "/v1/chat/completions"
TIMES = 5
SAID = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'


@contextlib.contextmanager
def left_in_cycles() -> Iterator[list[str]]:
    """Fill a list with the types of ours that only the collector would have freed."""
    found: list[str] = []
    gc.freeze()  # what is there already is passed over: to look through a whole suite's objects takes seconds
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found += sorted({_name(each) for each in gc.garbage if _is_ours(each)})
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def _name(each: object) -> str:
    return f"{type(each).__module__}.{type(each).__qualname__}"


def _is_ours(each: object) -> bool:
    name = _name(each)
    return name.startswith(("coordinator.", "steps.", "envelope.")) and not name.startswith("coordinator.sim.")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shape", ["openai", "text", "derender", "alone"])
async def test_a_request_that_went_well(coordinator: Any, fleet: Any, shape: str, stream: bool) -> None:
    at = await coordinator(fleet, shape)
    await at.chat(stream=stream)
    with left_in_cycles() as left:
        for _ in range(TIMES):
            assert (await at.chat(stream=stream)).status == 200
    assert left == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_whose_legs_run_together(coordinator: Any, fleet_of: Any, stream: bool) -> None:
    at = await coordinator(await fleet_of(settings=Settings(kv="mooncake")), "pair")
    await at.chat(stream=stream)
    with left_in_cycles() as left:
        for _ in range(TIMES):
            assert (await at.chat(stream=stream)).status == 200
    assert left == []


# (path, body, headers, status)
REFUSED = [
    (CHAT, {"messages": [], "n": "two"}, (), 400),
    (CHAT, b"{", (), 400),
    (CHAT, b"{}", (("Content-Type", "text/plain"),), 415),
    ("/v1/nowhere", {}, (), 404),
]


@pytest.mark.parametrize(("path", "body", "headers", "status"), REFUSED)
async def test_a_request_that_was_refused(
    coordinator: Any, fleet: Any, path: str, body: Any, headers: Any, status: int
) -> None:
    at = await coordinator(fleet)
    with left_in_cycles() as left:
        for _ in range(TIMES):
            assert (await at.post(path, body, *headers)).status == status
    assert left == []


# What a worker does, and the status that the client gets for it.
FAILED: list[tuple[str, int]] = [("rejects", 400), ("fails", 502), ("is_cut_off", 502), ("breaks_its_stream", 200)]


@pytest.mark.parametrize(("deed", "status"), FAILED)
async def test_a_request_whose_worker_failed(says: Any, ask: Any, scripted: Any, deed: str, status: int) -> None:
    answer = {
        "rejects": scripted.json({"error": {"message": "no", "type": "BadRequestError", "code": 400}}, 400),
        "fails": scripted.json({"error": {"message": "oh", "type": "InternalServerError", "code": 500}}, 500),
        "is_cut_off": [b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n", scripted.CUT],
        "breaks_its_stream": scripted.sse(SAID, scripted.CUT),
    }[deed]
    at, _ = await says(answer, steps={"decode": {"max_attempts": 1}})
    with left_in_cycles() as left:
        for _ in range(TIMES):
            assert (await at.post(CHAT, ask(stream=deed == "breaks_its_stream"))).status == status
    assert left == []


async def test_a_client_that_left(coordinator: Any, fleet: Any, eventually: Any) -> None:
    at = await coordinator(fleet)
    with left_in_cycles() as left:
        for _ in range(TIMES):
            async with at.open(CHAT, {"model": "tiny", "messages": [{"role": "user", "content": "Count."}],
                                      "stream": True, "max_tokens": 400}) as live:  # fmt: skip
                await live.head()
                await live.event()
            await eventually(lambda: not at.in_flight())
    assert left == []
