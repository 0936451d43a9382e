"""An audit that could not be made never looks like one that found nothing."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from scripts import audit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOLE = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fixed_in": ["1.1"], "link": "https://example.test/1"}


class Index:
    """A package index whose records are those of a dict, by path."""

    def __init__(self, url: str, records: dict[str, Any]) -> None:
        self.url, self.records = url, records

    def release(self, name: str, version: str, *advisories: dict[str, Any]) -> None:
        self.records[f"/{name}/{version}/json"] = {"info": {"version": version}, "vulnerabilities": advisories}

    def project(self, name: str, latest: str, *advisories: dict[str, Any]) -> None:
        self.records[f"/{name}/json"] = {"info": {"version": latest}, "vulnerabilities": advisories}


@pytest.fixture
def index() -> Iterator[Index]:
    records: dict[str, Any] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            record = records.get(self.path)
            self.send_response(200 if record else 404)
            self.end_headers()
            self.wfile.write(json.dumps(record).encode())

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield Index(f"http://127.0.0.1:{server.server_port}", records)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def lock(tmp_path: Path) -> str:
    file = tmp_path / "lock.txt"
    pins = ("foo==1.0 \\", "    --hash=sha256:00", "bar==2.0 ; python_version < '3.12' \\", "    --hash=sha256:01")
    file.write_text("\n".join(("# a lock", *pins, "")))
    return str(file)


def test_all_releases_are_sound(index: Index, lock: str, capsys: pytest.CaptureFixture[str]) -> None:
    index.release("foo", "1.0")
    index.release("bar", "2.0", HOLE | {"withdrawn": "2026-01-01"})
    assert audit.main([lock, "--index", index.url]) == audit.SOUND
    assert capsys.readouterr().out == "2 of 2 packages audited, 0 known vulnerabilities\n"


def test_a_vulnerable_release_is_named_with_what_mends_it(
    index: Index, lock: str, capsys: pytest.CaptureFixture[str]
) -> None:
    index.release("foo", "1.0", HOLE)
    index.release("bar", "2.0")
    assert audit.main([lock, "--index", index.url]) == audit.VULNERABLE
    assert "foo 1.0: PYSEC-1, fixed in 1.1: https://example.test/1" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["PYSEC-1", "CVE-1"])
def test_an_accepted_advisory_is_shown_and_does_not_fail(
    name: str, index: Index, lock: str, capsys: pytest.CaptureFixture[str]
) -> None:
    index.release("foo", "1.0", HOLE)
    index.release("bar", "2.0")
    assert audit.main([lock, "--index", index.url, "--accept", name]) == audit.SOUND
    assert "accepted" in capsys.readouterr().out


def test_the_record_of_the_project_speaks_of_its_latest_release_alone(
    index: Index, lock: str, capsys: pytest.CaptureFixture[str]
) -> None:
    index.project("foo", "1.0", HOLE)
    index.project("bar", "2.1")
    assert audit.main([lock, "--index", index.url]) == audit.VULNERABLE
    told = capsys.readouterr().out
    assert "VULNERABLE   foo 1.0" in told
    assert "NOT AUDITED  bar 2.0: the index speaks of 2.1 alone" in told


def test_a_release_that_the_index_does_not_know_is_not_taken_for_sound(index: Index, lock: str) -> None:
    index.release("foo", "1.0")
    assert audit.main([lock, "--index", index.url]) == audit.SOME_NOT_AUDITED


@pytest.mark.parametrize("record", [{"info": {"version": "1.0"}}, "not JSON"])
def test_a_record_without_advisories_is_no_audit(record: Any, index: Index, lock: str) -> None:
    index.records |= {"/foo/1.0/json": record, "/bar/2.0/json": record}
    assert audit.main([lock, "--index", index.url]) == audit.NONE_AUDITED


def test_an_index_that_does_not_answer_fails_the_audit(lock: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.main([lock, "--index", "http://127.0.0.1:9"]) == audit.NONE_AUDITED
    assert "0 of 2 packages audited" in capsys.readouterr().out


def test_locks_that_pin_nothing_are_a_mistake(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("# nothing\n")
    with pytest.raises(SystemExit):
        audit.main([str(empty)])
