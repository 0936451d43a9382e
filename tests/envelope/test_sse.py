"""Events are cut at blank lines and nowhere else, however the bytes arrive."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envelope.sse import Events, EventTooLarge, data_of, event_name, frame, split, with_data

RECORDINGS = Path(__file__).parent.parent / "data" / "recordings"
STREAMS = sorted(RECORDINGS.rglob("*.sse"))

SEPARATORS = "\u2028 \u2029 \u0085 \x0b \x0c \x1c"  # str.splitlines cuts at each of these; SSE does not

TOKENS = [b"\r", b"\n", b"\r\n", b"data: a", b"data:b", b"data", b"data:", b":c", b": c", b"event: e", b"id: 1",
          b"retry: 5", b" ", b"x", "data: \u2028é".encode(), SEPARATORS.encode()]  # fmt: skip


def pieces(raw: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    return [raw[start:end] for start, end in pairwise(edges)]


def fed(parts: list[bytes]) -> list[bytes]:
    events = Events()
    return [event for part in parts for event in events.feed(part)]


def datas(events: list[bytes]) -> list[bytes]:
    return [data for event in events if (data := data_of(event)) is not None]


def by_the_standard(raw: bytes) -> list[tuple[bytes, str | None]]:
    """The interpretation of the standard, on the whole stream at once: (data, event name)."""
    found: list[tuple[bytes, str | None]] = []
    data: list[bytes] = []
    name: str | None = None
    for line in re.split(rb"\r\n|\n|\r", raw.removeprefix(b"\xef\xbb\xbf"))[:-1]:
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if not line:
            if data:
                found.append((b"\n".join(data), name))
            data, name = [], None
        elif field == b"data":
            data.append(value)
        elif field == b"event":
            name = value.decode()
    return found


@pytest.mark.parametrize(
    ("raw", "data"),
    [
        (b"data: x\n\n", b"x"),
        (b"data:x\n\n", b"x"),
        (b"data:  x\n\n", b" x"),
        (b"data: x\r\n\r\n", b"x"),
        (b"data: x\r\r", b"x"),
        (b"data: x\r\n\n", b"x"),
        (b"\xef\xbb\xbfdata: x\n\n", b"x"),
        (b"data: a\ndata: b\n\n", b"a\nb"),
        (b"data: a\rdata: b\n\n", b"a\nb"),
        (b"event: e\ndata: x\nid: 7\n\n", b"x"),
        (b": comment\ndata: x\n\n", b"x"),
        (b"data: a: b\n\n", b"a: b"),
        (b"\n\ndata: x\n\n", b"x"),
        (b"data\n\n", b""),
        (b"data:\n\n", b""),
        (b": keep-alive\n\n", None),
        (b"event: e\n\n", None),
        (b"database: x\n\n", None),
        (f'data: "{SEPARATORS}"\n\n'.encode(), f'"{SEPARATORS}"'.encode()),
    ],
)
def test_data_of(raw: bytes, data: bytes | None) -> None:
    assert data_of(raw) == data


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        (b"event: message_stop\ndata: {}\n\n", "message_stop"),
        (b"event:a\nevent: b\ndata: {}\n\n", "b"),
        (b"data: the event: is no field\n\n", None),
        (b"data: {}\n\n", None),
    ],
)
def test_event_name(raw: bytes, name: str | None) -> None:
    assert event_name(raw) == name


def test_other_data_keeps_the_other_fields() -> None:
    event = b"event: e\r\nid: 7\r\ndata: a\r\ndata: b\r\n\r\n"
    assert with_data(event, b"{}") == b"event: e\nid: 7\ndata: {}\n\n"
    assert with_data(b"data: a\n\n", b"{}") == frame(b"{}")


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_events_are_the_same_cut_at_every_index(end: bytes) -> None:
    lines = [b"event: e", b"data: \xe2\x82\xac", b"", b": c", b"data: a", b"data: b", b"", b"data: [DONE]", b"", b""]
    raw = end.join(lines)
    want = [b"\xe2\x82\xac", b"a\nb", b"[DONE]"]
    for parts in ([raw], pieces(raw, list(range(len(raw)))), *(pieces(raw, [i]) for i in range(len(raw)))):
        events = fed(parts)
        assert datas(events) == want
        assert b"".join(events) == raw


@given(st.lists(st.sampled_from(TOKENS)), st.lists(st.integers(0, 60)), st.booleans())
def test_any_bytes_in_any_pieces_follow_the_standard(tokens: list[bytes], cuts: list[int], bom: bool) -> None:
    raw = (b"\xef\xbb\xbf" if bom else b"") + b"".join(tokens)
    events = fed(pieces(raw, cuts))
    told = [(data, event_name(event)) for event in events if (data := data_of(event)) is not None]
    assert told == by_the_standard(raw)
    assert raw.startswith(b"".join(events))


@pytest.mark.parametrize("path", STREAMS, ids=lambda path: path.stem)
def test_recorded_streams_are_cut_and_joined_without_loss(path: Path) -> None:
    raw = path.read_bytes()
    assert b"".join(fed([raw])) == raw
    assert fed(pieces(raw, list(range(0, len(raw), 97)))) == fed([raw]) == split(raw)


def test_an_unfinished_event_is_kept() -> None:
    events = Events()
    assert events.feed(b"data: a\n\ndata: b") == [b"data: a\n\n"]
    assert events.unfinished
    assert events.feed(b"\n") == []
    assert events.feed(b"\ndata: c") == [b"data: b\n\n"]
    assert events.unfinished


@pytest.mark.parametrize("rest", [b"", b"\n", b"\r\n", b": ping\n"])
def test_line_ends_and_comments_are_no_unfinished_event(rest: bytes) -> None:
    events = Events()
    events.feed(b"data: a\n\n" + rest)
    assert not events.unfinished


def test_the_line_feed_of_a_cut_crlf_is_no_event() -> None:
    events = Events()
    assert datas(events.feed(b"data: a\r\n\r")) == [b"a"]
    assert datas(events.feed(b"\ndata: b\r\n\r\n")) == [b"b"]


def test_a_comment_line_does_not_wait_for_the_next_event() -> None:
    events = Events()
    assert events.whole(b": pi") == b""
    assert events.whole(b"ng\n") == b": ping\n"
    assert events.whole(b"data: a\n: no heartbeat\n") == b""
    assert events.whole(b"\n") == b"data: a\n: no heartbeat\n\n"


def test_an_event_above_the_cap_is_refused_finished_or_not() -> None:
    with pytest.raises(EventTooLarge):
        Events(max_event_bytes=16).feed(b"data: 01234567890")
    with pytest.raises(EventTooLarge):
        Events(max_event_bytes=16).feed(b"data: 01234567890\n\n")
    events = Events(max_event_bytes=16)
    assert events.feed(b"data: a\n\n" * 100 + b"data: b") == [b"data: a\n\n"] * 100
    with pytest.raises(EventTooLarge):
        events.feed(b"0123456789")


def test_a_large_event_in_small_reads_costs_linear_time() -> None:
    events = Events()
    count = 200_000  # at quadratic cost this would copy a terabyte
    assert sum(len(events.feed(b"x" * 64)) for _ in range(count)) == 0
    assert [len(event) for event in events.feed(b"\n\n")] == [count * 64 + 2]
