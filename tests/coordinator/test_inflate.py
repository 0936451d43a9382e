"""What was packed comes back whole, wherever its steps end."""

from __future__ import annotations

import gzip
import zlib
from typing import TYPE_CHECKING

import pytest

from coordinator.inflate import Inflater

if TYPE_CHECKING:
    from collections.abc import Callable

STEP = 256 * 1024

# In the last there is nothing behind the last bits of what was packed, not even a checksum.
PACK: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "deflate without its header": ("deflate", lambda data: zlib.compress(data)[2:-4]),
}


@pytest.mark.parametrize("kind", PACK)
@pytest.mark.parametrize("unit", [b"\0", b"hello world, "])
def test_a_body_has_its_end_also_where_that_is_near_the_end_of_a_step(kind: str, unit: bytes) -> None:
    encoding, pack = PACK[kind]
    for size in range(STEP - 3, STEP + 263):  # a match of deflate has up to 258 bytes
        data = (unit * (size // len(unit) + 1))[:size]
        inflater, parts, rest = Inflater(encoding), list[bytes](), pack(data)
        while rest:
            part, rest = inflater.step(rest)
            parts.append(part)
        inflater.end()
        assert b"".join(parts) == data
