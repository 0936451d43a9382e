"""What is wrong with a configuration, as sentences: source, path, value, and what to write instead.

pydantic finds the faults; its own messages, which speak of types and URLs, are never shown.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

Path = tuple[str | int, ...]

_LONGEST_VALUE = 60


class ConfigError(Exception):
    """A configuration that cannot be used. ``problems`` has one sentence for each thing that is wrong."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Faults(ValueError):
    """Raised by a model's validator: several faults of one section, each a key of it and a sentence."""

    def __init__(self, faults: Iterable[tuple[str, str]]) -> None:
        self.faults = tuple(faults)
        super().__init__("; ".join(sentence for _, sentence in self.faults))


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the values of a configuration came from: one file, and environment variables by path."""

    file: str = "configuration"
    variables: Mapping[Path, str] = field(default_factory=dict)

    def problem(self, path: Path, sentence: str) -> str:
        """Return one problem, ready to be shown."""
        origin = next((self.variables[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.variables), None)
        where = self.file if origin is None else f"environment variable {origin}"
        return f"{where}: {show_path(path)}: {sentence}" if path else f"{where}: {sentence}"


def show_path(path: Path) -> str:
    """Write a path as an operator would: ``pipeline.steps[2].params.timeout``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the name that was probably meant."""
    names = {_folded(option): option for option in known}
    found = get_close_matches(_folded(name), names, n=1, cutoff=cutoff)
    return names[found[0]] if found else None


def _folded(name: str) -> str:
    return name.lower().replace("-", "_")


def one_of(value: object, known: Iterable[str]) -> str:
    """Say which names there are, and which one was probably meant."""
    names = list(known)
    meant = nearest(str(value), names)
    hint = f", did you mean {meant}?" if meant else ""
    return f"{show(value)} is not one of {', '.join(names)}{hint}"


def show(value: object) -> str:
    """Show a value as the file has it, cut short."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def sentences(error: ValidationError, model: type[BaseModel]) -> Iterator[tuple[Path, str]]:
    """Say each fault that pydantic found in what ``model`` was to be made of: its path, and one sentence."""
    for details in error.errors(include_url=False):
        path = details["loc"]
        cause = details.get("ctx", {}).get("error")
        if isinstance(cause, Faults):
            yield from (((*path, key) if key else path, text) for key, text in cause.faults)
        elif details["type"] == "invalid_key":
            yield path[:-1], f"the key {path[-1]} is not a text, put it in quotes"
        elif details["type"] != "too_short" or not details["input"]:  # else the items have faults of their own
            yield path, _sentence(details, model)


def _sentence(details: ErrorDetails, model: type[BaseModel]) -> str:
    kind, value, limits = details["type"], details["input"], details.get("ctx", {})
    if kind == "extra_forbidden":
        return unknown_key(str(details["loc"][-1]), section_at(model, details["loc"][:-1]), model)
    if kind == "missing":
        return _missing(str(details["loc"][-1]), section_at(model, details["loc"][:-1]))
    if kind == "literal_error":
        return one_of(value, _literal_names(limits["expected"]))
    if kind == "value_error":
        return str(limits["error"])
    text = _SENTENCES.get(kind, "{value} cannot be used here")
    return text.format(value=show(value), **{name: limit for name, limit in limits.items() if name != "value"})


_SENTENCES = {
    "bool_parsing": "{value} is neither true nor false, write one of them",
    "bool_type": "{value} is neither true nor false, write one of them",
    "greater_than": "{value} is too small, write a number above {gt}",
    "greater_than_equal": "{value} is too small, write at least {ge}",
    "int_from_float": "{value} is not a whole number, write one",
    "int_parsing": "{value} is not a whole number, write one",
    "int_parsing_size": "{value} is too large, write a smaller number",
    "int_type": "{value} is not a whole number, write one",
    "less_than": "{value} is too large, write a number below {lt}",
    "less_than_equal": "{value} is too large, write at most {le}",
    "list_type": "{value} is not a list, write [a, b] or one '- item' per line",
    "dict_type": "{value} is not a mapping, write 'key: value' lines under it",
    "model_type": "{value} is not a mapping, write 'key: value' lines under it",
    "model_attributes_type": "{value} is not a mapping, write 'key: value' lines under it",
    "recursion_loop": "an alias contains itself, write the value out",
    "string_too_short": "the text is empty, write one",
    "string_type": "{value} is not a text, put it in quotes",
    "too_short": "the list is empty, write at least {min_length}",
    "tuple_type": "{value} is not a list, write [a, b] or one '- item' per line",
}


def unknown_key(key: str, section: type[BaseModel] | None, root: type[BaseModel]) -> str:
    """Say that a section has no such key, and which was meant: here, elsewhere, or in a later release."""
    if section is None:
        return "unknown key, take it out"
    later: Mapping[str, str] = getattr(section, "later", {})
    if key in later:
        return later[key]
    names = list(section.model_fields)
    if meant := nearest(key, names):
        return f"unknown key, did you mean {meant}?"
    if elsewhere := [path for path, _ in leaves(root) if path[-1] == key]:
        return f"unknown key here, did you mean {show_path(elsewhere[0])}?"
    return f"unknown key, the keys here are {', '.join(names)}"


def _missing(key: str, section: type[BaseModel] | None) -> str:
    told = section.model_fields[key].description if section is not None else None
    return f"missing, and has no default: write {told}" if told else "missing, and has no default: write it"


def _literal_names(expected: str) -> list[str]:
    """Take the names out of pydantic's ``'a', 'b' or 'c'``."""
    return [part.strip(" '") for part in expected.replace(" or ", ", ").split(",")]


def section_at(model: type[BaseModel], path: Path) -> type[BaseModel] | None:
    """Return the model that describes the section at a path, or None where there is none."""
    found: type[BaseModel] | None = model
    for part in path:
        if found is None:
            return None
        if isinstance(part, str):
            info = found.model_fields.get(part)
            found = section_in(info.annotation) if info is not None else None
    return found


def section_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model inside ``Model``, ``Model | None`` or ``tuple[Model, ...]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in get_args(annotation) if (found := section_in(inner)) is not None), None)


def leaves(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Yield each key of a model that holds a value and not a section, with its path."""
    for name, info in model.model_fields.items():
        section = section_in(info.annotation)
        if section is None:
            yield (*path, name), info
        elif get_origin(info.annotation) is not tuple:
            yield from leaves(section, (*path, name))
