"""One parser process, seen from the coordinator: its socket, what was asked of it, and its end.

What comes back is given on in the call that reads it, with no task and no queue in between. A process that answers
nothing for too long while something is asked of it is taken for hung, and killed.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from typing import TYPE_CHECKING

from coordinator.logs import log
from envelope.json_codec import dumps, loads

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from envelope.json_codec import Json

MAIN = "coordinator.derender.process_main"

ANSWERS = frozenset((b"opened", b"more", b"done", b"over", b"whole", b"error"))

# A parser needs no GPU, no second thread, and nothing from the network: its tokenizer is a local path.
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class ParserProcess(asyncio.Protocol):
    """Starts a process, and keeps what was asked of it until it is answered.

    Args:
        engine: ``module:class`` of what parses there.
        settings: its keyword arguments.
        silence_s: how long it may answer nothing while something is asked of it.

    Attributes:
        ready: done when it can be asked; its result is None, or why it cannot be used.
        facts: what it knows of the model, once it is ready.
        gone: done when it has ended, of itself or killed.
        end: why it did, in a word: ``died``, or ``hung`` or ``garbled`` where it was killed for that.
    """

    def __init__(self, engine: str, settings: Mapping[str, Any], silence_s: float) -> None:
        self._engine, self._settings, self._silence_s = engine, settings, silence_s
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[str | None] = self._loop.create_future()
        self.facts: Json = {}
        self.gone: asyncio.Future[None] = self._loop.create_future()
        self.end = "died"
        self._child: asyncio.subprocess.Process | None = None
        self._starting: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._held: list[bytes] = []
        self._listeners: dict[bytes, Callable[[bytes, bytes], None]] = {}
        self._last = 0
        self._unanswered = 0
        self._heard_at = 0.0
        self._watch: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Start the process; given up halfway, it is still ended by ``stop``."""
        self._starting = self._loop.create_task(self._start())  # owned: awaited here or in stop()
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = ("-m", MAIN, self._engine, dumps(dict(self._settings)).decode(), str(theirs.fileno()))
            self._child = await asyncio.create_subprocess_exec(
                sys.executable,
                *command,
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,  # its libraries print; our own output is for people and pipes
                env=os.environ | _ENVIRONMENT,
                start_new_session=True,  # an interrupt from the terminal is the coordinator's to deal with
            )
        ours.setblocking(False)
        await self._loop.create_unix_connection(lambda: self, sock=ours)

    @property
    def load(self) -> int:
        """How many streams and whole answers are with this process."""
        return len(self._listeners)

    @property
    def usable(self) -> bool:
        return self.ready.done() and self.ready.result() is None and not self.gone.done()

    def listen(self, listener: Callable[[bytes, bytes], None]) -> bytes:
        """Return a number for a new stream; ``listener`` gets the kind and data of each line that answers it."""
        self._last += 1
        number = b"%d" % self._last
        self._listeners[number] = listener
        return number

    def forget(self, number: bytes) -> None:
        self._listeners.pop(number, None)

    def send(self, kind: bytes, number: bytes, data: bytes = b"", *, answered: bool = False) -> None:
        """Ask something; ``answered`` says that an answer has to come."""
        if self._transport is None or self._transport.is_closing():
            return  # its listeners are being told
        if b"\n" in data:
            data = data.replace(b"\n", b" ")  # in JSON a line end is a blank: those in strings are escaped
        self._transport.write(b"%b %b %b\n" % (kind, number, data))
        if answered:
            self._unanswered += 1
            if self._watch is None:
                self._heard_at = self._loop.time()
                self._watch = self._loop.call_later(self._silence_s, self._look)

    async def stop(self) -> None:
        """End the process, and wait for its end."""
        if self._starting is not None:
            await asyncio.wait((self._starting,))  # how it went was told to whoever started it
        if self._transport is not None:
            self._transport.close()
        if self._child is not None:
            if self._child.returncode is None:
                self._child.kill()
            await self._child.wait()
        self._ended()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # a stream's; uvloop's is no subclass of asyncio's

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        end = data.rfind(b"\n")
        if end < 0:
            self._held.append(data)
            return
        block = b"".join((*self._held, data[:end]))
        self._held = [data[end + 1 :]] if end + 1 < len(data) else []
        for line in block.split(b"\n"):
            kind, _, rest = line.partition(b" ")
            number, _, rest = rest.partition(b" ")
            self._heard(kind, number, rest)

    def connection_lost(self, error: Exception | None) -> None:
        self._ended()

    def _heard(self, kind: bytes, number: bytes, data: bytes) -> None:
        if kind in (b"ready", b"unusable") and not self.ready.done():
            told = loads(data)
            self.facts = told if kind == b"ready" else {}
            self.ready.set_result(None if kind == b"ready" else str(told))
        elif kind not in ANSWERS:
            self._kill("garbled", "a parser process said what none says, and was ended")
        else:
            if kind != b"more":
                self._unanswered -= 1
            if (listener := self._listeners.get(number)) is not None:
                listener(kind, data)

    def _look(self) -> None:
        """Kill the process if it has been silent for too long; look again later if something is asked of it."""
        self._watch = None
        if self._unanswered <= 0:
            return
        late = self._heard_at + self._silence_s
        if late > self._loop.time():
            self._watch = self._loop.call_at(late, self._look)
            return
        self._kill("hung", f"a parser process answered nothing for {self._silence_s:g} s and was ended")

    def _kill(self, end: str, why: str) -> None:
        log.error(why)
        self.end = end
        if self._transport is not None:
            self._transport.abort()
        if self._child is not None and self._child.returncode is None:
            self._child.kill()
        self._ended()  # at once: what has already come behind that tells nobody anything

    def _ended(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if not self.ready.done():
            self.ready.set_result("it ended before it was ready; what it printed has the reason")
        if not self.gone.done():
            self.gone.set_result(None)
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener(b"error", dumps({"message": "the parser process ended", "refused": False}))
