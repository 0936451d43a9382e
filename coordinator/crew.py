"""The serving processes as their supervisor sees them: what they are told, and what they count, all together."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coordinator.logs import log
from coordinator.metrics import ProcessMetrics
from coordinator.totals import families, kept, total

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.channel import Line, Message
    from coordinator.totals import Families

_TOLD_WITHIN_S = 1.0


@dataclass(eq=False)
class Process:
    """One serving process.

    Attributes:
        began: when it was started, monotonic seconds.
        told: what it counted when it was asked the last time.
        addresses: where it listens; empty until it does.
        asks: it waits for the sums over all processes.
        telling: it has been asked what it counts, and has not said.
        silent: its end is closed, so it is about to be over.
    """

    index: int
    pid: int
    line: Line
    began: float
    told: Families = field(default_factory=list)
    addresses: Sequence[str] = ()
    asks: bool = False
    telling: bool = False
    silent: bool = False

    def __str__(self) -> str:
        return f"process {self.index} (pid {self.pid})"


class Crew:
    """
    Attributes:
        up: all of them have listened once.
    """

    def __init__(self) -> None:
        self.processes: list[Process] = []
        self.metrics = ProcessMetrics()
        self.up = False
        self._dead: Families = []

    def tell_all(self, word: str, what: object = None) -> None:
        for process in self.processes:
            self.tell(process, word, what)

    def tell(self, process: Process, word: str, what: object = None) -> None:
        try:
            process.line.send(word, what)
        except TimeoutError:  # half a message may be on its way, so there is no going on
            log.error("%s hangs, and is killed", process)
            os.kill(process.pid, signal.SIGKILL)
        except OSError:
            process.silent = True

    def hear(self, process: Process, until: float = 0.0) -> None:
        """Take in what a process has said, and wait until then for what it counts."""
        try:
            while (message := process.line.receive(until if process.telling else 0.0)) is not None:
                self._take(process, message)
        except OSError:
            process.telling, process.silent = False, True

    def _take(self, process: Process, message: Message) -> None:
        match message:
            case "counted", told:
                process.told, process.telling = told, False
            case "total", _:
                process.asks = True
            case "listening", addresses:
                process.addresses = addresses
                if not self.up and all(other.addresses for other in self.processes):
                    self.up = True
                    for address in addresses:
                        fields = {"address": address, "processes": len(self.processes)}
                        log.info("listening", extra={"fields": fields})

    def lose(self, process: Process) -> None:
        """Take out a process that is over. What it counted stays in the sums."""
        self.hear(process)
        process.line.close()
        self.processes.remove(process)
        self._dead = total([self._dead, kept(process.told)])

    def count(self) -> None:
        """Have all processes tell what they count; who does not is taken at its last word."""
        until = time.monotonic() + _TOLD_WITHIN_S
        for process in self.processes:
            if process.addresses and not process.silent:
                process.telling = True
                self.tell(process, "count")
        for process in self.processes:
            self.hear(process, until)

    def answer(self) -> None:
        """Give the sums to those that ask for them."""
        if not any(process.asks for process in self.processes):
            return
        self.count()
        own = families(self.metrics.registry)
        sums = total([own, self._dead, *(process.told for process in self.processes)])
        for process in [process for process in self.processes if process.asks]:
            process.asks = False
            self.tell(process, "total", sums)
