"""Who may ask: the keys of clients.

OpenAI's clients send theirs as ``Authorization: Bearer``, Anthropic's as ``x-api-key``; either does on every route.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.security.secret import Digests, read_list
from envelope.errors import Unauthorized

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from multidict import CIMultiDict


class Keys:
    """The keys that are good.

    Args:
        written: those of the configuration and the environment.
        file: has more, one on a line; ``renew`` reads it again.

    Raises:
        ValueError: the file cannot be read, or there is no key at all.
    """

    def __init__(self, written: Sequence[str], file: str | None) -> None:
        self._written = tuple(written)
        self._file = file
        self._good = Digests(())
        if self.renew() == 0:
            raise ValueError(f"{file} holds no key, so nobody could ask for anything")

    def renew(self) -> int:
        """Read the file; return how many keys are good now. A file that has become empty takes its keys back."""
        keys = [*self._written, *(read_list(self._file) if self._file else ())]
        self._good = Digests(keys)
        return len(keys)

    def check(self, headers: CIMultiDict[str]) -> None:
        """
        Raises:
            Unauthorized: no key came, or none that is good.
        """
        sent = list(_sent(headers))
        if any(self._good.has(key) for key in sent):
            return
        told = "this API key is not valid here" if sent else "an API key is needed"
        raise Unauthorized(
            f"{told}; send one as 'Authorization: Bearer ..' or as 'x-api-key: ..'",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _sent(headers: CIMultiDict[str]) -> Iterator[str]:
    for value in headers.getall("Authorization", ()):
        scheme, _, key = value.strip().partition(" ")
        if scheme.lower() == "bearer" and key.strip():
            yield key.strip()
    yield from (value.strip() for value in headers.getall("x-api-key", ()) if value.strip())
