"""What a prompt begins with, as numbers at a few marks: where two prompts begin alike, so do their numbers.

A number stands for everything up to a mark in the prompt, as the block hashes of vLLM's prefix cache do, and like there
it depends on the model (a LoRA adapter is one), the cache salt, and the media inside. It is no proof: a wrong one costs
a cache hit at most. Replicas have numbers of their own, and agree on the places where prompts belong.

To read all of a prompt is too much for a choice among workers. Prompts that differ somewhere mostly differ from there
on, so it is enough to look into their first block, where dates and names often stand, and right before the mark.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cache
from typing import TYPE_CHECKING, Any
from zlib import crc32

from envelope.prompt import CHARACTERS_PER_TOKEN, beginning, count_tokens, known_tokens
from envelope.token_ids import CHARACTERS_PER_ID, TokenIds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from coordinator.context import RequestContext
    from envelope.json_codec import Json

# Of a prompt that is text; what is behind it does not matter for the choice any more.
_MAX_BYTES = 1 << 20
_BEFORE = 16  # tokens that are read before a mark
_SPREAD = 64  # tokens, or words of text, that are read of all that is before it
_WORD = 8  # characters: a digit alone may be the same in most tokens


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


class Prompt:
    """The numbers of one prompt, each made when somebody asks for it.

    Attributes:
        blocks: whole blocks.
        marks: how many there are.
        rendered: a renderer made the tokens.
    """

    __slots__ = (
        *("_begin", "_block", "_known", "_media", "_said", "_seed", "_spread", "_unit"),
        *("blocks", "marks", "rendered"),
    )

    def __init__(
        self,
        seed: int,
        said: bytes | Sequence[int],
        unit: int,
        where: Marks,
        *,
        media: Sequence[tuple[int, int]] = (),
        rendered: bool = False,
    ) -> None:
        self._seed = seed
        self._said = said
        self._unit = unit
        self._spread = where.spread
        self._media = media
        self.rendered = rendered
        self._block = where.block_tokens * unit
        self.blocks = (len(said) - isinstance(said, bytes)) // self._block
        self.marks = bisect_right(where.blocks, self.blocks)
        self._begin = self._hash(seed, 0, self._block)
        self._known: dict[int, int] = {}

    def number(self, blocks: int) -> int:
        """Return what stands for so many blocks."""
        if (found := self._known.get(blocks)) is None:
            stop = blocks * self._block
            found = self._hash(self._begin, stop - _BEFORE * self._unit, stop)
            if self._spread:
                found = self._hash_of_all(found, stop)
            self._known[blocks] = found
        return found

    def place(self, blocks: int) -> int:
        """Return where a prompt that begins with so many blocks belongs, which is the same in every process."""
        said, stop = self._said, blocks * self._block
        # The hash of a tuple of numbers does not differ from process to process, as that of a text does.
        if isinstance(said, bytes):
            return hash((self._seed, crc32(said[: self._block]), crc32(said[stop - _BEFORE * self._unit : stop])))
        return self.number(blocks)

    def _hash(self, number: int, start: int, stop: int) -> int:
        said = self._said
        if isinstance(said, bytes):
            return hash((number, said[start:stop]))
        return hash((number, *said[start:stop], *(each for place, each in self._media if place < stop)))

    def _hash_of_all(self, number: int, stop: int) -> int:
        """Return what stands for all that is before a place, of which a part is read, the same distance apart."""
        said = self._said
        if not isinstance(said, bytes):
            return hash((number, *said[: stop : stop // _SPREAD or 1]))
        words = memoryview(said)[: stop - stop % _WORD].cast("Q")
        return hash((number, words[:: len(words) // _SPREAD or 1].tobytes()))


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
        return Prompt(hash((_seed(ctx.body), crc32(before))), said, CHARACTERS_PER_TOKEN, where)
    generate = ctx.body if ctx.rendered is None else ctx.rendered
    media = _media(generate)  # whose places are told in tokens
    if isinstance(tokens, TokenIds) and not media:
        return Prompt(_seed(generate), tokens.raw, CHARACTERS_PER_ID, where, rendered=rendered)
    return Prompt(_seed(generate), tokens, 1, where, media=media, rendered=rendered)


def tokens_behind(ctx: RequestContext, where: Marks, blocks: int, most: int) -> int:
    """Return how many of a prompt's tokens are behind its first blocks; from ``most`` on they need not be counted."""
    tokens = known_tokens(ctx.api, ctx.body, ctx.rendered)
    if isinstance(tokens, TokenIds) and not _media(ctx.rendered):
        return tokens.behind(blocks * where.block_tokens * CHARACTERS_PER_ID, most)
    return count_tokens(ctx.api, ctx.body, ctx.rendered) - blocks * where.block_tokens


def _seed(body: Json) -> int:
    model, salt = _number(body.get("model")), body.get("cache_salt")
    return model if salt is None else hash((model, _number(salt)))


def _number(text: Any) -> int:
    return crc32(str(text).encode(errors="replace"))


def _media(generate: Mapping[str, Any] | None) -> Sequence[tuple[int, int]]:
    """Return where media begin, in tokens, and a number for each: their placeholder tokens are all the same."""
    features = generate and generate.get("features")
    return tuple(_hashes(features)) if isinstance(features, dict) else ()


def _hashes(features: Json) -> Iterable[tuple[int, int]]:
    for modality, hashes in (features.get("mm_hashes") or {}).items():
        places = (features.get("mm_placeholders") or {}).get(modality, ())
        for each, place in zip(hashes, places, strict=False):
            yield place["offset"], _number(each)
