"""Ask the package index whether a package that the locks pin has a known vulnerability.

PyPI tells the known vulnerabilities of each release in its JSON API, from the Python Packaging Advisory Database. Some
indexes serve the record of a project but not of each release; it speaks of the latest release, and is used for a
package that is pinned at just that one. What neither record speaks of is named as not audited, and is never taken for
sound: pip-audit leaves such a package out, says "No known vulnerabilities found" and exits with 0.

Exit codes: 0 all are audited and sound, 1 one is vulnerable, 2 none could be audited, 3 some could not be audited.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import urlopen

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SOUND, VULNERABLE, NONE_AUDITED, SOME_NOT_AUDITED = 0, 1, 2, 3

_LOCKS = Path(__file__).resolve().parents[1] / "requirements"
_PIN = re.compile(r"^([a-z0-9._-]+)==([^\s;]+)", re.MULTILINE)
_TIMEOUT_S = 20


class NotAudited(Exception):
    """The index has nothing to say of a release; the text says why."""


@dataclass(frozen=True, order=True)
class Pin:
    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def pins(locks: Iterable[Path]) -> list[Pin]:
    """Return each package of the locks once."""
    return sorted({Pin(*found) for lock in locks for found in _PIN.findall(lock.read_text())})


def advisories(index: str, pin: Pin) -> list[dict[str, Any]]:
    """Return what is known against a release.

    Raises:
        NotAudited: the index does not speak of it, or does not answer.
    """
    try:
        record = _record(f"{index}/{pin.name}/{pin.version}/json") or _record(f"{index}/{pin.name}/json")
    except (OSError, HTTPException, ValueError) as error:
        raise NotAudited(f"no answer: {error}") from None
    if record is None:
        raise NotAudited("the index does not know it")
    if record["info"]["version"] != pin.version:
        raise NotAudited(f"the index speaks of {record['info']['version']} alone: make lock ARGS=--upgrade")
    if "vulnerabilities" not in record:
        raise NotAudited("the index keeps no advisories")
    return [each for each in record["vulnerabilities"] if not each.get("withdrawn")]


def _record(url: str) -> dict[str, Any] | None:
    try:
        with urlopen(url, timeout=_TIMEOUT_S) as answer:
            record = json.load(answer)
    except HTTPError as error:
        if error.code == 404:
            return None
        raise
    if not isinstance(record, dict):
        raise ValueError("not a record")
    return record


def audit(index: str, pinned: Sequence[Pin], accepted: frozenset[str]) -> int:
    """Print what is wrong with which release, and return the exit code."""
    with ThreadPoolExecutor(8) as threads:
        said = list(threads.map(lambda pin: _ask(index, pin), pinned))
    vulnerable = not_audited = 0
    for pin, answer in zip(pinned, said, strict=True):
        if isinstance(answer, NotAudited):
            not_audited += 1
            print(f"NOT AUDITED  {pin}: {answer}")
            continue
        for each in answer:
            known = {each["id"], *each.get("aliases", ())} & accepted
            vulnerable += not known
            print(f"{'accepted   ' if known else 'VULNERABLE '}  {pin}: {_line(each)}")
    print(f"{len(pinned) - not_audited} of {len(pinned)} packages audited, {vulnerable} known vulnerabilities")
    if vulnerable:
        return VULNERABLE
    if not_audited == len(pinned):
        return NONE_AUDITED
    return SOME_NOT_AUDITED if not_audited else SOUND


def _ask(index: str, pin: Pin) -> list[dict[str, Any]] | NotAudited:
    try:
        return advisories(index, pin)
    except NotAudited as error:
        return error


def _line(advisory: dict[str, Any]) -> str:
    fixed = ", ".join(advisory.get("fixed_in") or ()) or "no release yet"
    return f"{advisory['id']}, fixed in {fixed}: {advisory.get('link', '')}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("locks", nargs="*", type=Path, help="lock files; default requirements/*.txt")
    parser.add_argument("--index", default="https://pypi.org/pypi", help="the index's JSON API")
    parser.add_argument("--accept", action="append", default=[], metavar="ID", help="an advisory that is known of")
    args = parser.parse_args(argv)
    pinned = pins(args.locks or sorted(_LOCKS.glob("*.txt")))
    if not pinned:
        parser.error("the locks pin nothing")
    return audit(args.index, pinned, frozenset(args.accept))


if __name__ == "__main__":
    sys.exit(main())
