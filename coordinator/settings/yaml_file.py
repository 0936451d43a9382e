"""A YAML file as plain Python data, read as the YAML 1.2 that Go programs read, and stricter.

``yes`` and ``off`` are texts, ``010`` and ``1:30`` are no numbers, dates stay texts, and a key that stands
twice in one mapping is refused, where PyYAML keeps the last without a word.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from coordinator.settings.problems import ConfigError

_CORE_SCHEMA = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("null", r"~|null|Null|NULL|", ("~", "n", "N", "")),
    ("merge", r"<<", "<"),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  # PyYAML's own name

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.composer.ComposerError(
                    None,
                    None,
                    f"the key {key.value} stands twice in one mapping, take one out",
                    key.start_mark,
                )
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else "")
        return node


for _tag, _pattern, _first in _CORE_SCHEMA:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first))


def read(path: str) -> dict[Any, Any]:
    """Return the file's one mapping.

    Raises:
        ConfigError: it cannot be read, is not YAML, or is no mapping.
    """
    try:
        with open(path, "rb") as file:
            text = file.read().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: byte {error.start} is not UTF-8, save the file as UTF-8"]) from None
    value = _parse(path, text)
    if value is None:
        raise ConfigError([f"{path}: the file is empty, write at least a pipeline with its steps"])
    if not isinstance(value, dict):
        raise ConfigError([f"{path}: the file is not a mapping, write sections such as 'pipeline:' at its top"])
    return value


def _parse(path: str, text: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise ConfigError([f"{path}: {where}{_plain(error)}"]) from None
    except yaml.YAMLError as error:
        raise ConfigError([f"{path}: is not YAML: {str(error).splitlines()[0]}"]) from None
    except RecursionError:
        raise ConfigError([f"{path}: is nested too deeply, write it flatter"]) from None
    except ValueError:  # of int(), which takes 4300 digits
        raise ConfigError([f"{path}: holds a number with too many digits, put it in quotes if it is a text"]) from None


def _plain(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or error.context or "cannot be read"
    if "\\t" in problem:
        return "a tab cannot indent YAML, write spaces"
    if "stands twice" in problem:
        return problem
    if "constructor for the tag" in problem:
        return "tags such as !name have no meaning here, take it out"
    return f"is not YAML: {problem}"
