"""A parser process: reads what it is asked from a socket, line by line, and answers each line.

A line is ``KIND NUMBER DATA``: what is asked, of which stream, and JSON or a worker's own bytes. Asked are ``open`` (a
job), ``chunk`` (the data of one event), ``whole`` (a job and a reply) and ``close``. All but ``close`` get one answer:
``opened``; for a chunk any number of ``more`` (the data of one event) and then ``done``, or ``over`` when nothing more
is wanted of the worker; ``whole``; or ``error``, after which the stream is not known any more. The process itself says
``ready`` and what it knows of the model, or ``unusable`` and why, with number 0.

Whatever a parser does, it can hurt no stream but its own: what it raises ends that one, and a process that dies or
hangs is replaced by the coordinator. Nothing that was generated is logged; what a parser raised is told by its type and
its place in the code.
"""

from __future__ import annotations

import importlib
import socket
import sys
import traceback
from typing import Any

import orjson

Json = dict[str, Any]

_READ_BYTES = 1 << 18


def main(engine: str, settings: str, fd: str) -> None:
    """Serve until the coordinator closes the socket.

    Args:
        engine: ``module:class``, of what parses.
        settings: its keyword arguments as JSON.
        fd: of the socket.
    """
    connection = socket.socket(fileno=int(fd))
    try:
        parsers = _load(engine, orjson.loads(settings))
    except Exception as error:
        told = str(error) if type(error).__name__ == "Unusable" else _told(error)
        connection.sendall(line(b"unusable", b"0", orjson.dumps(told)))
        return
    connection.sendall(line(b"ready", b"0", orjson.dumps(parsers.facts)))
    Loop(parsers).run(connection)


def line(kind: bytes, number: bytes, data: bytes) -> bytes:
    return b"%b %b %b\n" % (kind, number, data)


class Loop:
    """The streams that are open, and what is done with each line."""

    def __init__(self, parsers: Any) -> None:
        self._parsers = parsers
        self._streams: dict[bytes, Any] = {}

    def run(self, connection: socket.socket) -> None:
        held = b""
        while data := connection.recv(_READ_BYTES):
            *lines, held = (held + data).split(b"\n") if b"\n" in data else (held + data,)
            if lines:
                connection.sendall(b"".join([self.answer(asked) for asked in lines]))

    def answer(self, asked: bytes) -> bytes:
        kind, number, data = asked.split(b" ", 2)
        try:
            return self._answer(kind, number, data)
        except Exception as error:
            self._streams.pop(number, None)
            refused = type(error).__name__ == "Refused"
            told = {"message": str(error) if refused else _told(error), "refused": refused}
            return line(b"error", number, orjson.dumps(told))

    def _answer(self, kind: bytes, number: bytes, data: bytes) -> bytes:
        if kind == b"chunk":
            return self._chunk(number, data)
        if kind == b"open":
            self._streams[number] = self._parsers.stream(orjson.loads(data))
            return line(b"opened", number, b"")
        if kind == b"whole":
            asked = orjson.loads(data)
            return line(b"whole", number, orjson.dumps(self._parsers.whole(asked["job"], asked["reply"])))
        self._streams.pop(number, None)
        return b""

    def _chunk(self, number: bytes, data: bytes) -> bytes:
        stream = self._streams.get(number)
        if stream is None:
            return line(b"done", number, b"")  # it has failed, or is over: nobody waits for more
        if data[:1] != b"{":
            return line(b"more", number, data) + line(b"done", number, b"")
        chunk = orjson.loads(data)
        made = stream.chunk(chunk)
        out = b"" if made is None else line(b"more", number, orjson.dumps(made))
        if stream.over:
            del self._streams[number]
            counted = orjson.dumps(stream.usage(chunk))
            return out + line(b"more", number, counted) + line(b"more", number, b"[DONE]") + line(b"over", number, b"")
        return out + line(b"done", number, b"")


def _load(engine: str, settings: Json) -> Any:
    module, _, name = engine.partition(":")
    return getattr(importlib.import_module(module), name)(**settings)


def _told(error: BaseException) -> str:
    """Return what may be told of an error: its text could quote what was generated."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"


if __name__ == "__main__":
    main(*sys.argv[1:])
