"""Tools to break requests off at exact points: a step that waits, and a request that is cancelled at a given moment."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar

from coordinator.sim import probes

if TYPE_CHECKING:
    from coordinator.context import RequestContext
    from coordinator.http.request import Request
    from coordinator.sim import SimWorker
    from coordinator.step import Upstream
    from tests.flows.client import Got, Live
    from tests.flows.conftest import Running


class Pause:
    """A step that does nothing, for as long as a test likes.

    Attributes:
        reached: a request has come so far.
        go: let it go on.
    """

    type: ClassVar[str] = "pause"
    role: ClassVar[str | None] = None

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.go = asyncio.Event()

    def admit(self, ctx: RequestContext) -> None:
        pass

    async def run(self, ctx: RequestContext, upstream: Upstream) -> str:
        self.reached.set()
        await self.go.wait()
        return "ok"


def pause_before_decode(at: Running) -> Pause:
    """Put a step that waits between prefill and decode."""
    pipeline, pause = at.front.plan.pipeline, Pause()
    *before, decode = pipeline.steps
    pipeline.steps = (*before, pause, decode)
    return pause


class Cancelling:
    """Cancels the handling of each request after so many turns of the event loop, as a client who leaves does.

    Attributes:
        turns: how many.
        reached: the last request had not been answered by then.
    """

    def __init__(self, at: Running) -> None:
        self.turns = 0
        self.reached = False
        self._answer = at.app.server.answer
        at.app.server.answer = self._cancelled  # type: ignore[method-assign]

    async def _cancelled(self, request: Request) -> None:
        if request.method != "POST":
            return await self._answer(request)
        task = asyncio.current_task()
        assert task is not None
        self.reached = answered = False

        def turn(left: int) -> None:
            if answered:
                return
            if left:
                asyncio.get_running_loop().call_soon(turn, left - 1)
            else:
                self.reached = True
                task.cancel()

        turn(self.turns)
        try:
            return await self._answer(request)
        finally:
            answered = True


def answer_once_per_connection(*workers: SimWorker) -> None:
    """Let workers reset a connection on its second request, as after an idle time that is over unbeknown to us."""
    for worker in workers:
        _reset_the_second(worker, set())


def _reset_the_second(worker: SimWorker, served: set[Any]) -> None:
    respond = worker._respond

    async def once(request: Any, received: Any) -> Any:
        if received.path not in probes.PATHS and received.body != {}:
            if request.protocol in served:
                request.transport.abort()
                raise ConnectionResetError
            served.add(request.protocol)
        return await respond(request, received)

    worker._respond = once  # type: ignore[method-assign]


async def hang_up(*workers: SimWorker) -> None:
    """Let workers close every connection that is open to them, as servers do with those that are idle for long."""
    for worker in workers:
        for connection in worker._server.connections:
            if connection.transport is not None:
                connection.transport.close()
    while any(worker.connections for worker in workers):
        await asyncio.sleep(0)


async def answer_or_nothing(live: Live) -> Got | None:
    """Read an answer to its end, proper or not; None if not even its head came."""
    try:
        await live.head()
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return await live.rest()
