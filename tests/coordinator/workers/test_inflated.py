"""An answer that came packed is the same answer, and no more of it is inflated than is taken."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from typing import TYPE_CHECKING, Any

import pytest
from multidict import CIMultiDict

from coordinator.workers.inflated import body_of
from coordinator.workers.wire import Broken

if TYPE_CHECKING:
    from collections.abc import Sequence

TEXT = b"data: hello\n\n" * 3
ZIPPED = gzip.compress(TEXT, mtime=0)  # with a time in it, two processes would give these tests other names
DEFLATED = zlib.compress(TEXT)
PACKED = {
    "gzip": ZIPPED,
    "GZip ": ZIPPED,
    "x-gzip": gzip.compress(TEXT[:7], mtime=0) + gzip.compress(TEXT[7:], mtime=0),
    "deflate": DEFLATED,
    "Deflate": DEFLATED[2:-4],  # without the zlib header, as some send it
    "gzip, identity": ZIPPED,
    "identity ,\tgzip": ZIPPED,
}
STEP = 256 * 1024


class Packed:
    """An answer of these parts, of which an empty one is its end. Stands for ``wire.Connection``."""

    def __init__(self, encoding: str, parts: Sequence[bytes]) -> None:
        self.headers = CIMultiDict({"Content-Encoding": encoding})
        self.parts = list(parts)

    async def read(self, ends_at: float | None = None) -> bytes:
        return self.parts.pop(0) if self.parts else b""


def packed(encoding: str, *parts: bytes) -> Any:
    return body_of(Packed(encoding, parts))  # type: ignore[arg-type]  # the part of one that is read


async def read(body: Any) -> bytes:
    parts: list[bytes] = []
    assert await body.push(lambda part: parts.append(part) or True)
    return b"".join(parts)


@pytest.mark.parametrize(("encoding", "data"), PACKED.items())
async def test_however_it_is_cut_it_is_the_same_answer(encoding: str, data: bytes) -> None:
    assert await read(packed(encoding, data)) == TEXT
    assert await read(packed(encoding, *(bytes([byte]) for byte in data))) == TEXT
    for end in range(1, len(data)):
        assert await read(packed(encoding, data[:end], data[end:])) == TEXT


@pytest.mark.parametrize("encoding", ["identity", "identity, Identity", "", " , ", "br", "gzip, br", "gzip, gzip"])
async def test_what_is_not_packed_as_we_know_it_is_read_as_it_is(encoding: str) -> None:
    connection = Packed(encoding, ())
    assert body_of(connection) is connection  # type: ignore[comparison-overlap, arg-type]  # it stands for one


async def test_what_is_written_so_far_is_given_before_the_rest_comes() -> None:
    packer = zlib.compressobj()
    first = packer.compress(TEXT) + packer.flush(zlib.Z_SYNC_FLUSH)
    body = packed("deflate", first, packer.flush())
    assert await body.read() == TEXT
    assert await body.read() == b""


@pytest.mark.parametrize(
    "parts",
    [(b"no gzip at all",), (ZIPPED[:-1],), (ZIPPED[:9],), (ZIPPED, b"x")],
    ids=["no gzip", "no end", "half a head", "something behind it"],
)
async def test_what_is_not_what_its_head_says_is_broken(parts: Sequence[bytes]) -> None:
    with pytest.raises(Broken):
        await read(packed("gzip", *parts))


async def test_of_a_few_bytes_that_stand_for_very_many_no_more_is_inflated_than_is_taken() -> None:
    body, sizes = packed("gzip", gzip.compress(bytes(64 * STEP))), list[int]()
    for _ in range(3):
        assert not await body.push(lambda part: sizes.append(len(part)))  # which is no yes
    assert (sum(sizes) <= 3 * STEP, max(sizes) <= STEP) == (True, True)
    assert sum(sizes) + len(await read(body)) == 64 * STEP


async def test_others_have_their_turn_in_between() -> None:
    body, turns = packed("gzip", gzip.compress(bytes(64 * STEP))), 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    waiting = asyncio.create_task(others())
    await read(body)
    waiting.cancel()
    assert turns >= 60
