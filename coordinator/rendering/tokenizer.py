"""A model's tokenizer and chat template, through transformers, which is imported here alone and only when asked for.

The work is done on several threads at once: the template is compiled once, and the tokenizer is only read.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envelope.errors import BadRequest

if TYPE_CHECKING:
    from coordinator.rendering.template import ContentFormat
    from envelope.json_codec import Json

INSTALL_HINT = "rendering in the coordinator needs transformers: pip install 'pd-coordinator[render]'"

# Files of models that vLLM renders by code of its own, and not by a chat template.
_OTHER_KINDS = ("tekken.json", "tokenizer.model.v*", "tokenizer.model.v*.gguf")
_OURS = frozenset(("messages", "tools"))
_OTHER_MODELS = frozenset(
    ("gpt_oss", "deepseek_v32", "deepseek_v4", "deepseek_v41", "inkling", "kimi_k3", "kimi_audio", "alpamayo2_super")
)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt as token ids, and where each of them stands in its text, in characters; None where it never was one."""

    token_ids: list[int]
    offsets: list[tuple[int, int]] | None


class Tokenizer:
    """
    Args:
        model: transformers' tokenizer.
        template: the chat template; None where the model has none.
    """

    def __init__(self, model: Any, template: Template | None, sha256: str) -> None:
        self._model = model
        self._backend = model.backend_tokenizer
        # Limits are ours to check; a tokenizer.json may hold some of its own.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._template = template
        self.sha256 = sha256
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self._ids: dict[str, int] = vocabulary
        self.size = len(vocabulary)
        self.max_chars_per_token = max(map(len, vocabulary))

    @property
    def template(self) -> Template | None:
        return self._template

    def id_of(self, token: str) -> int | None:
        return self._ids.get(token)

    def encode(self, text: str, *, add_special_tokens: bool) -> Encoded:
        """
        Raises:
            BadRequest: the text holds half a character (a lone surrogate), which JSON can spell and UTF-8 cannot.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BadRequest("the prompt holds a lone surrogate, which is no character") from None
        # As a batch of one: a batch lets other threads run meanwhile, a single text does not.
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        return Encoded(encoding.ids, encoding.offsets)

    def apply_template(self, messages: list[Json], tools: list[Json] | None, kwargs: Json) -> str:
        """
        Args:
            kwargs: what the template may read; what it does not is left out.

        Raises:
            BadRequest: the template refuses the messages, or the model has none; or the client would put its own
                messages or tools in the place of the request's.
        """
        if ours := _OURS & kwargs.keys():
            raise BadRequest(f"chat_template_kwargs must not hold {' or '.join(ours)}", param="chat_template_kwargs")
        template = self._template
        if template is None:
            raise BadRequest(
                "As of transformers v4.44, default chat template is no longer allowed, so you must provide a chat "
                "template if the tokenizer does not define one.",
                param="messages",
            )
        taken = {key: value for key, value in kwargs.items() if key in template.variables}
        try:
            return str(
                self._model.apply_chat_template(
                    messages, tools=tools, chat_template=template.text, tokenize=False, **taken
                )
            )
        except Exception as error:  # a template may raise whatever Python has: the messages are not to its liking
            raise BadRequest(_reason(error), param="messages") from error


@dataclass(frozen=True, slots=True)
class Template:
    """A chat template.

    Attributes:
        parts: it takes content as a list of parts.
        developers: it knows messages of developers.
        system_later: it takes system messages after the first message.
        variables: what a client may set in it.
    """

    text: str
    parts: bool
    developers: bool
    system_later: bool
    variables: frozenset[str]


def load(folder: str, template: str | None, content_format: ContentFormat | None) -> Tokenizer:
    """Load what a model's folder holds; nothing is fetched, and no code of the model's is run.

    What was loaded last is kept for who asks for the same: a configuration that is applied anew must not stall streams.

    Args:
        template: a file to use in place of the model's own chat template.
        content_format: how the template takes content; None is found out.

    Raises:
        ValueError: a sentence that says what is wrong with the folder or the template.
    """
    _check_folder(Path(folder), template)
    files = [file for kind in ("*.json", "*.jinja") for file in sorted(Path(folder).glob(kind))]
    files += [] if template is None else [Path(template)]
    marks = tuple((str(file), file.stat().st_mtime_ns) for file in files if file.exists())
    return _load(folder, template, content_format, marks)


@lru_cache(maxsize=1)
def _load(folder: str, template: str | None, content_format: ContentFormat | None, marks: object) -> Tokenizer:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text at a time: a pool of threads would idle
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no torch, on standard error
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ValueError(INSTALL_HINT) from None
    try:
        model = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever is wrong with the files
        raise ValueError(f"{folder}: transformers cannot load a tokenizer from it: {error}") from None
    if not getattr(model, "is_fast", False):
        raise ValueError(f"{folder}: the model has no fast tokenizer (tokenizer.json), so use a render service")
    return Tokenizer(model, _template(model, template, content_format), digest(folder))


def digest(folder: str) -> str:
    """Return the SHA-256 of a folder's tokenizer.json; empty where there is none that can be read."""
    try:
        return hashlib.sha256((Path(folder) / "tokenizer.json").read_bytes()).hexdigest()
    except OSError:
        return ""


def generation_config(folder: str) -> Json:
    """Return what a model's generation_config.json sets, as vLLM reads it; without one, what its config.json does.

    Raises:
        ValueError: the files cannot be read.
    """
    from transformers import AutoConfig, GenerationConfig

    try:
        try:
            config = GenerationConfig.from_pretrained(folder, local_files_only=True)
        except OSError:
            model = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            config = GenerationConfig.from_model_config(model)
    except OSError:
        return {}
    except Exception as error:
        raise ValueError(f"{folder}: its generation config cannot be read: {error}") from None
    return dict(config.to_diff_dict())


def _check_folder(folder: Path, template: str | None) -> None:
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder, write the model's: with tokenizer.json and tokenizer_config.json")
    own_way = [file.name for kind in _OTHER_KINDS for file in folder.glob(kind)]
    if own_way:
        raise ValueError(
            f"{folder} holds {own_way[0]}, of Mistral's own format: vLLM renders such a model its own way, use a "
            "render service"
        )
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder} holds no tokenizer.json, write the model's folder or use a render service")
    kind = _model_type(folder)
    if kind in _OTHER_MODELS:
        raise ValueError(f"{folder} is a {kind} model, which vLLM renders its own way: use a render service")
    if template is None and (folder / "chat_template.json").is_file():
        raise ValueError(
            f"{folder} holds a processor's chat_template.json beside the tokenizer's: write the one that the workers "
            "use into a file, and name it in chat_template"
        )


def _model_type(folder: Path) -> str | None:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config.get("model_type") if isinstance(config, dict) else None


def _template(model: Any, file: str | None, content_format: ContentFormat | None) -> Template | None:
    from jinja2 import TemplateError

    from coordinator.rendering import template

    if file is not None:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"chat_template: {file}: {error.strerror}") from None
    elif isinstance(model.chat_template, dict):
        raise ValueError(
            f"the model has several chat templates ({', '.join(model.chat_template)}): write the one that the workers "
            "use into a file, and name it in chat_template"
        )
    elif model.chat_template is None:
        return None
    else:
        text = model.chat_template
    try:
        found = content_format or template.content_format(text)
        variables = template.variables(text) | _base_parameters(model)
    except TemplateError as error:
        raise ValueError(f"the chat template is no Jinja template: {error}") from None
    developers = '"developer"' in text or "'developer'" in text
    later = template.takes_system_later(text)
    return Template(text, found == "openai", developers, later, frozenset(variables) - {"chat_template", "tokenize"})


def _base_parameters(model: Any) -> set[str]:
    """Return the parameters of transformers' own that vLLM lets through to it."""
    parameters = inspect.signature(type(model).apply_chat_template).parameters.values()
    return {p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)} - {"self", "conversation"}


def _reason(error: BaseException) -> str:
    """Return the template's own words, which often list what it takes."""
    from jinja2 import TemplateError

    current: BaseException | None = error
    while current is not None:
        if isinstance(current, TemplateError):
            return str(current)
        current = current.__cause__ or current.__context__
    return str(error)
