"""A prompt as a chain of blocks: two prompts that share their first blocks share the first numbers of their chains.

A block's number stands for everything up to its end, as the block hashes of vLLM's prefix cache do, and like there it
depends on the model (a LoRA adapter is one), the cache salt, and the media inside. Numbers are the same in every
process, so that replicas agree on them. They are no secret and no proof: a wrong guess costs a cache hit at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from zlib import crc32

from envelope.prompt import CHARACTERS_PER_TOKEN, beginning, known_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.context import RequestContext
    from envelope.json_codec import Json

# Of a prompt that is text; what is behind it does not matter for the choice any more.
_MAX_BYTES = 1 << 20


def chain(ctx: RequestContext, block_tokens: int) -> Sequence[int]:
    """Return one number for each whole block of the request's prompt."""
    tokens = known_tokens(ctx.api, ctx.body, ctx.rendered)
    key = (block_tokens, tokens is None)
    if ctx.blocks is None or ctx.blocks[0] != key:
        generate = ctx.body if ctx.rendered is None else ctx.rendered
        found = _of_text(ctx.body, block_tokens) if tokens is None else _of_tokens(generate, tokens, block_tokens)
        ctx.blocks = key, found
    return ctx.blocks[1]


def _of_tokens(generate: Json, tokens: Sequence[int], block_tokens: int) -> list[int]:
    number, numbers = _seed(generate), []
    media = _media(generate["features"], block_tokens) if generate.get("features") else None
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        # The hash of a tuple of numbers does not differ from process to process, as that of a text does.
        number = hash((number, hash(tuple(tokens[start : start + block_tokens]))))
        if media and (inside := media.get(start // block_tokens)):
            number = hash((number, *inside))
        numbers.append(number)
    return numbers


def _of_text(body: Json, block_tokens: int) -> list[int]:
    before, said = beginning(body, _MAX_BYTES)
    number, numbers, size = hash((_seed(body), crc32(before))), [], block_tokens * CHARACTERS_PER_TOKEN
    for start in range(0, len(said) - size + 1, size):
        number = hash((number, crc32(said[start : start + size])))
        numbers.append(number)
    return numbers


def _seed(body: Json) -> int:
    return hash((_number(body.get("model")), _number(body.get("cache_salt"))))


def _number(text: Any) -> int:
    return crc32(str(text).encode(errors="replace"))


def _media(features: Any, block_tokens: int) -> dict[int, list[int]]:
    """Return, by block, the hashes of the media that begin in it: their placeholder tokens are all the same."""
    found: dict[int, list[int]] = {}
    if isinstance(features, dict):
        for modality, hashes in (features.get("mm_hashes") or {}).items():
            places = (features.get("mm_placeholders") or {}).get(modality, ())
            for each, place in zip(hashes, places, strict=False):
                found.setdefault(place["offset"] // block_tokens, []).append(_number(each))
    return found
