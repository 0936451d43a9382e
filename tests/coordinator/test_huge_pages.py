"""The interpreter's code in huge pages: which pages are taken, and that a process lives on in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coordinator import cli
from coordinator.huge_pages import Mapping, NoHugePages, huge_bytes, mapping, may_run_short, whole_pages
from tests.bounds import HANG_S

ROOT = Path(__file__).resolve().parents[2]
MB2 = 2 << 20

# Debian's python3.11, which lies at a fixed address, and a shared library between others.
FIXED = """\
00400000-0041f000 r--p 00000000 fe:00 260811                             /usr/bin/python3.11
0041f000-006d2000 r-xp 0001f000 fe:00 260811                             /usr/bin/python3.11
006d2000-00945000 r--p 002d2000 fe:00 260811                             /usr/bin/python3.11
00945000-00946000 r--p 00544000 fe:00 260811                             /usr/bin/python3.11
00946000-00a84000 rw-p 00545000 fe:00 260811                             /usr/bin/python3.11
00a84000-00ac9000 rw-p 00000000 00:00 0
2a1b4000-2a9f0000 rw-p 00000000 00:00 0                                  [heap]
"""
SHARED = """\
7f0000000000-7f0000100000 r-xp 00000000 fe:00 1                          /lib/other.so
7f0000100000-7f0000180000 r--p 00000000 fe:00 2                          /lib/libpython3.12.so.1.0
7f0000180000-7f0000480000 r-xp 00080000 fe:00 2                          /lib/libpython3.12.so.1.0
7f0000480000-7f0000700000 r--p 00380000 fe:00 2                          /lib/libpython3.12.so.1.0
7f0000700000-7f0000900000 rw-p 00600000 fe:00 2                          /lib/libpython3.12.so.1.0
7f0000900000-7f0000a00000 r--p 00000000 fe:00 3                          /lib/libpython3.12.so.1.0 (deleted)
"""


def mappings(maps: str) -> list[Mapping]:
    return [mapping(line) for line in maps.splitlines()]


@pytest.mark.parametrize(
    ("maps", "address", "expected"),
    [
        (FIXED, 0x41F000, (0x400000, 0x800000)),  # all of the code, and what is read only around it
        (FIXED, 0x6D1FFF, (0x400000, 0x800000)),
        (SHARED, 0x7F0000180000, (0x7F0000200000, 0x7F0000600000)),  # the code's beginning shares a page with others
        (SHARED.replace("480000", "380000"), 0x7F0000180000, (0x7F0000200000, 0x7F0000400000)),
    ],
)
def test_whole_pages_around_the_code_are_taken(maps: str, address: int, expected: tuple[int, int]) -> None:
    assert whole_pages(mappings(maps), address) == expected


@pytest.mark.parametrize(
    ("maps", "address", "reason"),
    [
        (FIXED, 0x300000, "was not found"),
        (FIXED.replace("/usr/bin/python3.11", ""), 0x41F000, "of its own already"),
        (SHARED, 0x7F0000000000, "fills no huge page"),
        # What is next to it can be written, or there is a hole.
        (FIXED.replace("6d2000-00945000 r--p", "6d2000-00945000 rw-p").replace("00400", "00410"), 0x41F000, "fills no"),
        (SHARED.replace("180000-", "280000-").replace("480000-", "490000-"), 0x7F0000290000, "fills no"),
    ],
)
def test_nothing_else_is_taken(maps: str, address: int, reason: str) -> None:
    with pytest.raises(NoHugePages, match=reason):
        whole_pages(mappings(maps), address)


@pytest.mark.parametrize(("start", "expected"), [(0x400000, MB2), (0x7F0000000000, 0), (0x40, 0)])
def test_the_kernel_says_how_much_of_a_mapping_is_in_huge_pages(start: int, expected: int) -> None:
    smaps = """\
00400000-00800000 r-xp 00000000 00:00 0
Size:               4096 kB
AnonHugePages:      2048 kB
VmFlags: rd ex mr mw me hg
7f0000000000-7f0000200000 r-xp 00000000 00:00 0
AnonHugePages:         0 kB
"""
    assert huge_bytes(smaps.splitlines(), start) == expected


# Threads are in the code that moves.
SCRIPT = """
import json, sys, threading
from coordinator.huge_pages import NoHugePages, move_code
done, turns = threading.Event(), [0, 0]
def work(index):
    while not done.is_set():
        assert json.loads(json.dumps({"a": [index] * 100})) == {"a": [index] * 100}
        turns[index] += 1
threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
for thread in threads: thread.start()
try:
    moved = move_code()
except NoHugePages as error:
    moved, reason = 0, str(error)
before = list(turns)
while any(now < then + 100 for now, then in zip(turns, before)):
    threading.Event().wait(0.01)
done.set()
for thread in threads: thread.join()
if moved:
    try:
        moved += move_code()
    except NoHugePages as error:
        reason = str(error)
print(json.dumps([moved, reason]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has them")
def test_a_process_and_its_threads_live_on_in_huge_pages() -> None:
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=HANG_S)
    moved, reason = json.loads(done.stdout)
    assert moved % MB2 == 0
    if moved:
        assert "of its own already" in reason  # the second time
    else:
        known = ("the host gave none", "fills no huge page", "x86-64", "Errno", "overcommit")
        assert any(why in reason for why in known)


MAPS_A_FILE = """
import mmap, os, sys
from coordinator.huge_pages import NoHugePages, move_code
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
name = os.path.basename(os.fsencode(sys.argv[1]))
assert name in open("/proc/self/maps", "rb").read()
try:
    move_code()
except NoHugePages:
    pass
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has such names, and /proc")
def test_what_else_is_mapped_may_have_any_name(tmp_path: Path) -> None:
    """Names of files are bytes, in no encoding."""
    path = os.fsencode(tmp_path) + b"/\xe9"
    with open(path, "wb") as file:
        file.write(bytes(4096))
    command = [sys.executable, "-c", MAPS_A_FILE, path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("setting", "expected"), [("0\n", False), ("1\n", False), ("2\n", True)])
def test_a_move_that_may_fail_halfway_is_not_begun(tmp_path: Path, setting: str, expected: bool) -> None:
    (tmp_path / "overcommit_memory").write_text(setting)
    assert may_run_short(str(tmp_path / "overcommit_memory")) is expected


def test_a_python_without_ctypes_serves_without_them(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.delitem(sys.modules, "coordinator.huge_pages")
    monkeypatch.setitem(sys.modules, "ctypes", None)
    with caplog.at_level("INFO"):
        cli._take_huge_pages()
    (line,) = caplog.records
    assert "ctypes" in line.fields["reason"]
