"""Several serving processes on one port: starts them, starts again those that die, and ends them together.

Each process listens by itself (``SO_REUSEPORT``), and the kernel spreads new connections over them by a hash. With one
listening socket for all, whoever wakes up first takes them: of 64 connections, 4 processes had 0, 24, 40 and 0.

This process serves nothing. It has one thread, no event loop and no connection, so that it can be forked at any time.
It holds the port, so that a wrong one is told once and no other program gets it between two starts.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from coordinator.app import build
from coordinator.logs import log
from coordinator.processes.channel import COUNTS, Line, pack
from coordinator.processes.crew import Crew, Process
from coordinator.processes.ports import reserve
from coordinator.processes.rollout import Rollout
from coordinator.processes.shares import share
from coordinator.reload import FileWatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.config import Config

# Between a death and the next start. A process that lived so long was well, and its death is the first again.
_FIRST_DELAY_S, _LONGEST_DELAY_S, _WELL_AFTER_S = 0.1, 30.0, 60.0
# Each scrape asks what is counted, and so does the clock: a process that is killed takes no more with it.
_COUNT_EVERY_S = 5.0
_LOOK_EVERY_S = 5.0
_HEARD_WITHIN_S = 5.0
# Beyond ``shutdown_timeout``: hand-overs that nobody took have ten seconds to be delivered (``release``).
_END_WITHIN_S, _STOP_WITHIN_S = 15.0, 5.0

Ended = tuple[int, Sequence[str]]
"""An exit code, and what is wrong in sentences."""


@dataclass
class _Vacancy:
    """The place of a process that has died."""

    index: int
    due: float


class Supervisor:
    """
    Args:
        path: of the file that the configuration came from.
        serve: serves in a forked process until it is told to stop; returns the exit code, and what is wrong, if so.
    """

    def __init__(self, config: Config, path: str, serve: Callable[[Config, socket.socket], Ended]) -> None:
        build(config)  # what cannot be opened is told here, once
        self._serve = serve
        self._file = FileWatch(path)
        self._crew = Crew()
        self._rollout = Rollout(self._crew, config, path, self._share)
        self._vacancies: list[_Vacancy] = []
        self._delays_s = [0.0] * config.server.workers
        self._came: list[int] = []
        self._stopping = False
        self._kill_at = math.inf
        self._count_at = self._look_at = 0.0
        self._ended: Ended = 0, []

    def run(self) -> Ended:
        """Serve until told to stop; return the exit code, and what is wrong, if so.

        Raises:
            OSError: a port is taken, or not ours to bind.
        """
        server = self._rollout.config.server
        with reserve(server.listen_addr, server.metrics_port) as (port, self._held):
            self._listen_addr = replace(server.listen_addr, port=port)
            self._watch_signals()
            for index in range(server.workers):
                self._start(index)
            while self._crew.processes or not self._stopping:
                self._turn()
        return self._ended

    def _watch_signals(self) -> None:
        """Note signals as they come, and have them end a wait."""
        self._wake, waking = self._waking = socket.socketpair()
        for end in self._waking:
            end.setblocking(False)
        signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda came, _frame: self._came.append(came))

    def _turn(self) -> None:
        """Wait for something, and do what is to be done."""
        for process in self._wait():
            self._crew.hear(process)
        while self._came:
            self._heed(self._came.pop(0))
        for process in list(self._crew.processes):
            self._reap(process)
        self._rollout.follow()
        self._by_the_clock(time.monotonic())
        self._crew.answer()

    def _wait(self) -> list[Process]:
        """Return the processes that have said something, as soon as there is anything to be done."""
        due = min(self._kill_at, self._count_at, self._look_at, *(vacancy.due for vacancy in self._vacancies))
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            for process in self._crew.processes:
                if not process.silent:
                    selector.register(process.line, selectors.EVENT_READ, process)
            ready = [key.data for key, _ in selector.select(max(due - time.monotonic(), 0.0))]
        if None in ready:
            self._wake.recv(4096)
        return [process for process in ready if process is not None]

    def _heed(self, number: int) -> None:
        if number == signal.SIGHUP:
            self._rollout.ask()
        elif number in (signal.SIGTERM, signal.SIGINT) and self._stopping:
            self._stop("stop", _STOP_WITHIN_S)
        elif number in (signal.SIGTERM, signal.SIGINT):
            self._stop("drain", self._rollout.config.server.shutdown_timeout + _END_WITHIN_S)

    def _by_the_clock(self, now: float) -> None:
        for vacancy in [vacancy for vacancy in self._vacancies if vacancy.due <= now]:
            self._vacancies.remove(vacancy)
            self._start(vacancy.index)
        if now >= self._look_at:
            self._look_at = now + _LOOK_EVERY_S
            if self._file.changed() and self._rollout.config.config.watch:
                self._rollout.ask()
        if now >= self._count_at:
            self._count_at = now + _COUNT_EVERY_S
            self._crew.ask(COUNTS)
        if now >= self._kill_at:
            self._kill_at = math.inf
            for process in self._crew.processes:
                log.warning("%s does not end, and is killed", process)
                os.kill(process.pid, signal.SIGKILL)

    def _stop(self, word: str, within_s: float) -> None:
        self._stopping = True
        self._vacancies.clear()
        self._kill_at = time.monotonic() + within_s
        self._crew.tell_all(word)

    def _start(self, index: int) -> None:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            self._become(index, ours, theirs)
        theirs.close()
        self._crew.processes.append(Process(index, pid, Line(ours, _HEARD_WITHIN_S), time.monotonic()))

    def _become(self, index: int, ours: socket.socket, theirs: socket.socket) -> None:
        """Serve, in the forked process, and end it."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            # A terminal's Ctrl-C, and its end, reach every process; what is to be done the supervisor says.
            for number in (signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            # An end that stayed open here would hide from another process that the supervisor is gone.
            for process in self._crew.processes:
                process.line.close()
            for end in (ours, *self._waking, *self._held):
                end.close()
            told = theirs.dup()  # what serves closes its own
            code, problems = self._serve(self._share(self._rollout.config, index), theirs)
            if problems:
                told.setblocking(True)
                told.sendall(pack("problems", problems))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _share(self, config: Config, index: int) -> Config:
        config = share(config, index)
        server = config.server.model_copy(update={"listen_addr": self._listen_addr})  # port 0 is one port for all
        return config.model_copy(update={"server": server})

    def _reap(self, process: Process) -> None:
        pid, status = os.waitpid(process.pid, os.WNOHANG)
        if not pid:
            return
        code = os.waitstatus_to_exitcode(status)
        self._crew.lose(process)
        if self._stopping:
            return
        if self._crew.up:
            self._start_again(process, code)
        else:  # it could not even start, nor can the others
            self._ended = code if code > 0 else 1, process.problems
            self._stop("stop", _STOP_WITHIN_S)

    def _start_again(self, process: Process, code: int) -> None:
        """Fill the place of a process that has died; the more often it dies, the later."""
        now = time.monotonic()
        before_s = 0.0 if now - process.began >= _WELL_AFTER_S else self._delays_s[process.index]
        delay_s = self._delays_s[process.index] = min(max(before_s * 2, _FIRST_DELAY_S), _LONGEST_DELAY_S)
        self._vacancies.append(_Vacancy(process.index, now + delay_s))
        self._crew.metrics.restarts.inc()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        how += "".join(f": {problem}" for problem in process.problems)
        log.error("%s %s; another is started in %g s", process, how, delay_s)
