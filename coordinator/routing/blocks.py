"""What a prompt begins with, as a chain of numbers: where two prompts begin alike, so do their chains.

A number stands for everything up to a mark in the prompt, as the block hashes of vLLM's prefix cache do, and like there
it depends on the model (a LoRA adapter is one), the cache salt, and the media inside. Numbers are the same in every
process, so that replicas agree on them. They are no secret and no proof: a wrong guess costs a cache hit at most.

To read all of a prompt takes 7 ns a token, which for a long one is too much for a choice among workers. Prompts that
differ somewhere mostly differ from there on, so it is enough to look into them here and there.
"""

from __future__ import annotations

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

# Of a prompt that is text; what is behind it does not matter for the choice any more.
_MAX_BYTES = 1 << 20
_STEPS = 2  # marks from one power of two to the next
_BEFORE = 16  # tokens that are read before each but the first
_UNITS = (1, CHARACTERS_PER_TOKEN, CHARACTERS_PER_ID)


class Marks:
    """The places at which prompts are compared, and what of them is read there.

    Args:
        block_tokens: tokens of a block; marks are at the ends of blocks.
        all_tokens: there is a mark behind every block, and all is read. Otherwise they are behind 1, 2, 3, 4, 6, 8, 12,
            16, 24 .. blocks, so that a prompt has few of them however long it is. The first block is read, where dates
            and names often stand, and a few tokens before each mark.

    Attributes:
        blocks: how many there are before each mark.
    """

    def __init__(self, block_tokens: int, all_tokens: bool) -> None:
        self.block_tokens = block_tokens
        self.blocks: list[int] = []
        self._all = all_tokens
        self._step = 1
        self._cuts: dict[int, list[slice]] = {unit: [] for unit in _UNITS}

    def cuts(self, length: int, unit: int) -> Sequence[slice]:
        """Return what is read for each mark of a prompt of that length, where a token takes so many units of it."""
        return self._cuts[unit][: self._within(length // (self.block_tokens * unit))]

    def first_behind(self, token: int) -> int:
        """Return the number of the first mark behind a token."""
        return self._within(token // self.block_tokens)

    def _within(self, blocks: int) -> int:
        """Return how many marks there are in so many blocks."""
        while not self.blocks or self.blocks[-1] <= blocks:
            self._add()
        return bisect_right(self.blocks, blocks)

    def _add(self) -> None:
        before = self.blocks[-1] if self.blocks else 0
        if before == 2 * _STEPS * self._step and not self._all:
            self._step *= 2
        self.blocks.append(before + self._step)
        start, stop = before * self.block_tokens, self.blocks[-1] * self.block_tokens
        if before and not self._all:
            start = max(start, stop - _BEFORE)
        for unit, cuts in self._cuts.items():
            cuts.append(slice(start * unit, stop * unit))


@cache
def marks(block_tokens: int, all_tokens: bool) -> Marks:
    """Return what all have in common who want such marks, so that a request's chain is made once for them."""
    return Marks(block_tokens, all_tokens)


def chain(ctx: RequestContext, where: Marks) -> Sequence[int]:
    """Return one number for each mark in the request's prompt."""
    tokens = known_tokens(ctx.api, ctx.body, ctx.rendered)
    key = (where, tokens is None)
    if (found := ctx.chains.get(key)) is None:
        if tokens is None:
            before, said = beginning(ctx.body, _MAX_BYTES)
            found = _of_bytes(hash((_seed(ctx.body), crc32(before))), said, where, CHARACTERS_PER_TOKEN)
        else:
            found = _of_tokens(ctx.body if ctx.rendered is None else ctx.rendered, tokens, where)
        ctx.chains[key] = found
    return found


def tokens_behind(ctx: RequestContext, where: Marks, blocks: int) -> int:
    """Return how many of a prompt's tokens are behind its first blocks."""
    tokens = known_tokens(ctx.api, ctx.body, ctx.rendered)
    if isinstance(tokens, TokenIds) and not _has_media(ctx.rendered):
        return tokens.behind(blocks * where.block_tokens * CHARACTERS_PER_ID)
    return count_tokens(ctx.api, ctx.body, ctx.rendered) - blocks * where.block_tokens


def _of_tokens(generate: Json, tokens: Sequence[int], where: Marks) -> Sequence[int]:
    number = _seed(generate)
    if _has_media(generate):  # whose places are told in tokens
        media = _media(generate["features"], where)
        cuts = where.cuts(len(tokens), 1)
        return [number := hash((number, *tokens[cut], *media.get(mark, ()))) for mark, cut in enumerate(cuts)]
    if isinstance(tokens, TokenIds):
        return _of_bytes(number, tokens.raw, where, CHARACTERS_PER_ID)
    # The hash of a tuple of numbers does not differ from process to process, as that of a text does.
    return [number := hash((number, *tokens[cut])) for cut in where.cuts(len(tokens), 1)]


def _of_bytes(number: int, text: bytes, where: Marks, unit: int) -> Sequence[int]:
    return [number := hash((number, crc32(text[cut]))) for cut in where.cuts(len(text) - 1, unit)]


def _seed(body: Json) -> int:
    model, salt = _number(body.get("model")), body.get("cache_salt")
    return model if salt is None else hash((model, _number(salt)))


def _number(text: Any) -> int:
    return crc32(str(text).encode(errors="replace"))


def _has_media(generate: Json | None) -> bool:
    return bool(generate and generate.get("features"))


def _media(features: Any, where: Marks) -> dict[int, list[int]]:
    """Return, by mark, the hashes of the media that begin before it: their placeholder tokens are all the same."""
    found: dict[int, list[int]] = {}
    if isinstance(features, dict):
        for modality, hashes in (features.get("mm_hashes") or {}).items():
            places = (features.get("mm_placeholders") or {}).get(modality, ())
            for each, place in zip(hashes, places, strict=False):
                found.setdefault(where.first_behind(place["offset"]), []).append(_number(each))
    return found
