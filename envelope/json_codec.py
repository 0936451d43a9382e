"""Bytes to JSON and back, fast, and without losing a number.

orjson does the work. It reads an integer beyond 64 bits as a float, which would change a seed or an id, so
such a (rare) body is read again by the standard library, which keeps it exact.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import orjson

Json = dict[str, Any]

JSONDecodeError = json.JSONDecodeError  # orjson's own error is a subclass

_BEYOND_64_BITS = float(2**63)
_SHORT_LIST = 64
_TEXT = {str}

# In a text of so many bytes it is cheaper to look for a number of as many digits than to look at every value. Where
# three digits in a row stand at this distance there may be one.
_SHORT_TEXT = 4096
_STRIDE = len(str(2**63)) // 3
_DIGITS_AS_ZEROS = bytes(ord("0" if chr(byte).isdecimal() else " ") for byte in range(128)) + b" " * 128
_LONG_NUMBER = b"0" * len(str(2**63))
_MAX_DEPTH = 250  # orjson writes 254 levels, and a leg may hold a client's object a little deeper


def loads(raw: bytes | bytearray | memoryview | str, *, depth: int = 0) -> Any:
    """Parse a JSON text; integers stay integers, whatever their size.

    Args:
        depth: how many levels it is to stand in.

    Raises:
        JSONDecodeError: not JSON, not UTF-8, or nested deeper than 250 levels.
    """
    value = orjson.loads(raw)
    if not _plain(raw, depth) and _has_huge_float(value, raw, depth):
        return json.loads(bytes(raw) if isinstance(raw, memoryview) else raw)
    return value


def loads_lenient(raw: bytes) -> Any:
    """Parse what a worker sent, also when it holds NaN or Infinity, which JSON does not have.

    Raises:
        JSONDecodeError: not JSON even so.
    """
    try:
        return loads(raw)
    except JSONDecodeError as strict:
        try:
            return json.loads(raw)
        except (ValueError, RecursionError):  # not UTF-8, or more digits than Python converts
            raise strict from None


def dumps(value: Any) -> bytes:
    """Serialize compactly as UTF-8; NaN and Infinity become null, so the result is always strict JSON."""
    try:
        return orjson.dumps(value, default=_text_of)
    except TypeError:  # an integer beyond 64 bits, or a lone surrogate
        return json.dumps(_finite(value), separators=(",", ":"), allow_nan=False).encode()


def without(body: Json, names: frozenset[str]) -> Json:
    """Return a copy of an object that lacks these members."""
    left = body.copy()
    for name in names.intersection(body):
        del left[name]
    return left


def _text_of(value: Any) -> orjson.Fragment:
    """Return the text of token ids; orjson asks for what it cannot write itself.

    Raises:
        TypeError: it has none.
    """
    if not isinstance(raw := getattr(value, "raw", None), bytes):
        raise TypeError
    return orjson.Fragment(raw)


def _plain(raw: bytes | bytearray | memoryview | str, depth: int) -> bool:
    """Say whether a text can be seen to have no number beyond 64 bits, and too few brackets to be nested too deeply."""
    return (
        isinstance(raw, bytes)
        and len(raw) <= _SHORT_TEXT
        and (depth + len(raw) // 2 <= _MAX_DEPTH or depth + _brackets(raw) <= _MAX_DEPTH)
        and (
            raw[::_STRIDE].translate(_DIGITS_AS_ZEROS).find(b"000") < 0  # `in` raises and catches a TypeError first
            or raw.translate(_DIGITS_AS_ZEROS).find(_LONG_NUMBER) < 0
        )
    )


def _has_huge_float(value: Any, raw: bytes | bytearray | memoryview | str, depth: int) -> bool:
    """Say whether a float stands where a huge integer may have been.

    Long flat lists (token ids) are looked at by their first item only: walking them would cost more than
    parsing them.

    Raises:
        JSONDecodeError: nested too deeply to be written again.
    """
    found, level, shallow = False, [value], None
    while level:
        if depth > _MAX_DEPTH:
            raise JSONDecodeError(f"nested too deeply, more than {_MAX_DEPTH} levels", "", 0)
        below: list[Any] = []
        if set(map(type, level)) == _TEXT:  # the words of a long conversation, by the thousand
            break
        for node in level:
            if isinstance(node, dict):
                below.extend(node.values())
            elif isinstance(node, list):
                if len(node) <= _SHORT_LIST or isinstance(node[0], (dict, list)):
                    below.extend(node)
                    continue
                if shallow is None:
                    shallow = _few_brackets(raw)
                if not (shallow or _is_flat(node)):
                    below.extend(node)
            elif isinstance(node, float) and not -_BEYOND_64_BITS < node < _BEYOND_64_BITS:
                found = True
        level, depth = below, depth + 1
    return found


def _brackets(raw: bytes) -> int:
    """Return how many open; ``count`` would look at each byte by itself, which takes three times as long."""
    return 2 * len(raw) - len(raw.replace(b"[", b"")) - len(raw.replace(b"{", b""))


def _few_brackets(raw: bytes | bytearray | memoryview | str) -> bool:
    """Say whether a text, which may be long, has too few brackets to be nested too deeply."""
    text, found = raw.encode() if isinstance(raw, str) else bytes(raw), 0
    for bracket in (b"[", b"{"):
        at = text.find(bracket)
        while at >= 0:
            if (found := found + 1) > _MAX_DEPTH:
                return False
            at = text.find(bracket, at + 1)
    return True


def _is_flat(items: list[Any]) -> bool:
    return {dict, list}.isdisjoint(map(type, items))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):  # token ids that were never numbers yet
        return list(value)
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value
