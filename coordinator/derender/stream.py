"""A worker's stream on its way through a parser process: its events go out, and what they parse to comes back.

Nothing waits for a chunk before the next is sent: a process answers in order, and what it answers is given to the
client in the call that reads it. How far a worker may be ahead of its parser is bounded; beyond it, and while the
client is behind, the worker's socket is not read.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from envelope.errors import ApiError, BadRequest, InternalError, LegFailed
from envelope.json_codec import dumps, loads
from envelope.sse import Events, data_of, frame, split

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from coordinator.context import Headers, LiveStream
    from coordinator.derender.process import ParserProcess
    from envelope.json_codec import Json

STEP = "derender"

# Events that may be with a parser at a time, of one stream.
_AHEAD = 64


class Parsing:
    """One request's place in a parser process. Implements ``coordinator.step.Parsing``."""

    def __init__(self, process: ParserProcess, job: Json) -> None:
        self._process = process
        self._number = process.listen(self._heard)
        self.listener: Callable[[bytes, bytes], None] | None = None
        self._early: tuple[bytes, bytes] | None = None  # a failure before anybody listened
        process.send(b"open", self._number, dumps(job), answered=True)

    def attach(self, live: LiveStream) -> ParsedStream:
        return ParsedStream(self, live)

    def listen(self, listener: Callable[[bytes, bytes], None]) -> None:
        self.listener = listener
        if self._early is not None:
            listener(*self._early)

    def send(self, data: bytes) -> None:
        self._process.send(b"chunk", self._number, data, answered=True)

    def close(self) -> None:
        """Let the parsers go; more than once is fine."""
        if self._number:
            self._process.forget(self._number)
            self._process.send(b"close", self._number)
            self._number = b""

    def _heard(self, kind: bytes, data: bytes) -> None:
        if self.listener is not None:
            self.listener(kind, data)
        elif kind == b"error":
            self._early = (kind, data)


class ParsedStream:
    """Implements ``coordinator.context.LiveStream``; its events have a ``delta`` or a ``text`` on each choice."""

    def __init__(self, parsing: Parsing, live: LiveStream) -> None:
        self._parsing = parsing
        self._live = live
        self._events = Events()
        self._take: Callable[[bytes], bool] = _nobody
        self._asked = 0  # events that the parser has not answered
        self._behind = False  # the client is
        self._over = False  # nothing more is wanted of the worker
        self._failure: BaseException | None = None
        self._answered = asyncio.Event()
        self._interrupt: asyncio.Timeout | None = None
        parsing.listen(self._heard)

    @property
    def headers(self) -> Headers:
        return self._live.headers

    @property
    def first_event(self) -> bytes:
        return self._live.first_event

    def ended(self, error: ApiError | None) -> None:
        if error is None or error is not self._failure:  # which is no fault of the worker's
            self._live.ended(error)

    async def push(self, take: Callable[[bytes], bool]) -> bool:
        self._take, self._behind = take, False
        try:
            async with asyncio.timeout(None) as self._interrupt:
                if (ended := await self._relay()) is not None:
                    return ended
        except TimeoutError:
            self._raise()
            if not self._over:
                raise
        finally:
            self._interrupt = None
        await self._live.aclose()  # the worker would go on to the end of its context
        return True

    async def aclose(self) -> None:
        self._parsing.close()
        await self._live.aclose()

    async def _relay(self) -> bool | None:
        """As ``push``; None where the stream has ended here and the worker does not know."""
        while True:
            self._raise()
            if self._over:
                return None
            ended = await self._live.push(self._feed)
            await self._until(0 if ended else _AHEAD // 2)
            self._raise()
            if ended:
                return True
            if self._behind:
                return False

    def _feed(self, data: bytes) -> bool:
        """Send the worker's events to the parser; False when it has enough of them, or the client has."""
        if self._over:
            return False
        block = self._events.whole(data)
        for event in split(block) if block else ():
            said = data_of(event)
            if said:
                self._asked += 1
                self._parsing.send(said)
            elif said is None and b":" in event:
                self._give(event)  # a comment keeps the client's connection alive too
        return not self._behind and self._asked < _AHEAD

    async def _until(self, few: int) -> None:
        """Wait until the parser has at most so many events to answer."""
        while self._asked > few and self._failure is None and not self._over:
            self._answered.clear()
            await self._answered.wait()

    def _heard(self, kind: bytes, data: bytes) -> None:
        if kind == b"more":
            self._give(frame(data))
        elif kind == b"error":
            self._fail(failure(data))
        elif kind == b"over":
            self._over = True
            self._stop()
        elif kind == b"done":
            self._asked -= 1
            self._answered.set()

    def _give(self, event: bytes) -> None:
        if self._failure is not None:
            return
        try:
            self._behind = not self._take(event) or self._behind
        except Exception as error:  # the client is gone, or the chunk makes no sense: for whoever pushes
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            self._stop()

    def _stop(self) -> None:
        """Wake whoever pushes, also while the worker is silent."""
        self._answered.set()
        if self._interrupt is not None and not self._interrupt.expired():
            self._interrupt.reschedule(asyncio.get_running_loop().time())

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure


def failure(data: bytes) -> ApiError:
    """Return the error that a parser process told of."""
    told: Any = loads(data)
    if told["refused"]:
        return BadRequest(told["message"])
    return LegFailed(STEP, f"the parser failed: {told['message']}")


def _nobody(data: bytes) -> bool:
    raise InternalError("a stream was parsed that nobody takes")
