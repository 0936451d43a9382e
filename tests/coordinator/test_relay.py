"""The pump: one read, one feed, one write, and content is told of once it has been written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from coordinator.relay import pump
from envelope.errors import LegFailed

if TYPE_CHECKING:
    from collections.abc import Callable


class Source:
    """A worker's stream that gives these bytes, then perhaps an error. Part of ``LiveStream``."""

    def __init__(self, log: list[Any], *parts: bytes, error: Exception | None = None) -> None:
        self._log, self._parts, self._error = log, list(parts), error

    async def push(self, take: Callable[[bytes], bool]) -> bool:
        while self._parts:
            self._log.append("read")
            if not take(self._parts.pop(0)):
                return False
        if self._error is not None:
            raise self._error
        return True


class Upper:
    """A shape: upper case, ``.`` is nothing, content is whatever is no ``r``. Implements ``Shape``."""

    usage = error = None
    content_seen = False

    def __init__(self, closing: Exception | None = None) -> None:
        self._closing = closing

    def feed(self, data: bytes) -> bytes:
        if data == b".":
            return b""
        self.content_seen = self.content_seen or data != b"r"
        return data.upper()

    def close(self) -> None:
        if self._closing is not None:
            raise self._closing


class Sink:
    """A client that is behind after each of ``slow``."""

    def __init__(self, log: list[Any], error: Exception | None = None, slow: tuple[bytes, ...] = ()) -> None:
        self._log, self._error, self._slow = log, error, slow

    def put(self, data: bytes) -> bool:
        if self._error is not None:
            raise self._error
        self._log.append(data)
        return data not in self._slow

    async def drain(self) -> None:
        self._log.append("drained")


async def pumped(*parts: bytes, shape: Upper | None = None, **ends: Any) -> list[Any]:
    """Return what happened, in its order."""
    log: list[Any] = ends.pop("log", [])
    await pump(
        Source(log, *parts, error=ends.get("source")),  # type: ignore[arg-type]
        shape or Upper(),
        Sink(log, ends.get("sink"), ends.get("slow", ())),
        lambda: log.append("content"),
    )
    return log


async def test_each_read_is_written_before_the_next_one_is_made() -> None:
    assert await pumped(b"r", b"a", b"b") == ["read", b"R", "read", b"A", "content", "read", b"B", "content"]


async def test_content_is_told_each_time_right_after_it_was_written() -> None:
    """ITL: what is no content, between two frames that are, is no end of a gap."""
    assert await pumped(b"a", b"r", b"b") == ["read", b"A", "content", "read", b"R", "read", b"B", "content"]


async def test_where_a_shape_makes_nothing_of_a_read_nothing_is_written() -> None:
    assert await pumped(b"a", b".", b"b") == ["read", b"A", "content", "read", "read", b"B", "content"]


async def test_a_stream_without_content_tells_of_none() -> None:
    assert await pumped(b"r") == ["read", b"R"]
    assert await pumped() == []


async def test_a_client_that_is_behind_stops_the_reading_until_it_has_caught_up() -> None:
    log = await pumped(b"a", b"b", b"c", slow=(b"A", b"B"))
    written = [item for item in log if item != "content"]
    assert written == ["read", b"A", "drained", "read", b"B", "drained", "read", b"C"]


CUT = {"shape": Upper(LegFailed("decode", "x"))}


@pytest.mark.parametrize("ends", [CUT, {**CUT, "source": LegFailed("decode", "y")}])
async def test_when_it_breaks_off_everything_before_that_has_been_written(ends: dict[str, Any]) -> None:
    log: list[Any] = []
    with pytest.raises(LegFailed):
        await pumped(b"a", b"b", log=log, **ends)
    assert [item for item in log if isinstance(item, bytes)] == [b"A", b"B"]


async def test_a_source_that_breaks_behind_the_end_of_its_answer_breaks_nothing() -> None:
    assert await pumped(b"a", b".", source=LegFailed("decode", "x")) == ["read", b"A", "content", "read"]


async def test_a_client_who_is_gone_stops_the_reading() -> None:
    log: list[Any] = []
    with pytest.raises(ConnectionError):
        await pumped(b"a", b"b", log=log, sink=ConnectionResetError())
    assert log == ["read"]
