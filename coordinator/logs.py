"""Logging: one line per request, as JSON or for people, to standard error.

No line holds a prompt, an answer or a key: bodies and headers are never handed to a logger.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any

from envelope.json_codec import dumps

TRACE = 5
LEVELS = {"warning": logging.WARNING, "info": logging.INFO, "debug": logging.DEBUG, "trace": TRACE}

access = logging.getLogger("coordinator.access")
log = logging.getLogger("coordinator")


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
        fields = " ".join(f"{key}={value}" for key, value in getattr(record, "fields", {}).items())
        line = f"{clock} {record.levelname.lower():7} {record.getMessage()} {fields}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def set_up(level: int, form: str) -> None:
    """Send the root logger's records to standard error in the given form (``json`` or ``human``)."""
    logging.addLevelName(TRACE, "TRACE")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else HumanFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # Its access log repeats ours without the request id.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
