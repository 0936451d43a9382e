"""Workers whose word about their health is almost right: readiness goes on asking, whatever it hears."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from coordinator.routing.router import Worker
from coordinator.workers.health import Readiness, RoleProbe
from tests.background import FaultsTold
from tests.bounds import HANG_S
from tests.chaos.mutate import bytes_mutant
from tests.chaos.report import LINES
from tests.chaos.test_fuzz_front import counted

if TYPE_CHECKING:
    import random

_RIGHT = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\nok",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    b"HTTP/1.1 503 Busy\r\nConnection: close\r\n\r\n",
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.1 307 Moved\r\nLocation: http://127.0.0.1:1/\r\nSet-Cookie: a=b\r\nContent-Length: 0\r\n\r\n",
)


async def test_readiness_outlives_any_answer(rng: random.Random, full: bool) -> None:
    """It is the only task that asks; if it died, /readyz would say the same for ever."""
    count, answered = counted(full, 300, 10_000), 0
    enough = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal answered
        try:
            await reader.readuntil(b"\r\n\r\n")
            answered += 1
            writer.write(bytes_mutant(rng.choice(_RIGHT), rng))
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
        if answered >= count:
            enough.set()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        worker = Worker(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        probe, faults = RoleProbe("decode", lambda: (worker,), ("/inference/v1/generate",)), FaultsTold()
        readiness = Readiness([probe], 0.0005, faults)
        asking = asyncio.create_task(readiness.run())
        waiting = asyncio.create_task(enough.wait())
        done, _ = await asyncio.wait((asking, waiting), timeout=600 if full else HANG_S, return_when="FIRST_COMPLETED")
        assert waiting in done, asking
        asking.cancel()
        await asyncio.wait((asking,))
    assert not faults.counts
    assert all(problem.startswith("decode: ") for problem in readiness.problems())
    LINES.append(f"answers to readiness: {answered} inputs, 0 wrong")
