"""Messages of a supervisor and its processes: cut anywhere, whole when they arrive, and no waiting for ever."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

import pytest

from coordinator.processes.channel import Channel, Line, pack
from tests.bounds import HANG_S

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_a_message_is_whole_however_it_is_cut(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    line, raw = Line(ours, 1.0), pack("counted", {"a": [1, 2]}) + pack("total")
    for byte in raw[:-1]:
        theirs.sendall(bytes((byte,)))
        if (message := line.receive()) is not None:
            assert message == ("counted", {"a": [1, 2]})
            break
    else:
        pytest.fail("it never came")
    theirs.sendall(raw[len(pack("counted", {"a": [1, 2]})) :])
    assert line.receive(time.monotonic() + HANG_S) == ("total", None)


def test_who_says_nothing_is_not_waited_for_beyond_the_time(ends: tuple[socket.socket, socket.socket]) -> None:
    line = Line(ends[0], 1.0)
    assert line.receive() is None
    assert line.receive(time.monotonic() + 0.01) is None


def test_what_was_said_last_is_heard_before_the_end_is_told(ends: tuple[socket.socket, socket.socket]) -> None:
    line = Line(ends[0], 1.0)
    ends[1].sendall(pack("counted", 1))
    ends[1].close()
    assert line.receive() == ("counted", 1)
    with pytest.raises(ConnectionResetError):
        line.receive()


def test_a_process_that_takes_nothing_is_told_by_a_timeout(ends: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(TimeoutError):
        Line(ends[0], 0.01).send("reload", b"x" * 2**23)


async def test_a_process_hears_all_that_is_said_until_the_supervisor_is_gone(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    channel = await Channel.open(ends[1])
    line = Line(ends[0], 1.0)
    line.send("reload", {"a": 1})
    line.send("drain")
    await channel.send("listening", ("127.0.0.1:1",))
    assert line.receive(time.monotonic() + HANG_S) == ("listening", ("127.0.0.1:1",))
    line.close()
    assert [message async for message in channel.messages()] == [("reload", {"a": 1}), ("drain", None)]
    await channel.send("counted", 1)
    channel.close()
