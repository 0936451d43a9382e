"""Environment variables that override keys of the file: ``COORDINATOR_<SECTION>_<KEY>``.

A value is read as a text in quotes would be, and every type of the configuration can be read from a text; a
list is one with commas. An empty variable counts as unset. The steps are only in the file.

Source: llm-d ``config.Load`` (viper: ``SetEnvPrefix``, ``AutomaticEnv``).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from coordinator.settings.problems import Sources, leaves, nearest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pydantic import BaseModel

PREFIX = "COORDINATOR_"

# How alike two names are, without the prefix, before one counts as a slip of the other.
_CLOSE = 0.75

# Kubernetes sets these in every pod, for a Service that happens to be called "coordinator" or begins so.
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")
_SERVICE_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://")


def overrides(
    model: type[BaseModel], file: str, environ: Mapping[str, str]
) -> tuple[dict[tuple[str, ...], str], Sources, list[str]]:
    """Return the values that variables give, by path; where each came from; and what is wrong with names."""
    known = {variable(path): path for path in settable(model)}
    values: dict[tuple[str, ...], str] = {}
    origins: dict[tuple[str | int, ...], str] = {}
    problems: list[str] = []
    for name, value in sorted(environ.items()):
        if not name.startswith(PREFIX) or not value or _is_service_link(name, value):
            continue
        path = known.get(name)
        if path is not None:
            values[path] = value
            origins[path] = name
        elif (sentence := _refusal(model, name, known)) is not None:
            problems.append(f"environment variable {name}: {sentence}")
    return values, Sources(file, origins), problems


def settable(model: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    """Yield the path of each key that a variable can set."""
    return (path for path, _ in leaves(model))


def variable(path: tuple[str, ...]) -> str:
    """Return the variable that overrides a key."""
    return PREFIX + "_".join(path).upper()


def put(tree: dict[Any, Any], path: tuple[str, ...], value: object) -> None:
    """Set a value in nested mappings; where the file has no mapping, leave that to be refused."""
    for part in path[:-1]:
        below = tree.get(part)
        if below is not None and not isinstance(below, dict):
            return
        tree[part] = tree = dict(below or {})  # a copy: an alias in the file may share it with another key
    tree[path[-1]] = value


def _is_service_link(name: str, value: str) -> bool:
    return _SERVICE_LINK.search(name) is not None or _SERVICE_LINK_VALUE.match(value) is not None


def _refusal(model: type[BaseModel], name: str, known: Iterable[str]) -> str | None:
    """Say what is wrong with an unknown variable; None where it is probably not meant for us."""
    if name.startswith(variable(("pipeline", "steps"))):
        return "steps can only be written in the file, unset it"
    if meant := nearest(name.removeprefix(PREFIX), [key.removeprefix(PREFIX) for key in known], cutoff=_CLOSE):
        return f"no such key in the configuration, did you mean {PREFIX}{meant}?"
    in_section = any(name.startswith(variable((key, ""))) for key in model.model_fields)
    return "no such key in the configuration, unset it" if in_section else None
