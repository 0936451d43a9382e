"""The serving processes as their supervisor sees them: what they are told, and what they count, all together."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from coordinator.logs import log
from coordinator.metrics import ProcessMetrics
from coordinator.processes.channel import COUNTS
from coordinator.processes.totals import families, kept, total

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from coordinator.processes.channel import Line, Message
    from coordinator.processes.totals import Families

_TOLD_WITHIN_S = 1.0


@dataclass(eq=False)
class Process:
    """One serving process.

    Attributes:
        began: when it was started, monotonic seconds.
        told: what it said of itself when it was asked the last time, by subject.
        addresses: where it listens; empty until it does.
        reloaded: what was wrong with the file that it was to apply, nothing if that went well; None is no word yet.
        problems: what was wrong when it ended, if it knew.
        asks: the subjects of which it waits to hear what all processes say.
        telling: the subject of which it has been asked, and has not said.
        silent: its end is closed, so it is about to be over.
    """

    index: int
    pid: int
    line: Line
    began: float
    told: dict[str, Any] = field(default_factory=dict)
    addresses: Sequence[str] = ()
    reloaded: list[str] | None = None
    problems: Sequence[str] = ()
    asks: set[str] = field(default_factory=set)
    telling: str | None = None
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
        """Take in what a process has said, and wait until then for what it has been asked to tell."""
        try:
            while (message := process.line.receive(until if process.telling else 0.0)) is not None:
                self._take(process, message)
        except OSError:
            process.telling, process.silent = None, True

    def _take(self, process: Process, message: Message) -> None:
        match message:
            case "told", (subject, told):
                process.told[subject] = told
                if process.telling == subject:
                    process.telling = None
            case "reloaded", problems:
                process.reloaded = problems
            case "problems", problems:
                process.problems = problems
            case "all", subject:
                process.asks.add(subject)
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
        self._dead = total([self._dead, kept(process.told.get(COUNTS, []))])

    def ask(self, subject: str) -> None:
        """Have all processes tell of themselves. What one counts is taken at its last word: sums must not fall."""
        until = time.monotonic() + _TOLD_WITHIN_S
        for process in self.processes:
            if subject != COUNTS:
                process.told.pop(subject, None)
            if process.addresses and not process.silent:
                process.telling = subject
                self.tell(process, "tell", subject)
        for process in self.processes:
            self.hear(process, until)

    def answer(self) -> None:
        """Give those that ask what all processes say."""
        for subject in set[str]().union(*(process.asks for process in self.processes)):
            self.ask(subject)
            told = self._sums() if subject == COUNTS else [*self._told(subject)]
            for process in [process for process in self.processes if subject in process.asks]:
                process.asks.remove(subject)
                self.tell(process, "all", (subject, told))

    def _sums(self) -> Families:
        return total([families(self.metrics.registry), self._dead, *self._told(COUNTS)])

    def _told(self, subject: str) -> Iterator[Any]:
        return (process.told[subject] for process in self.processes if subject in process.told)
