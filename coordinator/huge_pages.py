"""The interpreter's machine code in huge pages.

A request runs through a great part of the interpreter, some 700 pages of 4 KiB, and the processor can remember the
addresses of few of them at a time. Linux puts the pages of a file into no huge ones on most file systems, so the code
is copied into memory that has them, which then takes the place of the file's pages, in one system call.

What looks for the interpreter's file among the executable mappings, as py-spy and perf do, no longer finds it there.

Source: nodejs.org/api/cli.html, ``--use-largepages``, which does the same for node.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from ctypes import c_int, c_long, c_size_t, c_void_p
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_HUGE = 2 << 20

# Of <sys/mman.h>, Linux on x86-64.
_READ, _WRITE, _EXEC = 1, 2, 4
_PRIVATE_ANONYMOUS = 0x22
_MAYMOVE_FIXED = 3
_MADV_HUGEPAGE = 14
_FAILED = c_void_p(-1).value


class NoHugePages(RuntimeError):
    """Why the code stays where it is."""


class Mapping(NamedTuple):
    """A line of ``/proc/PID/maps``."""

    start: int
    end: int
    rights: str
    path: str


def move_code() -> int:
    """Move the code of the interpreter that runs this into huge pages.

    Returns: how many bytes are in huge pages.

    Raises:
        NoHugePages: everything is as it was.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise NoHugePages("it is done on Linux on x86-64 alone")
    libc = _libc()
    try:
        if may_run_short():
            raise NoHugePages("vm.overcommit_memory is 2, under which the move may fail half-way")
        with open("/proc/self/maps", errors="surrogateescape") as maps:
            start, end = whole_pages([mapping(line) for line in maps], _address_of_code())
        size = end - start
        copy = _reserve(libc, size)
        try:
            return _fill_and_move(libc, copy, start, size)
        except Exception:
            _done(libc.munmap, copy, size)
            raise
    except OSError as error:
        raise NoHugePages(str(error)) from error


def may_run_short(setting: str = "/proc/sys/vm/overcommit_memory") -> bool:
    """Say whether memory that is moved counts twice meanwhile: mremap looks for that when the old code is gone."""
    with open(setting) as text:
        return text.read().strip() == "2"


def mapping(line: str) -> Mapping:
    fields = line.split(None, 5)
    start, _, end = fields[0].partition("-")
    return Mapping(int(start, 16), int(end, 16), fields[1], fields[5].strip() if len(fields) > 5 else "")


def whole_pages(mappings: Sequence[Mapping], address: int) -> tuple[int, int]:
    """Return the huge pages that hold code around an address, and nothing but what the file has there to be read.

    Raises:
        NoHugePages: there is none.
    """
    found = next((at for at, one in enumerate(mappings) if one.start <= address < one.end), None)
    if found is None:
        raise NoHugePages("the interpreter's code was not found")
    code = mappings[found]
    if not code.path.startswith("/"):
        raise NoHugePages("the interpreter's code is in memory of its own already")
    start, end = code.start, code.end
    for before in reversed(mappings[:found]):
        if not _goes_on(before, code) or before.end != start:
            break
        start = before.start
    for behind in mappings[found + 1 :]:
        if not _goes_on(behind, code) or behind.start != end:
            break
        end = behind.end
    first, last = max(_up(start), _down(code.start)), min(_down(end), _up(code.end))
    if first >= last:
        raise NoHugePages("the interpreter's code fills no huge page")
    return first, last


def huge_bytes(smaps: Iterable[str], start: int) -> int:
    """Return how many bytes of the mapping that starts there are in huge pages, by ``/proc/PID/smaps``."""
    inside = False
    for line in smaps:
        name, _, rest = line.partition(" ")
        if "-" in name:
            inside = name.startswith((f"{start:x}-", f"{start:08x}-"))
        elif inside and name == "AnonHugePages:":
            return int(rest.split()[0]) * 1024
    return 0


def _fill_and_move(libc: Any, copy: int, start: int, size: int) -> int:
    _done(libc.madvise, copy, size, _MADV_HUGEPAGE)
    ctypes.memmove(copy, start, size)
    _done(libc.mprotect, copy, size, _READ | _EXEC)
    with open("/proc/self/smaps", errors="surrogateescape") as smaps:
        huge = huge_bytes(smaps, copy)
    if not huge:
        raise NoHugePages("the host gave none, see /sys/kernel/mm/transparent_hugepage/enabled")
    _done(libc.mremap, copy, size, size, _MAYMOVE_FIXED, start)  # who is in there meanwhile finds the same code
    return huge


def _reserve(libc: Any, size: int) -> int:
    """Return the start of so much memory, which begins with a huge page."""
    room = _done(libc.mmap, None, size + _HUGE, _READ | _WRITE, _PRIVATE_ANONYMOUS, -1, 0)
    start = _up(room)
    if start > room:
        _done(libc.munmap, room, start - room)
    _done(libc.munmap, start + size, room + _HUGE - start)
    return start


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.argtypes = [c_void_p, c_size_t, c_int, c_int, c_int, c_long]
    libc.mremap.argtypes = [c_void_p, c_size_t, c_size_t, c_int, c_void_p]
    libc.mmap.restype = libc.mremap.restype = c_void_p
    libc.madvise.argtypes = libc.mprotect.argtypes = [c_void_p, c_size_t, c_int]
    libc.munmap.argtypes = [c_void_p, c_size_t]
    return libc


def _done(call: Any, *args: int | None) -> int:
    """
    Raises:
        OSError
    """
    result: int = call(*args)
    if result in (-1, _FAILED):
        number = ctypes.get_errno()
        raise OSError(number, f"{call.__name__}: {os.strerror(number)}")
    return result


def _address_of_code() -> int:
    return ctypes.cast(ctypes.pythonapi.PyEval_EvalCode, c_void_p).value or 0


def _goes_on(one: Mapping, code: Mapping) -> bool:
    return one.path == code.path and "w" not in one.rights


def _up(address: int) -> int:
    return -(-address // _HUGE) * _HUGE


def _down(address: int) -> int:
    return address // _HUGE * _HUGE
