"""Keys: how the configuration writes them, where they come from, and that nothing shows them.

``env:NAME`` and ``file:PATH`` keep a key out of the file; any other text is the key itself. What is wrong with one is
said without it: the sentences end up in logs.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

HIDDEN = "***"

# What an Authorization header can carry as it is (RFC 9110, section 5.5), without blanks, which end a token.
_KEY = re.compile(r"[!-~]+", re.ASCII)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


@dataclass(frozen=True, slots=True, repr=False)
class Secret:
    """A key, or the place where it stands: ``text`` is what the file has."""

    text: str

    @property
    def path(self) -> str | None:
        """The file that holds the key, which may be replaced while we run."""
        return self.text.removeprefix("file:") if self.text.startswith("file:") else None

    def read(self, environ: Mapping[str, str]) -> str:
        """Return the key.

        Raises:
            ValueError: with a sentence that names the place.
        """
        if self.text.startswith("env:"):
            name = self.text.removeprefix("env:")
            return _usable(environ.get(name, ""), f"the environment variable {name}")
        if self.path is not None:
            return _usable(_contents(self.path), self.path)
        return _usable(self.text, "the value")

    def __str__(self) -> str:
        return self.text if self.text.startswith(("env:", "file:")) else HIDDEN

    __repr__ = __str__


def read_list(path: str) -> list[str]:
    """Return the keys of a file: one on a line, blank lines and those that begin with ``#`` aside.

    Raises:
        ValueError: with a sentence that names the file.
    """
    lines = (line.strip() for line in _contents(path).splitlines())
    return [_usable(line, f"a line of {path}") for line in lines if line and not line.startswith("#")]


class Digests:
    """Keys to compare with. Neither how long it takes nor what is kept in memory tells them."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(map(_digest, keys))

    def has(self, key: str) -> bool:
        asked, found = _digest(key), False
        for digest in self._digests:
            found |= hmac.compare_digest(digest, asked)
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _contents(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file") from None


def _usable(text: str, where: str) -> str:
    key = text.strip()
    if not key:
        raise ValueError(f"{where} is empty or not set, and a key should be there")
    if not _KEY.fullmatch(key):
        raise ValueError(f"{where} has a blank or a character that no header can carry, write a key without it")
    return key


def parse_secret(value: object) -> Secret:
    """Read a key of the configuration.

    Raises:
        ValueError: with a sentence that does not repeat it.
    """
    if isinstance(value, Secret):
        return value
    if not isinstance(value, str):
        raise ValueError("this key is not a text, put it in quotes")
    text = value.strip()
    if text.startswith("env:") and not _NAME.fullmatch(text.removeprefix("env:")):
        raise ValueError("env: is followed by the name of an environment variable, such as env:DECODE_API_KEY")
    if text == "file:":
        raise ValueError("file: is followed by a path, such as file:/etc/coordinator/decode-key")
    if not text.startswith(("env:", "file:")):
        _usable(text, "this key")
    return Secret(text)


def parse_secrets(value: object) -> tuple[Secret, ...]:
    """Read a list of keys; one text is a list with commas, as everywhere in the configuration."""
    if isinstance(value, str):
        value = [] if value.strip() == "[]" else [item for item in value.split(",") if item.strip()]
    if not isinstance(value, (list, tuple)):
        raise ValueError("the keys are not a list, write one '- key' per line")
    return tuple(map(parse_secret, value))


def _shown(value: Secret | Sequence[Secret]) -> Any:
    return str(value) if isinstance(value, Secret) else [str(item) for item in value]


_KEY_SCHEMA: dict[str, Any] = {
    "type": "string",
    "minLength": 1,
    "format": "password",
    "examples": ["env:DECODE_API_KEY", "file:/etc/coordinator/decode-key"],
}

ApiKey = Annotated[
    Secret,
    PlainValidator(parse_secret),
    PlainSerializer(_shown, return_type=str),
    WithJsonSchema(_KEY_SCHEMA),
]

ApiKeys = Annotated[
    tuple[Secret, ...],
    PlainValidator(parse_secrets),
    PlainSerializer(_shown, return_type=list),
    WithJsonSchema({"type": "array", "items": _KEY_SCHEMA}),
]
