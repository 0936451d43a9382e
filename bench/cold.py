"""What a chunk of a stream costs where the processor has forgotten its code, beside the same in a row.

    taskset -c 1 python -m bench.cold [--chunks 3000] [--spoil-kib 200]

Between two chunks a server waits, or does other things, so that most of what a chunk costs is the way of code and data
into the processor's caches. Run in a row, the same work takes a tenth of the time, and what is faster there may be
slower here. So before each chunk a text is compiled and some memory copied, and the chunk alone is timed: from the
worker's bytes to the client's, through all of ours but the event loop and the kernel.

Compare two versions in alternation, several times: the machine's own moods are larger than most differences.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from multidict import CIMultiDict

from bench.fake_worker import CHAT_STREAM, GENERATE_STREAM, Template
from coordinator.http.connection import Connection as Client
from coordinator.http.connection import Patience
from coordinator.http.request import Request
from coordinator.http.response import Response
from coordinator.relay import pump
from coordinator.telemetry.pace import Pace
from coordinator.workers.wire import Connection as Worker
from envelope.chat import Chunks
from envelope.formats import Format
from envelope.passthrough import PassThrough
from envelope.shape import Asked

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.context import LiveStream
    from envelope.shape import Shape

STREAMS = 48  # each chunk is of another one than the chunk before
WARM_UP = 10
SPOIL = Path(__file__).read_text()

ASKED = Asked({"model": "tiny", "stream": True}, {"token_ids": [1, 2]}, "id", 1)
SHAPES: dict[str, tuple[Callable[[], Shape], Template]] = {
    "relayed": (lambda: PassThrough(Format.CHAT), CHAT_STREAM),
    "rebuilt": (lambda: Chunks(ASKED), GENERATE_STREAM),
}


class Transport:
    """Takes what is written, at no cost of Python's."""

    def __init__(self) -> None:
        self.written = deque[bytes](maxlen=1)
        self.write = self.written.append

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        pass

    close = abort


class Stream:
    """A worker's answer on its way to a client, between two transports."""

    def __init__(self, shape: Shape, template: Template) -> None:
        loop = asyncio.get_running_loop()
        self._template = template
        self._worker = Worker(loop)
        self._worker.connection_made(Transport())  # type: ignore[arg-type]  # a transport as far as it is called
        self._worker.send(b"")
        server = SimpleNamespace(connections=set(), patience=Patience())
        client = Client(server, loop)  # type: ignore[arg-type]  # what a connection without requests has of a server
        self._sent = Transport()
        client.connection_made(self._sent)  # type: ignore[arg-type]  # a transport as far as it is called
        response = Response(Request(client, "POST", "/", CIMultiDict()), client)
        response.begin(200, ())
        self._worker.data_received(template.opening)
        pace = Pace(time.monotonic, time.monotonic())
        source: LiveStream = self._worker  # type: ignore[assignment]  # all that pump calls is ``push``
        self._pumping = loop.create_task(pump(source, shape, response, pace.mark))

    def chunk(self, number: int) -> bytes:
        return b"%b%019d%b" % (self._template.before, number, self._template.after)

    def take(self, data: bytes) -> None:
        self._worker.data_received(data)

    def has_sent(self, number: int) -> bool:
        return b"%019d" % number in self._sent.written[-1]

    def stop(self) -> None:
        self._pumping.cancel()


async def measure(name: str, chunks: int, spoil_kib: int | None) -> list[int]:
    """Return what each chunk took, in nanoseconds, once it is seen to have come out.

    Args:
        spoil_kib: so much memory is copied before each, and a text compiled; None is neither.
    """
    make, template = SHAPES[name]
    streams = [Stream(make(), template) for _ in range(STREAMS)]
    await asyncio.sleep(0)
    for stream in streams:
        for number in range(WARM_UP):
            stream.take(stream.chunk(number))
    size = (spoil_kib or 0) * 1024
    one, other, took = bytearray(size), bytes(size), []
    gc.disable()
    for number in range(chunks):
        stream = streams[number * 7 % STREAMS]
        data = stream.chunk(number)
        if spoil_kib is not None:
            one[:] = other
            compile(SPOIL, "spoil", "exec")
        began = time.perf_counter_ns()
        stream.take(data)
        took.append(time.perf_counter_ns() - began)
        assert stream.has_sent(number)
    gc.enable()
    for stream in streams:
        stream.stop()
    return took


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=3000, help="of each kind")
    parser.add_argument("--spoil-kib", type=int, default=200, help="memory that is copied before each")
    args = parser.parse_args(argv)
    for name in SHAPES:
        told = []
        for caches, spoil_kib in (("cold", args.spoil_kib), ("warm", None)):
            took = sorted(asyncio.run(measure(name, args.chunks, spoil_kib)))
            told.append(f"{caches} {statistics.median(took) / 1e3:.2f} µs (p10 {took[len(took) // 10] / 1e3:.2f})")
        print(f"{name}: {', '.join(told)}")


if __name__ == "__main__":
    main()
