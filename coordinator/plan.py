"""What requests are answered by: all that a configuration says, apart from where the coordinator listens.

A request keeps the plan with which it began, to its end. So a plan can be put in another's place at any time: the old
one is retired, and closes its connections and its tasks when its last request is over.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coordinator.routing.pool import PoolRouter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from multidict import CIMultiDict

    from coordinator.admission import Admission
    from coordinator.background import Background, Faults
    from coordinator.config import Config
    from coordinator.derender.held import HeldParsers
    from coordinator.fetch import HttpMediaFetcher
    from coordinator.intake import Intake
    from coordinator.pipeline import Pipeline
    from coordinator.questions import Questions
    from coordinator.respond import Manner
    from coordinator.routing.discovery import Discovery
    from coordinator.security.keys import Keys
    from coordinator.security.watch import Watch
    from coordinator.upstream import HttpUpstream
    from coordinator.workers.health import Readiness
    from coordinator.workers.release import Releaser


@dataclass(eq=False, kw_only=True)
class Plan:
    """
    Attributes:
        keys: of which clients must have one; None lets everybody in.
        routing_headers: lower-case names of the headers that name workers.
        drop: lower-case names of headers that go no further than here: those, those that only workers may set
            (``forward_response_headers``), and clients' keys where they are checked here.
        watch: the files that hold keys.
        background: what runs as long as the plan does, beside its requests; each is cancelled at its end.
        faults: is told of those of the background.
        parsers: the processes that parse answers, where decode says so.
    """

    config: Config
    keys: Keys | None
    admission: Admission
    pipeline: Pipeline
    releaser: Releaser
    intake: Intake
    manner: Manner
    readiness: Readiness
    questions: Questions
    upstream: HttpUpstream
    media: HttpMediaFetcher
    discovery: Discovery
    watch: Watch
    routing_headers: tuple[str, ...]
    drop: frozenset[str]
    faults: Faults
    background: Sequence[Background] = ()
    parsers: HeldParsers | None = None

    in_use: int = field(default=0, init=False)
    _retired: bool = field(default=False, init=False)
    _over: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def check_key(self, headers: CIMultiDict[str]) -> None:
        """
        Raises:
            Unauthorized: clients need a key, and none came that is good.
        """
        if self.keys is not None:
            self.keys.check(headers)

    def enter(self) -> None:
        """Count a request that begins."""
        self.in_use += 1

    def leave(self) -> None:
        """Count a request that is over, and has let go of all that it held."""
        self.in_use -= 1
        if self._retired and not self.in_use:
            self._over.set()

    def take_over(self, before: Plan) -> None:
        """Keep what is known of workers that both plans have."""
        for role, link in self.upstream.links.items():
            earlier = before.upstream.links.get(role)
            if earlier is not None and isinstance(link.router, PoolRouter) and isinstance(earlier.router, PoolRouter):
                link.router.take_over(earlier.router)

    def retire(self) -> None:
        """Let ``run`` end when the last request is over; no more begin."""
        self._retired = True
        if not self.in_use:
            self._over.set()

    def end(self) -> None:
        """Let ``run`` end now; whatever requests there are have been given up."""
        self._over.set()

    async def prepare(self) -> None:
        """Start what takes its time, before any request meets the plan; ``run`` ends it.

        Raises:
            ConfigError: it cannot be started as the configuration says.
        """
        if self.parsers is not None:
            await self.parsers.start()

    async def run(self) -> None:
        """Open what the plan works with, and close it when it is over: the rest too, where one part cannot be."""
        async with AsyncExitStack() as stack:
            if self.parsers is not None:
                stack.push_async_callback(self.parsers.release)
            await self.media.start()
            for closing in (self.media.close, self.upstream.close, self.releaser.close, self.upstream.settle):
                stack.push_async_callback(closing)  # the last one is called first
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self.faults.keep_up(*work)) for work in self.background]
                await self._over.wait()
                for task in running:
                    task.cancel()


class Plans:
    """The plan in place, and those before it whose last requests are still under way.

    Args:
        install: puts another plan in place for the requests that come.
    """

    def __init__(self, first: Plan, install: Callable[[Plan], None]) -> None:
        self._running = [first]
        self._install = install
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Plans:
        await self._running[0].prepare()
        await self._tasks.__aenter__()
        self._start(self._running[0])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for plan in self._running:
            plan.end()
        await self._tasks.__aexit__(kind, error, trace)

    async def replace(self, new: Plan, asked_within_s: float) -> None:
        """Put a plan in place once it has asked its workers, or after so long; retire the one before it.

        Raises:
            ConfigError: as ``Plan.prepare``; the plan before it goes on.
        """
        await new.prepare()
        before = self._running[-1]
        self._running.append(new)
        self._start(new)
        with suppress(TimeoutError):
            async with asyncio.timeout(asked_within_s):
                await new.readiness.asked.wait()
        new.take_over(before)
        self._install(new)
        before.retire()

    def _start(self, plan: Plan) -> None:
        self._tasks.create_task(self._run(plan)).add_done_callback(lambda _: self._running.remove(plan))

    async def _run(self, plan: Plan) -> None:
        try:
            await plan.run()
        except Exception as error:  # in closing: those who are served by another plan are not to pay for it
            plan.faults.tell("closing", error)
