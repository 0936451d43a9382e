"""A prompt's token ids as the text they came in: legs send it on, and numbers are made only for who asks for one.

The ids of a prompt of 1 MB, some 260,000, take 4.6 ms to parse, 2 to look at, and 2.9 to write for each leg. To see
that the text is digits and commas takes 0.3, and legs have it without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, overload

import orjson

from envelope.errors import LegUnreadable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sized

CHARACTERS_PER_ID = 6
"""Of a prompt of most models, with the comma."""

_LONGEST_ID = 11  # of 32 bits, with the comma

# What may stand between the brackets becomes 0, all else x.
_LOOKED_AT = bytes(48 if byte in b"0123456789," else 120 for byte in range(256))


class TokenIds(Sequence[int]):
    """What a renderer made of a prompt.

    That nothing but digits and commas stands between the brackets is looked at, so the text is a list, and nothing can
    hide in it. Whether all of it is numbers, say without a comma too many, is the workers' to see, or whoever's asks.

    Attributes:
        raw: the JSON text.
    """

    __slots__ = ("_numbers", "raw")

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self._numbers: list[int] | None = None

    @classmethod
    def written(cls, text: bytes | memoryview) -> TokenIds | None:
        """Return the ids of a JSON text, or None: it is no list of digits and commas, or an empty one."""
        raw = bytes(text)
        if raw[:1] + raw[-1:] != b"[]" or not raw[1:2].isdigit() or not raw[-2:-1].isdigit():
            return None
        return cls(raw) if raw.translate(_LOOKED_AT).find(b"x", 1) == len(raw) - 1 else None

    @property
    def numbers(self) -> list[int]:
        """The ids as numbers.

        Raises:
            LegUnreadable: they are none.
        """
        if self._numbers is None:
            self._numbers = _numbers(self.raw)
        return self._numbers

    def behind(self, place: int, most: int) -> int:
        """Return how many ids end behind a place in the text, or ``most`` where there is text enough for so many."""
        return most if len(self.raw) - place > most * _LONGEST_ID else self.raw.count(b",", place) + 1

    def places(self, ids: Iterable[int]) -> Iterator[int]:
        """Yield where in the text each of these ids begins, or a character later; they are told in order, from 0."""
        raw, at, passed = self.raw, 1, 0
        for each in ids:
            while passed < each and at < len(raw):
                ahead = 2 * (each - passed)  # an id and its comma are two characters or more
                passed += raw.count(b",", at, at + ahead)
                at += ahead
            yield at

    def about(self) -> int:
        """Return how many there are, or about how many: to count those of 1 MB takes 1.5 ms."""
        return len(self.raw) // CHARACTERS_PER_ID if self._numbers is None else len(self._numbers)

    def __len__(self) -> int:
        return self.raw.count(b",") + 1 if self._numbers is None else len(self._numbers)

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> list[int]: ...

    def __getitem__(self, at: int | slice) -> int | list[int]:
        return self.numbers[at]

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)

    def __reversed__(self) -> Iterator[int]:
        return reversed(self.numbers)

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return self.numbers == (other.numbers if isinstance(other, TokenIds) else other)

    __hash__ = None  # type: ignore[assignment]  # as a list has none


class Counted:
    """Token ids of which the number is left: what an answer is rebuilt from."""

    __slots__ = ("_tokens",)

    def __init__(self, tokens: Sized) -> None:
        self._tokens = len(tokens)

    def __len__(self) -> int:
        return self._tokens


def _numbers(raw: bytes) -> list[int]:
    try:
        found: Any = orjson.loads(raw)
    except orjson.JSONDecodeError:
        found = None
    if not are_token_ids(found):
        raise LegUnreadable("render", "the render service's token_ids are no integers")
    return found


def are_token_ids(value: Any) -> TypeGuard[list[int]]:
    """Say whether a renderer's value is a list of token ids, and not an empty one."""
    if isinstance(value, TokenIds):
        return True
    # A set of types looks at every item in C; a Python loop over a long prompt would stall other requests.
    return isinstance(value, list) and bool(value) and set(map(type, value)) == {int}
