"""Bytes become JSON and go back without losing a number, and the result is always strict JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envelope.json_codec import JSONDecodeError, dumps, loads, loads_lenient

INTEGERS = [
    0, -1, 2**31, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, 10**300,
    -(2**53) - 1, -(2**63), -(2**63) - 1, -(10**30),
]  # fmt: skip

PLACES = {
    "alone": "%s",
    "in an object": '{"seed":%s}',
    "in a list": "[1,%s]",
    "deeper": '{"a":[{"b":[[],{"c":%s}]}],"t":[1,2,3]}',
    "beside a float": '{"x":0.5,"y":%s}',
    "behind a long list": '{"token_ids":[' + ",".join(["7"] * 500) + '],"seed":%s}',
    "in a long list of objects": "[" + ",".join(['{"a":1}'] * 100) + ',{"a":%s}]',
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("number", INTEGERS)
def test_an_integer_keeps_every_digit_in_and_out(number: int, place: str) -> None:
    text = (place % number).encode()
    assert dumps(loads(text)) == text
    assert dumps(loads_lenient(text)) == text


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda raw: raw.decode()])
@pytest.mark.parametrize("number", [7, 10**30])
def test_every_kind_of_buffer_is_read(kind: Any, number: int) -> None:
    assert loads(kind(f'{{"é":{number}}}'.encode())) == {"é": number}


@pytest.mark.parametrize("text", ["1.0", "0.1", "-2.5", "1e+300", "1e-300", "9.3e+18"])
def test_a_float_stays_one(text: str) -> None:
    value = loads(text)
    assert (type(value), value) == (float, float(text))
    assert loads(dumps(value)) == value


def test_in_a_long_flat_list_only_the_first_number_is_looked_at() -> None:
    """The limit that is admitted: token ids are never beyond 64 bits, and walking them costs more than parsing."""
    assert type(loads(f"[{'1,' * 64}{10**30}]")[-1]) is float
    assert type(loads(f"[{'1,' * 63}{10**30}]")[-1]) is int


NOT_JSON = {
    "nothing": b"",
    "half an object": b'{"a":',
    "more behind it": b'{"a":1}x',
    "not UTF-8": b'"\xff"',
    "half a surrogate pair": rb'"\ud800"',
    "a number without end": b"1" * 400,
    "nested too deep": b"[" * 252 + b"]" * 252,
    "nested too deep for any parser": b"[" * 1025 + b"]" * 1025,
    "objects nested too deep": b'{"a":' * 252 + b"1" + b"}" * 252,
    "nested too deep behind many numbers": b"[" + b"1," * 65 + b"[" * 252 + b"]" * 252 + b"]",
    "nested without end": b"[" * 200_000,
}


@pytest.mark.parametrize("raw", NOT_JSON.values(), ids=NOT_JSON)
def test_what_is_not_json_is_refused(raw: bytes) -> None:
    with pytest.raises(JSONDecodeError):
        loads(raw)


@pytest.mark.parametrize("inside", [b"", b"1" * 30, b'"\\u2028"', b"[0.5]"])
def test_what_is_nested_as_deep_as_is_read_can_be_written_again_a_little_deeper(inside: bytes) -> None:
    raw = b"[" * 249 + inside + b"]" * 249
    assert json.loads(dumps([[loads(raw)]])) == [[json.loads(raw)]]


def test_a_huge_number_nested_too_deep_is_refused_as_json() -> None:
    """Before the standard library is asked, which keeps the number and goes less deep than orjson."""
    for depth in (252, 900, 1020):
        with pytest.raises(JSONDecodeError, match="nested too deeply"):
            loads(b"[" * depth + b"1" * 30 + b"]" * depth)


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_what_json_does_not_have_is_refused_from_clients_and_null_from_workers(word: str) -> None:
    raw = f'{{"logprob":[{word},{{"x":{word}}}],"n":1}}'.encode()
    with pytest.raises(JSONDecodeError):
        loads(raw)
    assert dumps(loads_lenient(raw)) == b'{"logprob":[null,{"x":null}],"n":1}'


BROKEN = {
    **{name: NOT_JSON[name] for name in ("nothing", "half an object", "more behind it", "not UTF-8")},
    "nested without end": NOT_JSON["nested without end"],
    "an integer that Python does not convert": b'{"a":' + b"1" * 5000 + b"}",
}


@pytest.mark.parametrize("raw", BROKEN.values(), ids=BROKEN)
def test_a_worker_s_broken_answer_is_refused_too(raw: bytes) -> None:
    with pytest.raises(JSONDecodeError):
        loads_lenient(raw)


def test_text_goes_out_compact_and_as_it_is() -> None:
    assert dumps({"a": [1, None, True], "é": "\u2028 €"}) == '{"a":[1,null,true],"é":"\u2028 €"}'.encode()


def test_a_lone_surrogate_goes_out_as_an_escape() -> None:
    assert dumps({"a": "\ud800", "b": 0.5}) == rb'{"a":"\ud800","b":0.5}'


def test_infinite_numbers_beside_a_huge_integer_are_null_too() -> None:
    value = {"big": 10**30, "x": [float("nan"), float("inf"), {"y": float("-inf")}], "z": 1.5}
    assert dumps(value) == b'{"big":%d,"x":[null,null,{"y":null}],"z":1.5}' % 10**30


def test_what_is_no_json_value_is_a_fault_of_ours() -> None:
    with pytest.raises(TypeError):
        dumps({"a": object()})


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
def test_whatever_goes_out_comes_back_equal_and_of_the_same_types(value: Any) -> None:
    raw = dumps(value)
    assert repr(loads(raw)) == repr(value)
    assert json.loads(raw) == value
