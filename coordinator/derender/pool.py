"""The parser processes of one configuration: started before anybody is served, and replaced when they end.

A request stays with the process that it began with. Which one that is does not matter but for how much each has to do.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from coordinator.derender.process import ParserProcess
from coordinator.derender.stream import STEP, Parsing, failure
from coordinator.logs import log
from envelope.errors import NoWorker
from envelope.json_codec import dumps, loads

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.background import Faults
    from envelope.json_codec import Json

VLLM = "coordinator.derender.vllm_parsers:Parsers"

# A process that ends at once would otherwise be started all the time: its imports take ten seconds of a core.
_BACK_OFF_S = (0.5, 1.0, 2.0, 5.0, 15.0, 30.0)


@dataclass(frozen=True, slots=True)
class ParserSettings:
    """
    Attributes:
        tokenizer: the folder of the model's tokenizer.
        tool_parser, reasoning_parser: by vLLM's names; None is none.
        processes: how many.
        silence_s: a process that answers nothing for so long while something is asked of it is replaced.
    """

    tokenizer: str
    tool_parser: str | None
    reasoning_parser: str | None
    processes: int
    silence_s: float

    def engine(self) -> dict[str, str | None]:
        names = ("tokenizer", "tool_parser", "reasoning_parser")
        return {name: getattr(self, name) for name in names}


class Unusable(Exception):
    """The processes cannot do what the configuration says; the text says why."""


class ParserPool:
    """Implements ``coordinator.step.Parsers``.

    Args:
        ended: is told why, in a word, whenever a process is to be replaced.
    """

    def __init__(
        self, settings: ParserSettings, faults: Faults, ended: Callable[[str], None], engine: str = VLLM
    ) -> None:
        self._faults = faults
        self.settings = settings
        self.engine = engine
        self._ended = ended
        self._processes: list[ParserProcess] = []
        self._holders = 0
        self._facts: Json = {}
        self._keepers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start the processes, unless they run, and wait until all can be asked; ``release`` is owed for each call.

        Raises:
            Unusable
        """
        self._holders += 1
        if self._holders > 1:
            return
        try:
            first = [await self._begun() for _ in range(self.settings.processes)]
            for process in first:
                if (why := await process.ready) is not None:
                    raise Unusable(why)
                self._facts = process.facts
        except BaseException:
            await self.release()
            raise
        loop = asyncio.get_running_loop()
        keeping = (self._faults.keep_up("parsers", partial(self._keep, process)) for process in first)
        self._keepers = [loop.create_task(one) for one in keeping]  # owned: release() ends them

    async def release(self) -> None:
        """End the processes once everybody who started them has released them."""
        self._holders -= 1
        if self._holders:
            return
        keepers, self._keepers = self._keepers, []
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        processes, self._processes = self._processes, []
        for process in processes:
            await process.stop()

    def problems(self) -> list[str]:
        """Return why nothing can be parsed just now; empty is well."""
        return [] if any(process.usable for process in self._processes) else [f"{STEP}: no parser process is ready"]

    @property
    def eos_token_id(self) -> int | None:
        return self._facts.get("eos_token_id")

    def open(self, job: Json) -> Parsing:
        """Begin to parse a stream: its parsers are made at once.

        Raises:
            NoWorker
        """
        return Parsing(self._pick(), job)

    async def whole(self, job: Json, reply: Json) -> Json:
        """Parse a whole answer.

        Raises:
            NoWorker, LegFailed; BadRequest where the request asks for what cannot be parsed.
        """
        process, said = self._pick(), asyncio.get_running_loop().create_future()

        def heard(kind: bytes, data: bytes) -> None:
            if not said.done():
                said.set_result((kind, data))

        number = process.listen(heard)
        try:
            process.send(b"whole", number, dumps({"job": job, "reply": reply}), answered=True)
            kind, data = await said
        finally:
            process.forget(number)
        if kind == b"error":
            raise failure(data)
        parsed: Json = loads(data)
        return parsed

    def _pick(self) -> ParserProcess:
        usable = [process for process in self._processes if process.usable]
        if not usable:
            raise NoWorker(STEP, "no parser process is ready", headers={"Retry-After": "1"})
        return min(usable, key=lambda process: process.load)

    async def _begun(self) -> ParserProcess:
        process = ParserProcess(self.engine, self.settings.engine(), self.settings.silence_s)
        self._processes.append(process)
        try:
            await process.start()
        except Exception:
            await self._drop(process)
            raise
        return process

    async def _keep(self, process: ParserProcess) -> None:
        """Put another in the place of a process that ends, for ever; the owner cancels."""
        while True:
            await process.gone
            if process in self._processes:  # else this is done again, after a fault
                self._ended(process.end)
            await self._drop(process)
            process = await self._again()

    async def _again(self) -> ParserProcess:
        """Start a process in the place of one that has ended, as often as it takes."""
        failed = 0
        while True:
            wait_s = _BACK_OFF_S[min(failed, len(_BACK_OFF_S) - 1)]
            log.error("a parser process ended, and is started again in %g s", wait_s)
            await asyncio.sleep(wait_s)
            try:
                process = await self._begun()
            except OSError as error:
                end, why = "not_started", error.strerror or str(error)
            else:
                if (unusable := await process.ready) is None:
                    return process
                end, why = "unusable", unusable
                await self._drop(process)
            self._ended(end)
            log.error("a parser process cannot be used: %s", why)
            failed += 1

    async def _drop(self, process: ParserProcess) -> None:
        await process.stop()  # before it is forgotten: given up halfway, release() does it again
        if process in self._processes:  # not where this is done again, after a fault
            self._processes.remove(process)
