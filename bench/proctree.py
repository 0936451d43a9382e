"""CPU time and memory of a program and all that it started, read from the kernel.

A program is started in a session of its own (``processes``), and its processes are those of the session. CPU time is
the kernel's own count in nanoseconds (``sum_exec_runtime``), the one that /proc/PID/task/*/schedstat shows by thread,
here read through the process's CPU clock, which keeps what ended threads have used.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")
_CPUCLOCK_SCHED = 2  # kernel: include/linux/posix-timers_types.h


class ProcessTree:
    """The processes of one session, as they are when the object is made."""

    def __init__(self, leader: int) -> None:
        self.pids = [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _session(pid) == leader]

    def cpu_ns(self) -> int:
        """Return what user code and kernel have used for these processes since they began."""
        return sum(map(process_cpu_ns, self.pids))

    def rss_bytes(self) -> int:
        return sum(map(_rss_bytes, self.pids))


def children(parent: int) -> list[int]:
    """Return the processes that a process has started, those with a session of their own included."""
    return [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _parent(pid) == parent]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def process_cpu_ns(pid: int) -> int:
    """Return what one process has used, with all its threads and without its children."""
    try:
        return time.clock_gettime_ns((~pid << 3) | _CPUCLOCK_SCHED)
    except OSError:  # it has ended
        return 0


def _rss_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except OSError:
        return 0
