"""Server-sent events: bytes in, whole raw events out, and what one raw event says.

A raw event is the bytes of its lines and of the blank line that ends it, unchanged, so that what needs no
change can be relayed byte for byte. Lines end at LF, CR or CRLF and nowhere else: U+2028 and its like are
legal inside JSON strings.

Source: WHATWG HTML, "Server-sent events", 9.2.5 and 9.2.6.
"""

from __future__ import annotations

import re

MAX_EVENT_BYTES = 16 * 1024 * 1024

_BOM = b"\xef\xbb\xbf"
_LINE_END = re.compile(rb"\r\n|\n|\r")
_BLANK_LINE = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")  # atomic: a CRLF is never two line ends


class EventTooLarge(ValueError):
    """An event has more bytes than the cap."""


class Events:
    """Cuts a byte stream, which arrives in any pieces, at the ends of its events.

    Args:
        max_event_bytes: the largest event, finished or not, that is taken.

    Attributes:
        held: what has come of the unfinished event; empty is between two events.
    """

    __slots__ = ("_comments", "_last", "_max", "_size", "held")

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max = max_event_bytes
        self.held: list[bytes] = []  # joined once, so small reads stay linear
        self._size = 0
        self._last = b""
        self._comments = True  # what is held may be whole comment lines

    @property
    def unfinished(self) -> bool:
        """Whether the bytes that are held begin an event; a stray line end or a comment does not."""
        return not _only_comments(b"".join(self.held))

    def whole(self, data: bytes) -> bytes:
        """Return all bytes so far that are not yet returned, up to the last event's end; the rest is kept.

        Raises:
            EventTooLarge: an event is larger than the cap.
        """
        if data[-2:] == b"\n\n":
            if not self.held and len(data) <= self._max:
                return data
            return self._join(data, len(data))
        end = _last_end(self._last + data) - len(self._last)
        if end == len(data) and not self.held and end <= self._max:
            return data
        return self._join(data, end)

    def feed(self, data: bytes) -> list[bytes]:
        """Return the raw events that ``data`` completes, each with its blank line.

        Raises:
            EventTooLarge: an event is larger than the cap.
        """
        block = self.whole(data)
        return split(block) if block else []

    def _join(self, data: bytes, end: int) -> bytes:
        if end <= 0:
            return self._keep(data)
        self.held.append(data[:end])
        block = b"".join(self.held)
        if len(block) > self._max and any(len(event) > self._max for event in split(block)):
            raise EventTooLarge(f"an event is larger than {self._max} bytes")
        self._clear()
        return block + self._keep(data[end:]) if end < len(data) else block

    def _keep(self, data: bytes) -> bytes:
        if not data:
            return b""
        self.held.append(data)
        self._size += len(data)
        self._last = data[-1:]
        if self._size > self._max:
            raise EventTooLarge(f"an event is larger than {self._max} bytes")
        return self._heartbeat() if self._comments and self._last in b"\r\n" else b""

    def _heartbeat(self) -> bytes:
        # A comment line is there to be seen at once: it does not wait for the event that follows it. Nor does
        # the LF of a CRLF that was cut in two after an event's end.
        held = b"".join(self.held)
        self._comments = held[:1] in b":\r\n" and _only_comments(held)
        if not self._comments:
            return b""
        self._clear()
        return held

    def _clear(self) -> None:
        self.held, self._size, self._last, self._comments = [], 0, b"", True


def split(block: bytes) -> list[bytes]:
    """Cut bytes that end on an event's end into raw events."""
    if block.find(b"\r") < 0:  # `in` raises and catches a TypeError first
        pieces = block.split(b"\n\n")
        rest = pieces.pop()
        events = [piece + b"\n\n" for piece in pieces]
    else:
        ends = [found.end() for found in _BLANK_LINE.finditer(block)]
        events = [block[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        rest = block[ends[-1] if ends else 0 :]
    if rest:
        events.append(rest)
    return events


def data_of(event: bytes) -> bytes | None:
    """Return the data of a raw event, its lines joined by LF, or None where it has none (comments alone)."""
    if event[:6] == b"data: " and event.find(b"\n") == len(event) - 2 and event.find(b"\r") < 0:
        return event[6:-2]
    values = _field(event, b"data")
    return b"\n".join(values) if values else None


def event_name(event: bytes) -> str | None:
    """Return the ``event:`` field of a raw event, or None."""
    if event.find(b"event") < 0:
        return None
    values = _field(event, b"event")
    return values[-1].decode("utf-8", "replace") if values else None


def with_data(event: bytes, data: bytes) -> bytes:
    """Return the raw event with other data, on one line; its other fields stay."""
    kept = [line for line in _lines(event) if line and not _is_field(line, b"data")]
    return b"".join(line + b"\n" for line in kept) + b"data: " + data + b"\n\n"


def frame(data: bytes) -> bytes:
    """Return an event that holds data alone, as vLLM frames it."""
    return b"data: " + data + b"\n\n"


def _last_end(data: bytes) -> int:
    """Return where the last blank line ends, or -1. The first byte may belong to an earlier read."""
    end = data.rfind(b"\n\n")
    if data.find(b"\r") >= 0:
        end = max(end, data.rfind(b"\n\r"), data.rfind(b"\r\r"))
    if end < 0:
        return -1
    end += 2
    return end + 1 if data[end - 1 : end + 1] == b"\r\n" else end


def _lines(event: bytes) -> list[bytes]:
    return _LINE_END.split(event.removeprefix(_BOM))


def _only_comments(held: bytes) -> bool:
    return all(not line or line[:1] == b":" for line in _lines(held))


def _is_field(line: bytes, name: bytes) -> bool:
    return line == name or line[: len(name) + 1] == name + b":"


def _field(event: bytes, name: bytes) -> list[bytes]:
    start = len(name) + 1
    values = [line[start:] for line in _lines(event) if _is_field(line, name)]
    return [value.removeprefix(b" ") for value in values]
