"""The locks are what pyproject.toml asks for: no requirement without its pin, no pin without its hash."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "requirements"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
# The extras of the image are in the lock of the image; the others have a lock of their own name.
OWN_LOCK = {"demo", "render", "dev", "bench", "release"}
FILES = sorted(LOCKS.glob("*.txt"))

_PIN = re.compile(r"^([a-z0-9._-]+)==([^\s;]+)(?: ; ([^\\]+))? ?\\?\n((?:    --hash=.*\n)*)", re.MULTILINE)


def own(extra: str) -> list[Requirement]:
    """Return what an extra asks for, with what the extras that it names ask for."""
    asked = [Requirement(text) for text in EXTRAS[extra]]
    inner = [name for each in asked if each.name == "pd-coordinator" for name in sorted(each.extras)]
    return [each for each in asked if each.name != "pd-coordinator"] + [each for name in inner for each in own(name)]


BASE = [Requirement(text) for text in PROJECT["project"]["dependencies"]]
WANTED = [("runtime", each) for each in BASE]
# vLLM's wheel, and torch's beside it, are those of an accelerator: whoever deploys it knows which.
UNLOCKED = {"vllm"}
LOCKED = [extra for extra in EXTRAS if extra not in UNLOCKED]
WANTED += [(extra if extra in OWN_LOCK else "runtime", each) for extra in LOCKED for each in own(extra)]


@cache
def pins(lock: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, version, _, _ in _PIN.findall((LOCKS / f"{lock}.txt").read_text()):
        found.setdefault(name, set()).add(version)
    return found


@pytest.mark.parametrize(("lock", "asked"), WANTED, ids=lambda value: getattr(value, "name", value))
def test_a_requirement_has_its_pin(lock: str, asked: Requirement) -> None:
    """Otherwise: make lock."""
    versions = pins(lock).get(asked.name.lower(), set())
    assert versions, f"{asked} is not in requirements/{lock}.txt: make lock"
    assert all(asked.specifier.contains(version) for version in versions), f"{asked}: {versions}: make lock"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_each_pin_has_hashes(file: Path) -> None:
    text = file.read_text()
    found = _PIN.findall(text)
    assert len(found) == len(re.findall(r"^[^\s#]", text, re.MULTILINE)), "a line that is no pin"
    assert all(hashes for *_, hashes in found)


def test_a_package_has_one_version_in_all_locks() -> None:
    """A wheel that is tested is the wheel that the image has."""
    for name, versions in pins("runtime").items():
        assert pins("dev")[name] == versions, f"{name} in requirements/dev.txt: make lock"
        for lock in ("demo", "bench", "release"):
            assert pins(lock).get(name, versions) == versions, f"{name} in requirements/{lock}.txt: make lock"


def test_what_builds_the_wheel_is_pinned() -> None:
    (asked,) = (Requirement(text) for text in PROJECT["build-system"]["requires"])
    assert all(asked.specifier.contains(version) for version in pins("build")[asked.name])
