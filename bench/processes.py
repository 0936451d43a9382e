"""Programs that a run starts: each in a session of its own, on certain cores, and never left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class Failed(Exception):
    """A program did not do what it was started for."""


_held: list[socket.socket] = []


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on, for programs that listen on 127.0.0.1.

    They stay bound here until this process ends, so the kernel gives them to nobody else, neither to listen on nor to
    connect from. A program may bind one all the same: servers allow for it by SO_REUSEADDR, and nobody listens here.
    """
    for _ in range(count):
        one = socket.socket()
        _held.append(one)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("127.0.0.1", 0))
    return [one.getsockname()[1] for one in _held[-count:]]


@dataclass
class Cores:
    """Which cores the measured program gets, which one with two processes gets, and which the rest; None is any."""

    measured: set[int] | None
    pair: set[int] | None
    others: set[int] | None

    @classmethod
    def split(cls, pin: bool) -> Cores:
        """Give the proxy the last core for itself, where there are two or more; two for two, where there are four."""
        cores = sorted(os.sched_getaffinity(0))
        if not pin or len(cores) < 2:
            return cls(None, None, None)
        if len(cores) < 4:
            return cls({cores[-1]}, None, set(cores[:-1]))
        return cls({cores[-1]}, set(cores[-2:]), set(cores[:-2]))


@dataclass
class Programs:
    """The programs of a run. Leaving the ``with`` ends them all; so does the end of this process, whatever ends it."""

    folder: Path
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __enter__(self) -> Programs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(*reversed(self.running))

    def start(
        self,
        name: str,
        args: Sequence[str],
        cores: set[int] | None,
        env: Mapping[str, str] | None = None,
        *,
        stdin: int | None = None,
        stdout: int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a program; what it prints goes into a file, unless standard output has its own destination."""

        def prepare() -> None:  # in the child, before exec
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if cores is not None:
                os.sched_setaffinity(0, cores)

        with self.log(name).open("ab") as log:
            program = subprocess.Popen(
                args,
                stdin=subprocess.DEVNULL if stdin is None else stdin,
                stdout=log if stdout is None else stdout,
                stderr=log,
                env={**os.environ, **(env or {})},
                start_new_session=True,
                preexec_fn=prepare,
            )
        self.running.append(program)
        return program

    def stop(self, *programs: subprocess.Popen[bytes]) -> None:
        for program in programs:
            _signal(program, signal.SIGTERM)
        for program in programs:
            with suppress(subprocess.TimeoutExpired):
                program.wait(5)
            _signal(program, signal.SIGKILL)  # what is left of its session, also where the leader has ended
            program.wait()
            if program in self.running:
                self.running.remove(program)

    def log(self, name: str) -> Path:
        return self.folder / f"{name.replace(' ', '-')}.log"

    def tail(self, name: str, lines: int = 3) -> str:
        text = self.log(name).read_text(errors="replace")
        return " | ".join(text.splitlines()[-lines:])[-500:]


def _signal(program: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(program.pid, number)


def answers(port: int, request: bytes, timeout_s: float = 5.0) -> bool:
    """Say whether a request is answered with a 200."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout_s) as connection:
            connection.settimeout(timeout_s)
            connection.sendall(request)
            return connection.recv(64).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


def wait_until_answered(
    program: subprocess.Popen[bytes], port: int, request: bytes, limit_s: float, poll_s: float = 0.005
) -> float:
    """Return the seconds until a program answers its first request.

    Raises:
        Failed: it ended, or did not answer in time.
    """
    began = time.monotonic()
    while time.monotonic() - began < limit_s:
        if answers(port, request):
            return time.monotonic() - began
        if program.poll() is not None:
            raise Failed(f"it ended with {program.returncode}")
        time.sleep(poll_s)
    raise Failed(f"it did not answer within {limit_s:g} s")
