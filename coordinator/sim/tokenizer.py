"""The simulated model's vocabulary and chat template; the real libraries read both.

Text comes out as vLLM's detokenizer gives it: a character whose bytes are not all there yet is held back, and is
never shown when generation ends inside it.
"""

from __future__ import annotations

import codecs
import functools
import importlib
import json
from importlib import resources
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

EOS = 2
VOCAB_SIZE = 1024  # the model's embedding has three rows more than the tokenizer has tokens
INSTALL_HINT = "the simulated workers need a tokenizer and jinja2: pip install 'pd-coordinator[demo]'"


@functools.cache
def load() -> Tokenizer:
    """Return the one tokenizer of this process.

    Raises:
        RuntimeError: the optional ``demo`` dependencies are not installed.
    """
    try:
        tokenizers = importlib.import_module("tokenizers")
        jinja = importlib.import_module("jinja2.sandbox")
    except ImportError as error:
        raise RuntimeError(INSTALL_HINT) from error
    folder = resources.files("coordinator.sim") / "model"
    backend = tokenizers.Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8"))
    # The settings under which Hugging Face compiles every chat template.
    environment = jinja.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise_exception
    template = environment.from_string((folder / "chat_template.jinja").read_text(encoding="utf-8"))
    return Tokenizer(backend, template)


class Tokenizer:
    def __init__(self, backend: Any, template: Any) -> None:
        self._backend = backend
        self._template = template
        added: dict[int, Any] = backend.get_added_tokens_decoder()
        self._special = {id for id, token in added.items() if token.special}
        self._bytes = {
            id: text.encode() if id in added else bytes(_BYTE_OF[char] for char in text)
            for text, id in backend.get_vocab().items()
        }

    def __len__(self) -> int:
        return len(self._bytes)

    def id_of(self, token: str) -> int:
        return int(self._backend.token_to_id(token))

    def encode(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def offsets(self, text: str) -> list[list[int]]:
        """Return each token's first and past-the-end position in ``text``, in characters."""
        return [list(pair) for pair in self._backend.encode(text, add_special_tokens=False).offsets]

    def token_bytes(self, token_id: int, *, skip_special: bool = False) -> bytes:
        if skip_special and token_id in self._special:
            return b""
        return self._bytes.get(token_id, b"")

    def decode(self, token_ids: Iterable[int], *, skip_special: bool = False) -> str:
        joined = b"".join(self.token_bytes(id, skip_special=skip_special) for id in token_ids)
        return joined.decode("utf-8", errors="replace")

    def token_text(self, token_id: int) -> str:
        """Return one token as logprobs show it: empty if its bytes are only part of a character."""
        text = self.decode([token_id])
        return "" if "\ufffd" in text else text

    def apply_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, kwargs: Mapping[str, Any]
    ) -> str:
        return str(self._template.render(messages=messages, tools=tools, **kwargs))


class Detokenizer:
    """Token ids in, text out, as far as whole characters go."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        return self._decoder.decode(self._tokenizer.token_bytes(token_id, skip_special=self._skip_special))


def _raise_exception(message: str) -> NoReturn:
    raise ValueError(message)


def _byte_alphabet() -> dict[str, int]:
    """Invert the table by which byte-level BPE writes each byte as one printable character (GPT-2's)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}


_BYTE_OF = _byte_alphabet()
