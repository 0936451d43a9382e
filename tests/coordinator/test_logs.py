"""One line per record, as JSON or for people, to standard error."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest

from coordinator.logs import TRACE, AccessLog, HumanFormatter, JsonFormatter, access, log, set_up


def record(message: str = "request", level: int = logging.INFO, fields: Any = None, error: Any = None) -> Any:
    made = logging.LogRecord("coordinator.access", level, __file__, 1, message, (), error)
    made.created = 1790000000.25
    if fields is not None:
        made.fields = fields
    return made


def failure() -> Any:
    try:
        raise ValueError("no")
    except ValueError:
        return sys.exc_info()


def test_a_json_line_has_the_time_the_level_the_message_and_the_fields() -> None:
    line = JsonFormatter().format(record(fields={"request_id": "r1", "legs": {"decode": {"seconds": 0.5}}}))
    assert json.loads(line) == {
        "time": "2026-09-21T14:13:20.250+00:00",
        "level": "info",
        "logger": "coordinator.access",
        "message": "request",
        "request_id": "r1",
        "legs": {"decode": {"seconds": 0.5}},
    }
    assert "\n" not in line


def test_a_json_line_stays_one_line_whatever_is_in_it() -> None:
    line = JsonFormatter().format(record("two\nlines", fields={"x": "a\r\nb\u2028"}, error=failure()))
    assert "\n" not in line
    assert json.loads(line)["message"] == "two\nlines"
    assert "ValueError: no" in json.loads(line)["exception"]


def test_a_line_for_people_has_the_time_the_level_the_message_and_the_fields() -> None:
    line = HumanFormatter().format(record("draining", logging.WARNING, {"in_flight": 3, "x": "y"}))
    clock, rest = line.split(" ", 1)
    assert clock.count(":") == 2
    assert clock.endswith(".250")
    assert rest == "warning draining in_flight=3 x=y"


def test_without_fields_a_line_for_people_has_no_trailing_blank_and_an_error_stands_below() -> None:
    assert HumanFormatter().format(record("hello")).endswith(" info    hello")
    head, *trace = HumanFormatter().format(record("hello", error=failure())).splitlines()
    assert head.endswith(" hello")
    assert trace[-1] == "ValueError: no"


@pytest.fixture
def restored() -> Any:
    """Put logging back as it was: it is the process's own."""
    root = logging.getLogger()
    quiet = [logging.getLogger(name) for name in ("aiohttp.access", "asyncio")]
    before = (root.handlers[:], root.level, [logger.level for logger in quiet])
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    access.human = False
    for logger, level in zip(quiet, before[2], strict=True):
        logger.setLevel(level)


@pytest.mark.parametrize("form", ["json", "human"])
def test_records_go_to_standard_error_once_in_the_form_that_was_asked_for(
    restored: None, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    set_up(logging.INFO, form)
    set_up(logging.INFO, form)
    assert access.enabled
    access.write({"a": 1})
    log.debug("not shown")
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert (json.loads(err)["a"] == 1) if form == "json" else err.endswith("request a=1\n")


def test_levels_below_debug_have_a_name_and_other_peoples_access_logs_are_quiet(
    restored: None, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up(TRACE, "json")
    log.log(TRACE, "fine")
    logging.getLogger("aiohttp.access").info("GET /")
    logging.getLogger("asyncio").info("x")
    (line,) = capsys.readouterr().err.splitlines()
    assert (json.loads(line)["level"], json.loads(line)["message"]) == ("trace", "fine")


def written(fields: Any, *, human: bool = False, now: float = 1790000000.25) -> str:
    lines: list[bytes] = []
    made = AccessLog(lambda: now)
    made.put, made.human = lines.append, human
    made.write(fields)
    made.write(fields)
    assert lines[0] == lines[1]
    return lines[0].decode()


def test_a_line_about_a_request_is_what_logging_would_have_written() -> None:
    """It goes past logging's machinery for speed alone."""
    fields = {"request_id": "r1", "seconds": 0.25, "error": "two\nlines"}
    assert written(fields) == JsonFormatter().format(record(fields=fields)) + "\n"
    assert written(fields, human=True) == HumanFormatter().format(record(fields=fields)) + "\n"


def test_its_clock_goes_on_with_the_second() -> None:
    times, lines = iter((1790000000.9996, 1790000001.0, 1790000061.25)), list[bytes]()
    made = AccessLog(lambda: next(times))
    made.put = lines.append
    for _ in range(3):
        made.write({})
    assert [json.loads(line)["time"] for line in lines] == [
        "2026-09-21T14:13:20.999+00:00",
        "2026-09-21T14:13:21.000+00:00",
        "2026-09-21T14:14:21.250+00:00",
    ]


def test_a_line_for_people_stays_one_line_and_can_be_written_whatever_is_in_it() -> None:
    line = written({"error": "a\r\nb\u2028\ud800"}, human=True)
    assert line.endswith("error=a\\r\\nb\\u2028\\ud800\n")
    assert len(line.splitlines()) == 1


CALL = {"worker": "p:1", "seconds": 0.1, "outcome": "LegBusy"}


def test_legs_are_short_for_people() -> None:
    legs = {
        "render": {"seconds": 0.004, "outcome": "ok", "worker": "r:1"},
        "prefill": {"seconds": 0.2, "outcome": "ok", "calls": [CALL]},
    }
    assert "legs={render: 0.004 ok r:1, prefill: 0.2 ok [p:1 0.1 LegBusy]}" in written({"legs": legs}, human=True)


@pytest.mark.parametrize("error", [BrokenPipeError(), ValueError("I/O operation on closed file")])
def test_a_request_is_not_failed_because_nobody_reads_its_line(
    restored: None, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    class Gone:
        @property
        def buffer(self) -> Any:
            raise error

    monkeypatch.setattr(sys, "stderr", Gone())
    access.write({"a": 1})


def test_the_level_of_the_access_logger_says_whether_lines_are_wanted(restored: None) -> None:
    set_up(logging.WARNING, "json")
    assert not access.enabled
    set_up(logging.INFO, "json")
    assert access.enabled
