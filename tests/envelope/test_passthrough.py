"""A relayed stream is byte-identical, whole events only, and what it tells of itself is noticed."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envelope.errors import LegFailed
from envelope.formats import Format
from envelope.passthrough import PassThrough, without_transfer_params

RECORDINGS = Path(__file__).parent.parent / "data" / "recordings"
FOLDERS = {
    "chat": Format.CHAT,
    "completions": Format.COMPLETIONS,
    "generate": Format.GENERATE,
    "messages": Format.MESSAGES,
    "responses": Format.RESPONSES,
    "no_parser": Format.CHAT,
}
WHOLE = [(path, FOLDERS[path.parent.name]) for path in sorted(RECORDINGS.rglob("*.sse")) if path.parent.name in FOLDERS]

NO_TEXT = {"messages_stop_sequence_stream"}  # its stop sequence is the first thing that was generated

DONE = b"data: [DONE]\n\n"
ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
HANDOVER = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_host": "10.9.9.9", "remote_port": 5600}
ERROR = {"error": {"message": "bad", "type": "BadRequestError", "param": None, "code": 400}}


def ev(value: Any, name: str | None = None) -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(value, separators=(',', ':'), ensure_ascii=False)}\n\n".encode()


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def relayed(shape: PassThrough, *parts: bytes) -> bytes:
    out = b"".join([shape.feed(part) for part in parts])
    shape.close()
    return out


@pytest.mark.parametrize(("path", "api"), WHOLE, ids=lambda value: getattr(value, "stem", value))
def test_recorded_streams_are_relayed_byte_for_byte(path: Path, api: Format) -> None:
    raw = path.read_bytes()
    for size in (len(raw), 1, 13):
        shape = PassThrough(api, strip_transfer_params=True)
        assert relayed(shape, *(raw[at : at + size] for at in range(0, len(raw), size))) == raw
        assert shape.content_seen is (path.stem not in NO_TEXT)
        assert shape.error is None


@pytest.mark.parametrize(("path", "api"), WHOLE, ids=lambda value: getattr(value, "stem", value))
def test_a_recorded_stream_cut_anywhere_before_its_end_is_a_failure(path: Path, api: Format) -> None:
    raw = path.read_bytes()
    for cut in range(0, len(raw) - 1, 211):
        shape = PassThrough(api)
        sent = shape.feed(raw[:cut])
        assert raw.startswith(sent)
        assert sent == b"" or sent.endswith(b"\n\n")
        with pytest.raises(LegFailed, match="ended early"):
            shape.close()


def test_half_an_event_is_not_relayed() -> None:
    shape = PassThrough(Format.CHAT)
    assert shape.feed(ev(delta(content="a")) + b'data: {"choi') == ev(delta(content="a"))
    with pytest.raises(LegFailed, match="ended early"):
        shape.close()


def test_the_end_mark_is_a_whole_data_line() -> None:
    """Model text that holds it ends nothing (smg#1878)."""
    shape = PassThrough(Format.CHAT)
    text = ev(delta(content="data: [DONE]\n\n")) + ev(delta(content="[DONE]"))
    assert shape.feed(text) == text
    with pytest.raises(LegFailed):
        shape.close()


@pytest.mark.parametrize("done", [DONE, b"data:[DONE]\n\n", b"data: [DONE]\r\n\r\n", b": c\ndata: [DONE]\r\r"])
def test_every_spelling_of_the_end_mark_counts(done: bytes) -> None:
    raw = ev(delta(content="a")) + done
    assert relayed(PassThrough(Format.CHAT), raw) == raw


def test_a_stream_of_nothing_but_the_end_mark_is_a_failure() -> None:
    shape = PassThrough(Format.CHAT)
    shape.feed(DONE)
    with pytest.raises(LegFailed, match="without any output"):
        shape.close()


@pytest.mark.parametrize(
    ("api", "last"),
    [
        (Format.RESPONSES, ev({"type": "response.completed", "response": {}}, "response.completed")),
        (Format.RESPONSES, ev({"type": "response.incomplete", "response": {}}, "response.incomplete")),
        (Format.MESSAGES, ev({"type": "message_stop"}, "message_stop")),
        (Format.MESSAGES, ev({}, "message_stop")),
    ],
)
def test_responses_and_messages_end_with_their_own_event(api: Format, last: bytes) -> None:
    begin = ev({"type": "ping"}, "ping")
    assert relayed(PassThrough(api), begin, last) == begin + last
    shape = PassThrough(api)
    shape.feed(begin + DONE)
    with pytest.raises(LegFailed):
        shape.close()


@pytest.mark.parametrize(
    ("api", "event", "message"),
    [
        (Format.CHAT, ev(ERROR), "bad"),
        (
            Format.GENERATE,
            b'data: {"error": {"message": "Internal server error", "code": 500}}\n\n',
            "Internal server error",
        ),
        (Format.CHAT, ev({"error": "Unauthorized"}), "Unauthorized"),
        (Format.CHAT, ev({"error": {"code": 9999}}), "{'code': 9999}"),
        (Format.MESSAGES, ev({"type": "error", "error": {"type": "api_error", "message": "no"}}, "error"), "no"),
        (Format.RESPONSES, ev({"type": "error", "message": "gone"}, "error"), "gone"),
        (Format.RESPONSES, ev({"type": "response.failed", "response": {"error": {"message": "x"}}}), "x"),
    ],
)
def test_an_error_event_is_relayed_and_marks_the_stream(api: Format, event: bytes, message: str) -> None:
    """It ends the stream as failed; the client is told once, so close() does not raise again."""
    text = ev(delta(content="a"))
    for rest in (b"", DONE):
        shape = PassThrough(api)
        assert relayed(shape, text, event + rest) == text + event + rest
        assert shape.error == message


def test_the_word_error_in_text_or_a_null_error_is_none() -> None:
    shape = PassThrough(Format.CHAT)
    raw = ev(delta(content='{"error": 1}')) + ev({**delta(content="a"), "error": None}) + DONE
    assert relayed(shape, raw) == raw
    assert shape.error is None


def test_the_last_usage_wins_and_null_is_none() -> None:
    shape = PassThrough(Format.CHAT)
    raw = b"".join(ev({**delta(content="a"), "usage": usage}) for usage in ({"completion_tokens": 1}, None))
    assert shape.feed(raw) == raw
    assert shape.usage == {"completion_tokens": 1}
    shape.feed(b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\n' + DONE)
    shape.close()
    assert shape.usage == {"completion_tokens": 2}


@pytest.mark.parametrize(
    ("folder", "usage"),
    [
        ("chat/chat_plain_stream_usage", {"prompt_tokens": 28, "total_tokens": 36, "completion_tokens": 8}),
        ("completions/completion_plain_stream_usage", {"prompt_tokens": 5, "total_tokens": 13, "completion_tokens": 8}),
        ("generate/generate_text_stream_usage", {"prompt_tokens": 28, "total_tokens": 36, "completion_tokens": 8}),
        ("messages/messages_text_stream", {"output_tokens": 4}),
        ("responses/responses_text_stream", {"output_tokens": 4}),
    ],
)
def test_usage_is_found_in_every_format(folder: str, usage: dict[str, int]) -> None:
    shape = PassThrough(FOLDERS[folder.split("/")[0]])
    shape.feed((RECORDINGS / "vllm-0.33.0" / f"{folder}.sse").read_bytes())
    assert shape.usage is not None
    assert {key: type(shape.usage[key]) for key in usage} == dict.fromkeys(usage, int)


@pytest.mark.parametrize(
    ("api", "chunk", "content"),
    [
        (Format.CHAT, ROLE, False),
        (Format.CHAT, delta(content="a"), True),
        (Format.CHAT, delta(reasoning="a"), True),
        (Format.CHAT, delta(content=None, tool_calls=[{"index": 0}]), True),
        (Format.CHAT, delta(tool_calls=[]), False),
        (Format.CHAT, delta(), False),
        (Format.CHAT, {"choices": [], "usage": {"completion_tokens": 0}}, False),
        (Format.CHAT, {"choices": [3]}, False),
        (Format.CHAT, {"choices": 3}, False),
        (Format.COMPLETIONS, {"choices": [{"index": 0, "text": ""}]}, False),
        (Format.COMPLETIONS, {"choices": [{"index": 0, "text": "a"}]}, True),
        (Format.GENERATE, {"choices": [{"index": 0, "token_ids": [7], "text": ""}]}, True),
        (Format.GENERATE, {"choices": [{"index": 0, "token_ids": [], "text": "END"}]}, True),
        (Format.MESSAGES, {"type": "message_start", "message": {}}, False),
        (Format.MESSAGES, {"type": "content_block_delta", "delta": {}}, True),
        (Format.RESPONSES, {"type": "response.created", "response": {}}, False),
        (Format.RESPONSES, {"type": "response.output_text.delta", "delta": "a"}, True),
    ],
)
def test_a_role_is_no_content(api: Format, chunk: dict[str, Any], content: bool) -> None:
    shape = PassThrough(api)
    shape.feed(ev(chunk))
    assert shape.content_seen is content


def test_the_handover_is_taken_out_and_nothing_else_is_touched() -> None:
    last = {**delta(content="é"), "kv_transfer_params": HANDOVER, "seed": 2**70}
    null = {**delta(content="b"), "kv_transfer_params": None}
    shape = PassThrough(Format.CHAT, strip_transfer_params=True)
    first = b'data:{"choices": [{"index": 0, "delta": {"content": "a"}}], "kv_transfer_params": null}\r\n\r\n'
    out = shape.feed(first + ev(null) + ev(last))
    untouched = first + ev(null)
    assert out.startswith(untouched)
    assert json.loads(out[len(untouched) + 6 :]) == {**last, "kv_transfer_params": None}
    assert PassThrough(Format.CHAT).feed(ev(last)) == ev(last)


def test_the_handover_is_taken_out_of_a_recorded_stream() -> None:
    raw = (RECORDINGS / "vllm-0.33.0" / "nixl_prefill_server" / "prefill_chat_stream.sse").read_bytes()
    shape = PassThrough(Format.CHAT, strip_transfer_params=True)
    out = relayed(shape, raw)
    assert b"127.0.0.1" in raw
    assert b"remote_" not in out
    assert out.count(b'"kv_transfer_params":null') == 1


@pytest.mark.parametrize("outer", ["response", "message"])
def test_transfer_params_become_null_wherever_an_answer_has_them(outer: str) -> None:
    body = {outer: {"id": "r", "kv_transfer_params": HANDOVER}, "ec_transfer_params": {"h": {}}, "type": "x"}
    copy = json.loads(json.dumps(body))
    assert without_transfer_params(body) == {
        outer: {"id": "r", "kv_transfer_params": None},
        "ec_transfer_params": None,
        "type": "x",
    }
    assert body == copy


@pytest.mark.parametrize("odd", [b"data: no json\n\n", b"data: 3\n\n", b"data: [1]\n\n", b": ping\n\n", b"id: 1\n\n"])
def test_what_is_not_understood_is_relayed(odd: bytes) -> None:
    raw = odd + ev(delta(content="a")) + odd + DONE
    assert relayed(PassThrough(Format.CHAT), raw) == raw


def test_an_event_above_the_cap_names_the_leg() -> None:
    shape = PassThrough(Format.CHAT, max_event_bytes=64)
    with pytest.raises(LegFailed, match=r"^decode: an event is larger than 64 bytes"):
        shape.feed(b"data: " + b"x" * 64)


def test_an_event_of_two_megabytes_is_relayed() -> None:
    raw = ev(delta(content="x" * 2_000_000)) + DONE
    assert relayed(PassThrough(Format.CHAT), *(raw[at : at + 65536] for at in range(0, len(raw), 65536))) == raw


@given(
    st.lists(st.text(max_size=5), min_size=1, max_size=5),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.lists(st.integers(0, 400), max_size=6),
)
def test_any_text_any_line_end_any_cut(texts: list[str], end: bytes, cuts: list[int]) -> None:
    raw = (b"".join(ev(delta(content=text)) for text in texts) + DONE).replace(b"\n", end)
    edges = [0, *sorted(cuts), len(raw)]
    shape = PassThrough(Format.CHAT)
    assert relayed(shape, *(raw[a:b] for a, b in pairwise(edges))) == raw
    assert shape.content_seen is any(texts)


PLAIN = [delta(content=text) for text in ("a", "bc", "é", 'say "no"', "[DONE]", '"error"', "back\\slash", "\n\n", "")]
OTHERS = [
    *(ev(value) for value in PLAIN),
    ev({**delta(content="x"), "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}}),
    ev({**delta(content="x"), "kv_transfer_params": HANDOVER}),
    ev({"choices": [{"index": 1, "delta": {"content": "x"}, "finish_reason": None}]}),
    ev({"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}]}),
    ev({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}}),
    ev(delta(reasoning="hm")),
    ev(ERROR),
    b": keep-alive\n\n",
    DONE,
    # What another server may write: blanks about the colons, an error that only the event's name tells of.
    b'data: {"choices" : [] , "usage" : {"completion_tokens" : 2}}\n\n',
    b'data: {"choices" : [] , "kv_transfer_params" : {"remote_host" : "10.9.9.9"}}\n\n',
    b'data: {"choices": [], "kv_transfer_params": null}\n\n',
    b'event: error\ndata: {"message":"bad"}\n\n',
    ev({"choices": [], "kind": "kv_transfer_params"}),
    # The same names in another spelling, which no writer that is known to us has, and any reader takes for the same.
    b'data: {"choices":[],"kv_transfer_par\\u0061ms":{"remote_host":"10.9.9.9"}}\n\n',
    b'data: {"choices":[],"kv\\u005Ftransfer\\u005fparams":{"remote_host":"10.9.9.9"},"\\u0075sage":{"a":1}}\n\n',
    b'data: {"choices":[],"\\u0065rror":{"message":"bad"}}\n\n',
]  # fmt: skip


class ReadsAll(PassThrough):
    """Reads each event as JSON."""

    def _worth_a_look(self, block: bytes) -> bool:
        return True


@given(st.lists(st.sampled_from(OTHERS), max_size=20), st.booleans())
def test_what_is_not_read_has_nothing_to_tell(events: list[bytes], strip: bool) -> None:
    quick, slow = (shape(Format.CHAT, strip_transfer_params=strip) for shape in (PassThrough, ReadsAll))
    slow._lessons = 0
    for event in (ev(ROLE), ev(PLAIN[0]), *events):
        assert quick.feed(event) == slow.feed(event)
    assert (quick.usage, quick.error, quick._ended) == (slow.usage, slow.error, slow._ended)


@given(st.lists(st.sampled_from(OTHERS), max_size=20), st.lists(st.integers(1, 400), max_size=12), st.booleans())
def test_what_is_taken_for_mere_text_is_what_was_looked_at_before(
    events: list[bytes], cuts: list[int], strip: bool
) -> None:
    """The same comes out, and is told, as where every block is looked at."""
    raw = b"".join((ev(ROLE), ev(PLAIN[0]), *events))
    ends = sorted({min(sum(cuts[: i + 1]), len(raw)) for i in range(len(cuts))} | {len(raw)})
    reads = [raw[start:end] for start, end in pairwise([0, *ends])] if cuts else [ev(ROLE), ev(PLAIN[0]), *events]
    quick, slow = (PassThrough(Format.CHAT, strip_transfer_params=strip) for _ in range(2))
    slow._lessons = 0
    for read in reads:
        assert quick.feed(read) == slow.feed(read)
        assert quick.content_seen is slow.content_seen
        quick.content_seen = slow.content_seen = False
    assert (quick.usage, quick.error, quick._ended) == (slow.usage, slow.error, slow._ended)


def test_before_any_event_was_learned_none_is_like_it() -> None:
    shape = PassThrough(Format.CHAT)
    assert shape.feed(b"?half an event?") == b""
    assert not shape.content_seen


def test_events_that_differ_by_their_text_alone_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = PassThrough(Format.CHAT)
    looked: list[bytes] = []
    monkeypatch.setattr(shape, "_worth_a_look", lambda block: bool(looked.append(block)))
    events = [ev(delta(content=text)) for text in ("a", "b", "c", 'd"', "e")]
    assert [shape.feed(event) for event in events] == events
    assert looked == [events[1], events[3]]  # the first is read whole, as nothing was generated before it
