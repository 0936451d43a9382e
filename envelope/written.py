"""Long values that keep the text they were read from, so that legs send that text on and nothing is written anew.

A JSON text is cut in three: what is before a value, the value, and what is behind it; where it ends is a guess. The
outer two are parsed with a mark in the value's place, and the value by itself. When both are JSON and the mark has come
out as the value of its key, then the whole is JSON and means what these mean together: a value may stand where another
one does, and the mark was not inside a string, since its first quote would have ended it. Otherwise the text is parsed
as a whole, as it would be without any of this.

A conversation of 1 MB takes 1.0 ms to parse. Writing it took 0.9 ms for the first leg (0.25 where all of it is ASCII)
and 0.2 for the second; to cut it out takes 0.1, and legs have it without a copy.
"""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, Any

import orjson

from envelope.formats import PROMPT_FIELDS, Format
from envelope.json_codec import JSONDecodeError, dumps, loads, loads_lenient
from envelope.token_ids import TokenIds

if TYPE_CHECKING:
    from collections.abc import Callable

Buffer = bytes | memoryview

# From how many bytes on it pays: where it costs no more than to parse the whole. An answer of 1 KB has 50 token ids.
LONG = 16 * 1024
LONG_RENDERED = 1024

_MARK = secrets.token_hex(16)
_STAND_IN = b'"%b"' % _MARK.encode()
_IN_ITS_PLACE = orjson.Fragment(_STAND_IN)

_BEGINS = {name: re.compile(rb'"%b"\s*:\s*(?=[\["])' % name.encode()) for name in PROMPT_FIELDS.values()}
_ENDS = {
    first: re.compile(rb'%b(?=\s*(?:,\s*"\w+"\s*:|\}\s*\Z))' % re.escape(last))
    for first, last in ((b"[", b"]"), (b'"', b'"'))
}

# A conversation most often ends in the last of so many parts of the text: if that has messages, and not tools alone.
_PARTS = 8
_OF_A_MESSAGE = b'"role"'

_TOKEN_IDS = b'"token_ids":'


class WrittenList(list[Any]):
    """A list, and the JSON text of it."""

    __slots__ = ("raw",)

    def __init__(self, items: list[Any], raw: Buffer) -> None:
        super().__init__(items)
        self.raw = raw


class WrittenText(str):
    """A string, and the JSON text of it."""

    __slots__ = ("raw",)

    raw: Buffer

    @classmethod
    def of(cls, text: str, raw: Buffer) -> WrittenText:
        self = cls(text)
        self.raw = raw
        return self


def pieces(value: Any) -> list[Buffer]:
    """Serialize as ``dumps`` does, in pieces: what has kept its text is one of them, uncopied."""
    texts: list[Buffer] = []

    def text_of(value: Any) -> orjson.Fragment:
        if (text := getattr(value, "raw", None)) is None:
            raise TypeError
        texts.append(text)
        return _IN_ITS_PLACE

    try:
        raw = orjson.dumps(value, default=text_of, option=orjson.OPT_PASSTHROUGH_SUBCLASS)
    except TypeError:  # as in ``dumps``
        return [dumps(value)]
    if not texts:
        return [raw]
    first, *others = raw.split(_STAND_IN)
    return [first, *(piece for pair in zip(texts, others, strict=True) for piece in pair)]


def loads_body(api: Format, raw: bytes, *, long: int = LONG) -> Any:
    """Parse a client's body as ``loads`` does; a long prompt keeps its text.

    Args:
        long: bytes from which on this pays.

    Raises:
        JSONDecodeError
    """
    found = _find_prompt(api, raw) if len(raw) >= long else None
    whole = None if found is None else _put_together(raw, *found, loads, _kept)
    return loads(raw) if whole is None else whole


def loads_rendered(raw: bytes, *, long: int = LONG_RENDERED) -> Any:
    """Parse a renderer's answer as ``loads_lenient`` does; many token ids stay text.

    Raises:
        JSONDecodeError
    """
    whole, key = None, raw.find(_TOKEN_IDS) if len(raw) >= long else -1
    if key >= 0:
        start = key + len(_TOKEN_IDS)
        whole = _put_together(raw, "token_ids", start, raw.find(b"]", start) + 1, loads_lenient, TokenIds.written)
    return loads_lenient(raw) if whole is None else whole


def _put_together(
    raw: bytes, name: str, start: int, end: int, parse: Callable[[bytes], Any], keep: Callable[[memoryview], Any]
) -> Any:
    """Return what a text means whose value of that name is from start to end, or None where it is not.

    Args:
        keep: makes the value of its text; None, or JSONDecodeError, where it is none.
    """
    try:
        whole = parse(b"".join((raw[:start], _STAND_IN, raw[end:])))
        body = whole[0] if isinstance(whole, list) and len(whole) == 1 else whole
        if not isinstance(body, dict) or body.get(name) != _MARK or (value := keep(memoryview(raw)[start:end])) is None:
            return None
    except JSONDecodeError:
        return None
    body[name] = value
    return whole


def _kept(text: memoryview) -> WrittenList | WrittenText:
    value = loads(text, depth=1)
    return WrittenList(value, text) if isinstance(value, list) else WrittenText.of(value, text)


def _find_prompt(api: Format, raw: bytes) -> tuple[str, int, int] | None:
    """Return the name of what holds the prompt, and where it seems to begin and to end."""
    name = PROMPT_FIELDS[api]
    if (begin := _BEGINS[name].search(raw)) is None:
        return None
    start = begin.end()
    look_from = max(start + 1, len(raw) - len(raw) // _PARTS)
    if raw.find(_OF_A_MESSAGE, look_from) < 0:
        look_from = start + 1
    left = len(raw)
    for end in _ENDS[raw[start : start + 1]].finditer(raw, look_from):
        rest = raw[end.end() :]
        if _ends_an_object(rest):
            return name, start, end.end()
        if (left := left - len(rest)) < 0:  # guessing costs no more than to copy the text once
            return None
    return None


def _ends_an_object(text: bytes) -> bool:
    try:
        orjson.loads(b'{"":0' + text)
    except orjson.JSONDecodeError:
        return False
    return True
