"""What is read with its text means what it means without, and legs send the text on byte by byte."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import envelope.written
from envelope.errors import LegUnreadable
from envelope.formats import Format
from envelope.json_codec import JSONDecodeError, dumps, loads, loads_lenient
from envelope.token_ids import TokenIds, are_token_ids
from envelope.written import LONG, WrittenList, WrittenText, loads_body, loads_rendered, pieces

if TYPE_CHECKING:
    from collections.abc import Callable

# Texts that look like what is cut out, and like where it ends.
TRAPS = [
    '"', "\\", "]", "}]", '],"model":"x"}', '"messages":[', '","model":"x"}', '"role"', "\u2028", "é", "😀", "\\u0022",
    '"token_ids":[1,2]', "[1,2]", "{}",
]  # fmt: skip
KEYS = ["messages", "prompt", "input", "token_ids", "model", "role", "content", "stop", "tools", "", '"', "\\"]
texts = st.sampled_from(TRAPS) | st.text(max_size=6)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS) | texts, inner, max_size=4),
    max_leaves=12,
)
bodies = st.dictionaries(st.sampled_from(KEYS) | texts, values, max_size=6)
STYLES: list[dict[str, Any]] = [
    {"separators": (",", ":"), "ensure_ascii": False},
    {"separators": (",", ":")},
    {},
    {"indent": 2, "ensure_ascii": False},
]
apis = st.sampled_from(list(Format))


def written(value: Any) -> bytes:
    return b"".join(pieces(value))


def outcome(parse: Callable[[bytes], Any], raw: bytes) -> Any:
    try:
        return parse(raw)
    except JSONDecodeError:
        return JSONDecodeError


@given(api=apis, body=bodies, style=st.sampled_from(STYLES))
def test_a_body_means_the_same_and_is_written_again_with_the_same_meaning(
    api: Format, body: dict[str, Any], style: dict[str, Any]
) -> None:
    raw = json.dumps(body, **style).encode()
    read = loads_body(api, raw, long=0)
    assert read == loads(raw) == body
    assert loads(written(read)) == body
    assert loads(dumps(read)) == body
    assert list(read) == list(body)


@given(
    api=apis,
    body=bodies,
    style=st.sampled_from(STYLES),
    cuts=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3), st.sampled_from([b"", b"]", b'"', b",", b"}", b"\\"]))),
)
def test_a_text_that_was_tampered_with_is_refused_exactly_where_it_was_refused_before(
    api: Format, body: dict[str, Any], style: dict[str, Any], cuts: list[tuple[float, int, bytes]]
) -> None:
    raw = json.dumps(body, **style).encode()
    for place, length, instead in cuts:
        at = int(place * len(raw))
        raw = raw[:at] + instead + raw[at + length :]
    read = outcome(lambda raw: loads_body(api, raw, long=0), raw)
    assert read == outcome(loads, raw)
    if read is not JSONDecodeError:
        assert loads(written(read)) == read


TURN = [{"role": "user", "content": 'naïve "quoted" [1, 2]; ],"x":1}'}, {"role": "user", "content": [{"type": "text"}]}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"required": ["a"], "type": "object"}}}
KEPT = {
    "chat": (Format.CHAT, "messages", TURN, WrittenList),
    "completions": (Format.COMPLETIONS, "prompt", 'a "text" \\ é', WrittenText),
    "completions of tokens": (Format.COMPLETIONS, "prompt", [1, 2, 3], WrittenList),
    "responses": (Format.RESPONSES, "input", TURN, WrittenList),
    "responses to a text": (Format.RESPONSES, "input", "text", WrittenText),
    "messages": (Format.MESSAGES, "messages", TURN, WrittenList),
    "generate": (Format.GENERATE, "token_ids", [1, 2, 3], WrittenList),
}
BEHIND: dict[str, dict[str, Any]] = {
    "last": {},
    "before scalars": {"model": "m", "stream": True},
    "before tools": {"model": "m", "tools": [TOOL] * 20, "stop": ["a"], "stream": True},
    "before a system prompt in blocks": {"model": "m", "system": [{"type": "text", "text": "be kind"}] * 50},
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("behind", BEHIND.values(), ids=BEHIND)
@pytest.mark.parametrize("before", [{}, {"model": "m", "metadata": {"x": [1]}}], ids=["first", "second"])
@pytest.mark.parametrize("case", KEPT.values(), ids=KEPT)
def test_the_prompt_of_every_api_keeps_its_text(
    case: tuple[Format, str, Any, type], before: dict[str, Any], behind: dict[str, Any], style: dict[str, Any]
) -> None:
    api, name, prompt, kind = case
    body = {**before, name: prompt, **behind}
    raw = json.dumps(body, **style).encode()
    read = loads_body(api, raw, long=0)
    assert read == body
    assert type(read[name]) is kind
    text = bytes(read[name].raw)
    assert text in raw
    assert loads(text) == prompt
    before, kept, after = pieces({"stream": False, name: read[name], "n": 1})
    assert (before, after) == (b'{"stream":false,"%b":' % name.encode(), b',"n":1}')
    assert kept is read[name].raw


WHOLE = {
    "twice": b'{"messages":[1],"model":"a","messages":[2]}',
    "twice, with others between": b'{"messages":[1],"kv_transfer_params":{},"messages":[2],"stop":["a"]}',
    "a key in between is given again": b'{"messages":[1],"stop":["a"],"x":1,"stop":["a"]}',
    "only inside another": b'{"metadata":{"messages":[1],"x":2},"model":"m"}',
    "inside another first": b'{"metadata":{"messages":[1],"x":2},"messages":[3]}',
    "in a text": rb'{"model":"\"messages\":[1]","messages":[3]}',
    "a key that is escaped": rb'{"m\u0065ssages":[1],"model":"m"}',
    "an object": b'{"messages":{"a":[1]},"stop":["b"]}',
    "a number": b'{"messages":7,"stop":["b"]}',
    "missing": b'{"model":"m","stop":["b"]}',
    "no object": b'[{"messages":[1]}]',
    "an object in a list": b'[{"messages":[1]},1]',
}


@pytest.mark.parametrize("raw", WHOLE.values(), ids=WHOLE)
def test_an_unusual_body_means_what_the_parser_says(raw: bytes) -> None:
    read = loads_body(Format.CHAT, raw, long=0)
    assert read == loads(raw)
    assert loads(written(read)) == loads(raw)


def test_a_member_cannot_hide_in_the_text_of_another() -> None:
    """What stands in the body twice would be found in neither part, were the text not parsed by itself."""
    raw = b'{"messages":[1],"kv_transfer_params":{"a":[1]},"kv_transfer_params":{"a":[1]},"stop":[]}'
    read = loads_body(Format.CHAT, raw, long=0)
    del read["kv_transfer_params"]
    assert b"kv_transfer_params" not in written(read)


def test_a_short_body_is_parsed_as_a_whole() -> None:
    raw = dumps({"messages": TURN})
    assert type(loads_body(Format.CHAT, raw)["messages"]) is list
    assert type(loads_body(Format.CHAT, raw + b" " * LONG)["messages"]) is WrittenList


@pytest.mark.parametrize(("levels", "is_read"), [(249, True), (250, False)])
def test_a_prompt_may_be_nested_as_deep_as_without_its_text(levels: int, is_read: bool) -> None:
    raw = b'{"messages":%b1%b}' % (b"[" * levels, b"]" * levels)
    assert (outcome(loads, raw) is not JSONDecodeError) is is_read
    assert (outcome(lambda raw: loads_body(Format.CHAT, raw, long=0), raw) is not JSONDecodeError) is is_read


@pytest.mark.parametrize("turn", [{"a": ["role"], "b": 1}, {"content": '],"a":'}, {"content": '{"messages":['}])
def test_a_body_that_seems_to_end_everywhere_is_not_tried_everywhere(
    turn: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    ends = envelope.written._ends_an_object
    monkeypatch.setattr(envelope.written, "_ends_an_object", lambda text: tried.append(len(text)) or ends(text))
    body = {"messages": [turn] * 5_000, "stop": ["b"]}
    raw = json.dumps(body, separators=(",", ":")).encode()
    assert loads_body(Format.CHAT, raw) == body
    assert 0 < sum(tried) < 2 * len(raw)


ids = st.lists(st.integers(0, 200_000), min_size=1)


@given(tokens=ids, rest=bodies, style=st.sampled_from(STYLES), listed=st.booleans(), first=st.booleans())
def test_a_renderer_s_answer_means_the_same(
    tokens: list[int], rest: dict[str, Any], style: dict[str, Any], listed: bool, first: bool
) -> None:
    answer: Any = {"token_ids": tokens, **rest} if first else {**rest, "token_ids": tokens}
    raw = json.dumps([answer] if listed else answer, **style).encode()
    read = loads_rendered(raw, long=0)
    assert read == loads(raw)
    assert loads(dumps(read)) == loads(written(read)) == loads(raw)


@example(value=[1, -2])
@example(value=[1, 2.5])
@example(value=[True])
@example(value=[[1]])
@example(value=[])
@example(value=["1"])
@example(value=[1, None])
@example(value=10**30)
@given(value=values)
def test_what_is_no_plain_list_is_parsed_as_ever(value: Any) -> None:
    raw = dumps({"request_id": "r", "token_ids": value, "model": "m"})
    read = loads_rendered(raw, long=0)
    assert read == loads_lenient(raw)
    assert are_token_ids(read["token_ids"]) == are_token_ids(loads_lenient(raw)["token_ids"])


@pytest.mark.parametrize("listed", ["%s", "[%s]"])
def test_token_ids_stay_text(listed: str) -> None:
    raw = (listed % '{"request_id":"r","token_ids":[5,0,151935],"features":null}').encode()
    read = loads_rendered(raw, long=0)
    ids = (read[0] if listed == "[%s]" else read)["token_ids"]
    assert type(ids) is TokenIds
    assert ids.raw == b"[5,0,151935]"
    assert dumps(read) == written(read) == raw
    assert ids.raw in pieces(read)


def test_what_orjson_cannot_write_beside_a_text_is_written_all_the_same() -> None:
    read = loads_body(Format.CHAT, b'{"messages":["a"],"seed":%d,"token_ids":null}' % 10**30, long=0)
    assert type(read["messages"]) is WrittenList
    leg = {**read, "token_ids": TokenIds(b"[1,2]")}
    assert written(leg) == b'{"messages":["a"],"seed":%d,"token_ids":[1,2]}' % 10**30


@given(st.lists(st.integers(0, 300_000), min_size=1, max_size=200), st.data())
def test_where_ids_begin_in_the_text_is_told_to_a_character_without_reading_them(listed: list[int], data: Any) -> None:
    ids = TokenIds(dumps(listed))
    asked = sorted(data.draw(st.lists(st.integers(0, len(listed) - 1))))
    begins = [len(dumps(listed[:each])) - (not each) for each in asked]
    assert {place - begin for place, begin in zip(ids.places(asked), begins, strict=True)} <= {0, 1}
    assert ids._numbers is None
    (beyond,) = ids.places([len(listed) + 100])
    assert beyond >= len(ids.raw)


def test_token_ids_serve_as_the_list_that_they_are() -> None:
    ids = TokenIds(b"[5,0,7]")
    assert len(ids) == 3
    assert ids
    assert (ids[0], ids[-1], ids[1:]) == (5, 7, [0, 7])
    assert list(ids) == [5, 0, 7]
    assert list(reversed(ids)) == [7, 0, 5]
    assert len(ids) == 3
    assert 7 in ids
    assert ids == [5, 0, 7] == TokenIds(b"[5,0,7]")
    assert ids != [5]
    assert dumps({"p": [ids, 10**30]}) == b'{"p":[[5,0,7],%d]}' % 10**30


@pytest.mark.parametrize("raw", [b"[1,,2]", b"[1,02]", b"[1,%d]" % 10**30])
def test_numbers_are_looked_at_when_somebody_wants_them(raw: bytes) -> None:
    """The limit that is admitted: digits and commas go out as they are, and the worker that gets them refuses."""
    ids = loads_rendered(b'{"token_ids":%b}' % raw, long=0)["token_ids"]
    with pytest.raises(LegUnreadable, match="no integers"):
        ids[0]


@pytest.mark.parametrize("raw", [b"[,1]", b"[1,]", b"[,]", b"[1, 2]", b"[1;2]", b"[1\n]", b"[]", b"[", b"", b"12"])
def test_only_digits_and_commas_between_brackets_are_kept(raw: bytes) -> None:
    assert TokenIds.written(raw) is None
