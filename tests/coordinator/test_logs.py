"""One line per record, as JSON or for people, to standard error."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest

from coordinator.logs import TRACE, HumanFormatter, JsonFormatter, access, log, set_up


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
    root.handlers[:], root.level = before[0], before[1]
    for logger, level in zip(quiet, before[2], strict=True):
        logger.setLevel(level)


@pytest.mark.parametrize("form", ["json", "human"])
def test_records_go_to_standard_error_once_in_the_form_that_was_asked_for(
    restored: None, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    set_up(logging.INFO, form)
    set_up(logging.INFO, form)
    access.info("request", extra={"fields": {"a": 1}})
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
