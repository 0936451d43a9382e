"""What a prompt begins with, as numbers at a few marks: where two prompts begin alike, so do their numbers.

A number stands for everything up to a mark in the prompt, as the block hashes of vLLM's prefix cache do, and like there
it depends on the model (a LoRA adapter is one), the cache salt, and the media inside. It is no proof: a wrong one costs
a cache hit at most. Replicas have the same numbers, and so agree on the places where prompts belong.

To read all of a prompt is too much for a choice among workers. Prompts that differ somewhere mostly differ from there
on, so it is enough to look into their first block, where dates and names often stand, and right before the mark.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from functools import cache
from typing import TYPE_CHECKING, Any
from zlib import crc32

from envelope.prompt import CHARACTERS_PER_TOKEN, beginning, count_tokens, known_tokens
from envelope.token_ids import CHARACTERS_PER_ID, TokenIds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.context import RequestContext
    from envelope.json_codec import Json

    Media = Sequence[tuple[int, int]]

# Of a prompt that is text; what is behind it does not matter for the choice any more.
_MAX_BYTES = 1 << 20
_BEFORE = 16  # tokens that are read before a mark
_POINTS = 64  # of all that is before it, so many are read, up to twice as many


class Marks:
    """The places at which prompts are compared: behind 1, 2, 3, 4, 6, 8, 12, 16, 24 .. blocks.

    So a prompt has few of them however long it is.

    Args:
        block_tokens: tokens of a block.
        spread: all that is before a mark is read here and there too, as what is in a worker's cache is counted by it.

    Attributes:
        blocks: how many there are before each mark.
    """

    def __init__(self, block_tokens: int, spread: bool) -> None:
        self.block_tokens = block_tokens
        self.spread = spread
        self.blocks = [1, *(many << power for power in range(40) for many in (2, 3))]


@cache
def marks(block_tokens: int, spread: bool) -> Marks:
    """Return what all have in common who want such marks, so that a request's numbers are made once for them."""
    return Marks(block_tokens, spread)


class Prompt(ABC):
    """The numbers of one prompt, each made when somebody asks for it; they are the same in every process.

    Attributes:
        blocks: whole blocks.
        marks: how many there are.
        rendered: a renderer made the tokens.
    """

    __slots__ = (
        "_before",
        "_begin",
        "_block",
        "_known",
        "_length",
        "_media",
        "_said",
        "_where",
        "blocks",
        "marks",
        "rendered",
    )

    def __init__(
        self, seed: int, said: Any, length: int, unit: int, where: Marks, rendered: bool, media: Media = ()
    ) -> None:
        self._said = said
        self._media = media
        self._before = _BEFORE * unit
        self._block = block = where.block_tokens * unit
        self._where = where
        self._length = length
        self.blocks = blocks = length // block
        self.marks = bisect_right(where.blocks, blocks)
        self.rendered = rendered
        self._begin = hash((seed, self._read(0, block))) if blocks else 0
        self._known: dict[int, int] = {} if media else {1: self._begin}

    def number(self, blocks: int) -> int:
        """Return what stands for so many blocks; for one of them it is there without reading anything more."""
        if (found := self._known.get(blocks)) is None:
            stop, found = blocks * self._block, self._begin
            if blocks > 1:
                found = hash((found, self._read(stop - self._before, stop)))
                if self._where.spread:
                    # The same places for all marks up to the double, so that they are in the processor's caches.
                    step = (self._block << blocks.bit_length() - 1) // _POINTS or 1
                    found = hash((found, self._read_apart(stop, step)))
            if self._media and (before := [each for place, each in self._media if place < stop]):
                found = hash((found, *before))
            self._known[blocks] = found
        return found

    def ends_at_a_mark(self) -> bool:
        """Say whether the last mark is so near the end that what begins the answer may stand before it."""
        return self._length - self._where.blocks[self.marks - 1] * self._block < self._before

    @abstractmethod
    def _read(self, start: int, stop: int) -> int:
        """Return what stands for a part."""

    @abstractmethod
    def _read_apart(self, stop: int, step: int) -> int:
        """Return what stands for some of what is before, so far apart."""


class _Text(Prompt):
    """Of bytes, be they the text of tokens."""

    __slots__ = ()

    def _read(self, start: int, stop: int) -> int:
        return crc32(self._said[start:stop])

    def _read_apart(self, stop: int, step: int) -> int:
        # One digit may be the same in two prompts by chance, so there are two for a token.
        return crc32(self._said[: stop : step // 2 or 1])


class _Tokens(Prompt):
    """Of numbers."""

    __slots__ = ()

    def _read(self, start: int, stop: int) -> int:
        # The hash of a tuple of numbers does not differ from process to process, as that of a text does.
        return hash(tuple(self._said[start:stop]))

    def _read_apart(self, stop: int, step: int) -> int:
        return hash(tuple(self._said[:stop:step]))


def prompt(ctx: RequestContext, where: Marks) -> Prompt:
    """Return the request's prompt, which may be text until it is rendered."""
    found: Prompt | None = ctx.chains.get(where)
    if found is None or found.rendered != (ctx.rendered is not None):
        found = ctx.chains[where] = _prompt(ctx, where)
    return found


def _prompt(ctx: RequestContext, where: Marks) -> Prompt:
    tokens, rendered = known_tokens(ctx.api, ctx.body, ctx.rendered), ctx.rendered is not None
    if tokens is None:
        before, said = beginning(ctx.body, _MAX_BYTES)
        return _Text(hash((_seed(ctx.body), crc32(before))), said, len(said) - 1, CHARACTERS_PER_TOKEN, where, False)
    generate = ctx.body if ctx.rendered is None else ctx.rendered
    seed, features = _seed(generate), generate.get("features")
    media = _media(features) if isinstance(features, dict) else ()
    if not isinstance(tokens, TokenIds):
        return _Tokens(seed, tokens, len(tokens), 1, where, rendered, media)
    if media:
        media = [*zip(tokens.places(place for place, _ in media), (each for _, each in media), strict=True)]
    return _Text(seed, tokens.raw, len(tokens.raw) - 1, CHARACTERS_PER_ID, where, rendered, media)


def tokens_behind(ctx: RequestContext, where: Marks, blocks: int, most: int) -> int:
    """Return how many of a prompt's tokens are behind its first blocks; from ``most`` on they need not be counted."""
    tokens = known_tokens(ctx.api, ctx.body, ctx.rendered)
    if isinstance(tokens, TokenIds):
        return tokens.behind(blocks * where.block_tokens * CHARACTERS_PER_ID, most)
    return count_tokens(ctx.api, ctx.body, ctx.rendered) - blocks * where.block_tokens


def _seed(body: Json) -> int:
    model, salt = _number(body.get("model")), body.get("cache_salt")
    return model if salt is None else hash((model, _number(salt)))


def _number(text: Any) -> int:
    return crc32(str(text).encode(errors="replace"))


def _media(features: Json) -> Media:
    """Return where media begin, in tokens, and a number for each: their placeholder tokens are all the same."""
    found = []
    for modality, hashes in (features.get("mm_hashes") or {}).items():
        places = (features.get("mm_placeholders") or {}).get(modality, ())
        found += [(place["offset"], _number(each)) for each, place in zip(hashes, places, strict=False)]
    return sorted(found)
