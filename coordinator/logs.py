"""Logging: one line per request, as JSON or for people, to standard error.

No line holds a prompt, an answer or a key: bodies and headers are never handed to a logger, but for trace, where
``redact`` has been over them.
"""

from __future__ import annotations

import logging
import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from envelope.json_codec import dumps

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TRACE = 5
logging.addLevelName(TRACE, "TRACE")
LEVELS = {"warning": logging.WARNING, "info": logging.INFO, "debug": logging.DEBUG, "trace": TRACE}

log = logging.getLogger("coordinator")
_access = logging.getLogger("coordinator.access")


class JsonFormatter(logging.Formatter):
    """One JSON object per line; what a caller puts into ``extra={"fields": ...}`` becomes keys."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return dumps(line).decode()


class HumanFormatter(logging.Formatter):
    """The same for a terminal: time, level, message, then ``key=value``."""

    def format(self, record: logging.LogRecord) -> str:
        clock = datetime.fromtimestamp(record.created, UTC).astimezone().strftime("%H:%M:%S.%f")[:-3]
        fields = _pairs(getattr(record, "fields", {}))
        line = f"{clock} {record.levelname.lower():7} {record.getMessage()} {fields}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class AccessLog:
    """The lines about requests. They are so many that they go past logging's machinery, which takes five times as long.

    Whether they are wanted is still the level of the logger ``coordinator.access``.

    Attributes:
        put: takes each line, with its end; None is standard error.
        human: lines for people, else JSON.
    """

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self.put: Callable[[bytes], object] | None = None
        self.human = False
        self._now = now
        self._second = 0
        self._clock = ""

    @property
    def enabled(self) -> bool:
        return _access.isEnabledFor(logging.INFO)

    def write(self, fields: Mapping[str, Any]) -> None:
        """Write one line about one request."""
        line = self._human(fields) if self.human else self._json(fields)
        (self.put or _to_stderr)(line)

    def _json(self, fields: Mapping[str, Any]) -> bytes:
        head = {"time": f"{self._time(UTC)}+00:00", "level": "info", "logger": _access.name, "message": "request"}
        return dumps({**head, **fields}) + b"\n"

    def _human(self, fields: Mapping[str, Any]) -> bytes:
        return f"{self._time(None)[11:]} info    request {_pairs(fields)}\n".encode()

    def _time(self, zone: Any) -> str:
        """Return the time in milliseconds; what is the same for a second is made once."""
        now = self._now()
        second = int(now)
        if second != self._second:
            self._second, self._clock = second, datetime.fromtimestamp(second, zone).strftime("%Y-%m-%dT%H:%M:%S")
        return f"{self._clock}.{int((now - second) * 1000):03d}"


access = AccessLog()


def _to_stderr(line: bytes) -> None:
    try:
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
    except (OSError, ValueError):
        pass  # nobody reads it; no request is refused for that, nor is there anywhere to tell


def _pairs(fields: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={_shown(value)}" for key, value in fields.items())


def _shown(value: Any) -> str:
    """Return a value for people; legs as ``{prefill: 0.12 ok 10.0.0.1:8000, ..}``."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_values(item)}" for key, item in value.items()) + "}"
    text = str(value)
    return text if text.isprintable() else ascii(text)[1:-1]  # a line stays one line, and can be written


def _values(item: Any) -> str:
    if isinstance(item, dict):
        return " ".join(_values(value) for value in item.values())
    return "[" + ", ".join(map(_values, item)) + "]" if isinstance(item, list) else str(item)


def set_up(level: int, form: str) -> None:
    """Send the root logger's records to standard error in the given form (``json`` or ``human``)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else HumanFormatter())
    access.human = form == "human"
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # Its access log repeats ours without the request id.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
