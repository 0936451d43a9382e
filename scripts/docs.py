"""Write the pages of docs/ that follow from the code: every key of the configuration, and who imports whom.

``docs/configuration.md`` comes from the JSON Schema that ``coordinator schema`` prints; ``docs/architecture.md`` keeps
its prose and gets its diagram, from the imports that run (those under ``if TYPE_CHECKING`` bind nothing).
"""

from __future__ import annotations

import ast
import json
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.registry import STEP_TYPES, json_schema

if TYPE_CHECKING:
    from collections.abc import Iterator

REPO = Path(__file__).resolve().parents[1]
CONFIGURATION = REPO / "docs" / "configuration.md"
ARCHITECTURE = REPO / "docs" / "architecture.md"

_BEGIN, _END = "<!-- the diagram: make docs -->", "<!-- the end of the diagram -->"


def _ours(*names: str) -> tuple[str, ...]:
    return tuple(f"coordinator.{name}" for name in names)


# A group of modules is a box of the diagram, from top to bottom; the first pattern that fits decides. A module that
# none fits is as high up as what it imports, and in the core where it imports nothing above that.
GROUPS: dict[str, tuple[str, ...]] = {
    "wiring": _ours(
        *("__main__", "app", "links", "planning", "cli", "demo", "serve", "reload", "registry", "explain"),
        *("settings.rules", "security.credentials"),
    ),
    "front": _ours(
        *("server", "http*", "intake", "questions", "respond", "relay", "plan", "outcome"),
        "telemetry.server_timing",
    ),
    "upstream": _ours(
        *("upstream", "telemetry.attempt", "fetch"),
        *(f"workers.{name}" for name in ("call", "wire", "retry", "health", "release")),
    ),
    "routing": _ours("routing*"),
    "config": _ours(
        "config",
        *(f"settings.{name}" for name in ("pools", "lookup", "section", "yaml_file", "environment", "problems")),
    ),
    "core": (),
    "steps": ("steps*",),
    "rendering": _ours("rendering*"),
    "parsing": _ours("derender*"),
    "contract": _ours("context", "step"),
    "envelope": ("envelope*",),
    "simulator": _ours("sim*"),
}
_OF_UNLISTED = ("wiring", "front", "upstream", "routing", "config", "core")
SAYS = {
    "wiring": "wiring: app, cli, registry, rules",
    "front": "front: http, server, respond, relay",
    "upstream": "upstream: legs, health, release",
    "routing": "routing: which worker",
    "config": "config: one file as models",
    "rendering": "rendering: tokens from text, here",
    "parsing": "parsing: reasoning and calls from text, here",
    "core": "core: pipeline, admission, metrics, logs, units",
    "steps": "steps: one leg each",
    "contract": "contract: context, step",
    "envelope": "envelope: wire shapes, pure",
    "simulator": "simulator: the workers of demo and tests",
}


def configuration() -> str:
    """Return the page with every key."""
    schema = json_schema()
    defs = schema["$defs"]
    lines = [
        "# Configuration",
        "",
        "Every key of the file, written by `make docs` from the models that read it.",
        "[`pipeline_configs/reference.yaml`](../pipeline_configs/reference.yaml) has the same as a file to copy from, "
        "and [`pipeline_configs/`](../pipeline_configs/) one file for each shape of deployment.",
        "",
        "Durations are written as `500ms`, `30s` or `1h30m`, sizes in megabytes.",
        "Every key outside the steps can also be set by the environment: `COORDINATOR_SERVER_LISTEN_ADDR` is "
        "`server.listen_addr`.",
        "`coordinator check --config FILE` says what is wrong with a file, and `coordinator schema` prints the JSON "
        "Schema for editors.",
    ]
    for title, name in sections(defs):
        lines += ["", f"## {title}", "", "| key | values | default | |", "| :-- | :-- | :-- | :-- |"]
        for key, value in sorted(defs[name]["properties"].items(), key=lambda item: bool(subsection(item[1], defs))):
            lines.append(row(key, value, key in defs[name].get("required", ()), defs))
    return "\n".join(lines) + "\n"


def sections(defs: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the title and the definition of each section, in the order of the file."""
    yield "The file", "Config"
    for key, value in defs["Config"]["properties"].items():
        if name := subsection(value, defs):
            if name != "Pools":
                yield f"`{key}`", name
                continue
            yield "`pools`", name
            yield "`pools.ROLE`", "Pool"
            for inner, deeper in defs["Pool"]["properties"].items():
                if found := subsection(deeper, defs):
                    yield f"`pools.ROLE.{inner}`", found
    for step in STEP_TYPES:
        yield f"Step `{step}`", f"steps__{step.replace('-', '_')}__Params"


def subsection(value: dict[str, Any], defs: dict[str, Any]) -> str | None:
    """Return the name of the section that a key holds, if it holds one."""
    refs = [each["$ref"] for each in (value, *value.get("anyOf", ())) if "$ref" in each]
    names = [ref.rpartition("/")[2] for ref in refs]
    return next((name for name in names if "properties" in defs[name]), None)


def row(key: str, value: dict[str, Any], required: bool, defs: dict[str, Any]) -> str:
    default = value.get("default")
    shown = "required" if required else "" if default is None else f"`{_written(default)}`"
    told = value.get("description", "").replace("|", "\\|")
    values = ", ".join(dict.fromkeys(_values(value, defs)))
    return f"| `{key}` | {values} | {shown} | {told} |"


def _values(value: dict[str, Any], defs: dict[str, Any]) -> Iterator[str]:
    """Yield the kinds of value that a key may have, in words."""
    if subsection({key: value[key] for key in ("$ref",) if key in value}, defs):
        yield "a section"
    elif "anyOf" in value:
        for each in value["anyOf"]:
            if each.get("type") != "null":
                yield from _values(each, defs)
    elif "const" in value:
        yield f"`{value['const']}`"
    elif "enum" in value:
        # A number that is also given as text, as environment variables have it, is shown once.
        numbers = {str(each) for each in value["enum"] if not isinstance(each, str)}
        yield from (f"`{each}`" for each in value["enum"] if not (isinstance(each, str) and each in numbers))
    elif value.get("type") == "array":
        yield f"list of {' or '.join(_values(value['items'], defs))}"
    elif "s|m|h" in value.get("pattern", ""):
        yield "duration"
    else:
        kinds = {"boolean": "`true`, `false`", "integer": "number", "number": "number", "object": "section"}
        yield kinds.get(value.get("type", ""), "text")


def _written(default: Any) -> str:
    if isinstance(default, list):
        return f"[{', '.join(map(str, default))}]"
    return default if isinstance(default, str) and default else json.dumps(default)


class Tree:
    """The modules of the tree, what each imports when it runs, and the group that each is in."""

    def __init__(self) -> None:
        paths = {
            ".".join(path.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__"): path
            for package in ("coordinator", "steps", "envelope")
            for path in (REPO / package).rglob("*.py")
        }
        del paths["coordinator"]
        self.imports: dict[str, set[str]] = {}
        for module, path in paths.items():
            names = _imported(ast.parse(path.read_text()))
            found = {name if name in paths else name.rpartition(".")[0] for name in names}
            self.imports[module] = (found & paths.keys()) - {module}

    def group(self, module: str, seen: frozenset[str] = frozenset()) -> str:
        for name, patterns in GROUPS.items():
            if any(fnmatchcase(module, each) for each in patterns):
                return name
        below = {self.group(name, seen | {module}) for name in self.imports[module] - seen}
        return next((name for name in _OF_UNLISTED if name in below), "core")

    def arrows(self) -> set[tuple[str, str]]:
        """Return which group imports which other."""
        pairs = {(self.group(a), self.group(b)) for a, names in self.imports.items() for b in names}
        return {(a, b) for a, b in pairs if a != b}


def _imported(node: ast.AST) -> Iterator[str]:
    """Yield the dotted names that a tree imports, those under ``if TYPE_CHECKING`` left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        else:
            yield from _imported(child)


def diagram() -> str:
    """Return the imports as Mermaid; an arrow that longer ways say as well is left out."""
    arrows = Tree().arrows()
    told = {pair for pair in arrows if not reaches(*pair, arrows - {pair})}
    boxes = [f'  {name}["{says}"]' for name, says in SAYS.items()]
    return "\n".join(["```mermaid", "flowchart TD", *boxes, *(f"  {a} --> {b}" for a, b in sorted(told)), "```"])


def reaches(start: str, end: str, arrows: set[tuple[str, str]]) -> bool:
    seen, ahead = set(), [start]
    while ahead:
        here = ahead.pop()
        if here == end:
            return True
        if here not in seen:
            seen.add(here)
            ahead += [b for a, b in arrows if a == here]
    return False


def architecture(page: str) -> str:
    """Return the page with today's diagram in it."""
    before, _, rest = page.partition(_BEGIN)
    return f"{before}{_BEGIN}\n{diagram()}\n{_END}{rest.partition(_END)[2]}"


def main() -> int:
    CONFIGURATION.write_text(configuration())
    ARCHITECTURE.write_text(architecture(ARCHITECTURE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
