"""Who may import whom: the layers of the tree as data, and the tree held against them.

The table keeps ``envelope`` free of sockets and a step free of the HTTP client, so that both can be tested as
functions. A module that no row names fails as well: a new module says first where it belongs.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("coordinator", "steps", "envelope")


def family(*packages: str) -> tuple[str, ...]:
    """Return the patterns of packages and of all that is inside them."""
    return tuple(pattern for package in packages for pattern in (package, f"{package}.*"))


@dataclass(frozen=True)
class Row:
    """What some modules may import, beside the standard library.

    Attributes:
        modules: patterns of dotted names; the first row that matches a module is its row.
        may: our modules as patterns, other people's packages by their top-level name.
        types: more, but only under ``if TYPE_CHECKING``: a name in an annotation binds nothing at run time.
        in_functions: more, but only inside a function, so that importing the module does not need it.
        never: parts of the standard library that these modules do without.
        rule: the sentence that a failure ends with.
    """

    modules: tuple[str, ...]
    rule: str
    may: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    in_functions: tuple[str, ...] = ()
    never: tuple[str, ...] = ()


ENVELOPE = family("envelope")
CONTRACT = ("coordinator.step", "coordinator.context")
PLAIN = (
    *("admission", "background", "headers", "pipeline", "metrics", "logs", "shapes"),
    *("security.addresses", "workers.verdict"),
)
PLAIN_TOLD = tuple(f"coordinator.telemetry.{name}" for name in ("pace", "redact"))
CORE = (*CONTRACT, *(f"coordinator.{name}" for name in PLAIN), *PLAIN_TOLD)
AT_WORKERS = ("bootstrap", "call", "capability", "health", "inflated", "release", "retry", "wire")
WIRED = (
    *("fetch", "inflate", "upstream", "relay", "server", "intake"),
    *("respond", "questions", "passage", "outcome", "plan"),
    *(f"workers.{name}" for name in AT_WORKERS),
)
TOLD = ("attempt", "model_names", "recent", "server_timing", "tracing")
LOOKUPS = {"coordinator.routing.dns": "dns", "coordinator.routing.kubernetes": "kubernetes_asyncio"}
IO = (
    *family("coordinator.routing"),
    *(f"coordinator.{name}" for name in WIRED),
    *(f"coordinator.telemetry.{name}" for name in TOLD),
    *family("coordinator.http"),
)
SECTIONS = ("pools", "proxied", "lookup", "section", "environment", "problems", "yaml_file")
CONFIG = ("coordinator.config", *(f"coordinator.settings.{name}" for name in SECTIONS))
UNITS = "coordinator.settings.units"
OUTBOUND = "coordinator.settings.outbound"
KEYS = ("coordinator.security.keys", "coordinator.security.watch")
SECRET, TLS = "coordinator.security.secret", "coordinator.security.tls"
WIRING = (
    "coordinator.app",
    "coordinator.links",
    "coordinator.planning",
    "coordinator.cli",
    "coordinator.demo",
    "coordinator.serve",
    "coordinator.reload",
    "coordinator.telemetry.status",
    *(f"coordinator.processes.{name}" for name in ("member", "crew", "supervisor", "rollout")),
)
IN_PARSER_PROCESSES = ("coordinator.derender.vllm_parsers", "coordinator.derender.vllm_detokenizer")
DERENDERING = tuple(f"coordinator.derender.{name}" for name in ("process", "stream", "pool", "held"))
RENDERING = family("coordinator.rendering")
RENDERING_PLAIN = ("anthropic", "fields", "conversation", "tokenizer", "parsers", "sampling", "threads", "renderer")
STEPS_SHARE = ("steps.joined", "steps.params", "steps.prompt", "steps.stop_search", "steps.tied")
# With the packages that hold their own types: URL, CIMultiDict, ErrorDetails.
AIOHTTP = ("aiohttp", "httptools", "multidict", "yarl")
PYDANTIC = ("pydantic", "pydantic_core")

TABLE = (
    Row(
        ENVELOPE,
        "envelope is pure: it imports orjson and itself, no socket, clock or task; "
        "transformers and vllm only inside the function of a module made for one of them",
        may=("orjson", *ENVELOPE),
        in_functions=("transformers", "vllm"),
        never=("asyncio", "http", "logging", "selectors", "socket", "ssl", "subprocess", "threading", "time"),
    ),
    Row(("coordinator",), "coordinator/__init__.py is a docstring: the map of the package, without imports"),
    Row(
        tuple(f"coordinator.{name}" for name in ("processes", "telemetry", "settings", "security", "workers")),
        "the __init__.py of a package is a docstring: importing one module must not import them all",
    ),
    Row(
        CONTRACT,
        "coordinator.step and coordinator.context are what steps are written against: "
        "they import envelope and one another",
        may=(*ENVELOPE, *CONTRACT),
    ),
    Row(
        (UNITS,),
        "settings.units reads durations and sizes: it imports pydantic",
        may=PYDANTIC,
    ),
    Row(
        (SECRET, TLS),
        "security.secret and security.tls read keys and certificates: they import pydantic and envelope at most",
        may=(*PYDANTIC, *ENVELOPE),
    ),
    Row(
        (OUTBOUND,),
        "settings.outbound is what the configuration and a step share: it imports pydantic and security.secret",
        may=(*PYDANTIC, SECRET),
    ),
    Row(
        ("coordinator.security.credentials",),
        "security.credentials opens what the configuration names: it imports its modules, and its neighbours",
        may=(*CONFIG, *KEYS, SECRET, TLS, OUTBOUND, "coordinator.logs"),
    ),
    Row(
        KEYS,
        "security.keys and security.watch import security.secret, coordinator.logs and envelope",
        may=(SECRET, "coordinator.logs", *ENVELOPE),
        types=AIOHTTP,
    ),
    Row(
        ("coordinator.metrics", "coordinator.tallies", "coordinator.processes.totals"),
        "metrics, tallies and totals import prometheus_client, envelope and the core; no other of the core does",
        may=("prometheus_client", "coordinator.tallies", *ENVELOPE, *CORE),
    ),
    Row(
        CORE,
        f"the core (context, step, {', '.join(PLAIN)}, telemetry's pace and redact) imports envelope and one another; "
        "only metrics imports prometheus_client, and aiohttp stays in the modules that do I/O",
        may=(*ENVELOPE, *CORE),
        types=("coordinator.routing.router",),
    ),
    Row(
        ("coordinator.rendering.template",),
        "coordinator.rendering.template reads chat templates: it imports jinja2, and is imported inside a function",
        may=("jinja2",),
    ),
    Row(
        RENDERING,
        "coordinator.rendering does what a render service does: it imports pydantic, envelope and itself, and "
        "transformers and jinja2 only inside a function",
        may=(*PYDANTIC, *(f"coordinator.rendering.{name}" for name in RENDERING_PLAIN), *ENVELOPE),
        types=("coordinator.rendering.template",),
        in_functions=("transformers", "jinja2", "coordinator.rendering", "coordinator.rendering.template"),
    ),
    Row(("steps",), "steps/__init__.py is a docstring: importing one step must not import them all"),
    Row(
        STEPS_SHARE,
        "what steps share (joined, params, prompt, stop_search, tied) imports pydantic, envelope, settings.units "
        "and the contract (coordinator.step, coordinator.context); never a step",
        may=(*PYDANTIC, UNITS, *ENVELOPE, *CONTRACT),
    ),
    Row(
        ("steps.prefill_decode",),
        "prefill-decode is a prefill and a decode at once: it imports those steps beside what any step may",
        may=(*STEPS_SHARE, "steps.prefill", "steps.decode", *ENVELOPE, *CONTRACT),
    ),
    Row(
        ("steps.*",),
        "a step imports envelope, pydantic, what steps share (joined, params, prompt, stop_search, tied), "
        "settings.units, settings.outbound, coordinator.rendering and the contract (coordinator.step, "
        "coordinator.context); never aiohttp, never another step",
        may=(*PYDANTIC, *STEPS_SHARE, UNITS, OUTBOUND, *RENDERING, *ENVELOPE, *CONTRACT),
    ),
    *(
        Row(
            (module,),
            f"{module} is loaded only where its extra is used: it imports {package}, and what its neighbours may",
            may=(package, *AIOHTTP, UNITS, *ENVELOPE, *CORE, *IO),
            types=("coordinator.settings.lookup",),
        )
        for module, package in LOOKUPS.items()
    ),
    Row(
        IO,
        f"the modules that do I/O (routing, {', '.join(WIRED)}, telemetry's {', '.join(TOLD)}) import aiohttp, "
        "envelope, the core, settings.units and one another",
        may=(*AIOHTTP, UNITS, *ENVELOPE, *CORE, *IO),
        types=(*CONFIG, *KEYS, "coordinator.derender.held"),
    ),
    Row(
        ("coordinator.derender", "coordinator.derender.process_main"),
        "the loop of a parser process imports orjson: it is all that such a process has of ours, but for its parsers",
        may=("orjson",),
    ),
    Row(
        IN_PARSER_PROCESSES,
        "vllm_parsers and vllm_detokenizer import vllm inside functions, and one another: only a parser process calls "
        "them",
        may=IN_PARSER_PROCESSES,
        in_functions=("vllm",),
    ),
    Row(
        DERENDERING,
        "parser processes as the coordinator has them (process, stream, pool, held) import envelope, the core, "
        "coordinator.settings.problems and one another; never vllm",
        may=(*ENVELOPE, *CORE, *DERENDERING),
        types=("coordinator.settings.problems",),
    ),
    Row(
        ("coordinator.telemetry.otel",),
        "coordinator.telemetry.otel is loaded only where spans are exported: it imports opentelemetry, envelope, "
        "tracing and the core",
        may=("opentelemetry", "coordinator.version", "coordinator.telemetry.tracing", *ENVELOPE, *CORE),
        types=("coordinator.outcome", *AIOHTTP),
    ),
    Row(("coordinator.version",), "coordinator.version imports nothing"),
    Row(("coordinator.huge_pages",), "coordinator.huge_pages imports nothing"),
    Row(
        CONFIG,
        f"the modules of the configuration ({', '.join(SECTIONS)}) import "
        "pydantic, envelope, headers, units, outbound, security's secret and tls, and one another; only yaml_file "
        "imports yaml",
        may=(
            *PYDANTIC,
            "yaml",
            *(UNITS, OUTBOUND, SECRET, TLS, "coordinator.headers"),
            *CONFIG,
            *ENVELOPE,
        ),
    ),
    Row(
        ("coordinator.registry",),
        "coordinator.registry imports pydantic, steps, the configuration's modules, settings.units, settings.rules, "
        "envelope and the contract (coordinator.step, coordinator.context)",
        may=(*PYDANTIC, *family("steps"), *CONFIG, "coordinator.settings.rules", UNITS, *CONTRACT, *ENVELOPE),
    ),
    Row(
        ("coordinator.processes.channel", "coordinator.processes.ports", "coordinator.processes.shares"),
        "channel, ports and shares, which several processes need, import the configuration's modules and units",
        may=(*CONFIG, UNITS),
    ),
    Row(
        ("coordinator.settings.rules",),
        "settings.rules imports the configuration's modules, settings.units and envelope",
        may=(*CONFIG, UNITS, *ENVELOPE),
        types=("coordinator.step",),
    ),
    Row(
        family("coordinator.sim"),
        "the simulated workers share no code with what they test: they import orjson, aiohttp, tokenizers, "
        "jinja2 and one another",
        may=("orjson", "tokenizers", "jinja2", *AIOHTTP, *family("coordinator.sim")),
    ),
    Row(
        ("coordinator.explain",),
        "coordinator.explain sends nothing: it imports the core and envelope, no module that does I/O",
        may=(*ENVELOPE, *CORE),
        types=("coordinator.upstream", "coordinator.routing.router"),
    ),
    Row(WIRING, f"what wires ({', '.join(name.partition('.')[2] for name in WIRING)}) may import all", may=("*",)),
    Row(("coordinator.__main__",), "coordinator.__main__ imports coordinator.cli", may=("coordinator.cli",)),
)

# The other direction: what only these modules of ours import, whatever their row says.
IMPORTED_ONLY_BY = {
    "coordinator.app": WIRING,
    "coordinator.links": WIRING,
    "coordinator.planning": WIRING,
    "coordinator.demo": WIRING,
    "coordinator.serve": WIRING,
    "coordinator.reload": WIRING,
    "coordinator.processes.member": WIRING,
    "coordinator.processes.crew": WIRING,
    "coordinator.telemetry.status": WIRING,
    "coordinator.processes.supervisor": WIRING,
    "coordinator.processes.rollout": WIRING,
    "coordinator.cli": ("coordinator.__main__",),
    "steps": ("coordinator.registry", "steps.*", *WIRING),
    "steps.*": ("coordinator.registry", "steps.*", *WIRING),
    "yaml": ("coordinator.settings.yaml_file", *WIRING),
    "prometheus_client": ("coordinator.metrics", "coordinator.tallies", "coordinator.processes.totals", *WIRING),
    "coordinator.telemetry.otel": WIRING,
    **dict.fromkeys(LOOKUPS, WIRING),
}


def our_modules() -> dict[str, Path]:
    """Return the dotted name of each module of the tree and its file."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = our_modules()


@dataclass(frozen=True)
class Import:
    """One import statement's target: a module of ours in full, or another's top-level package."""

    target: str
    line: int
    for_types: bool
    in_function: bool


def top(name: str) -> str:
    return name.partition(".")[0]


def is_ours(name: str) -> bool:
    return top(name) in PACKAGES


def is_type_checking(test: ast.expr) -> bool:
    return "TYPE_CHECKING" in (getattr(test, "id", None), getattr(test, "attr", None))


def imports(module: str, source: str, *, is_package: bool = False) -> Iterator[Import]:
    """Yield what a module imports, at its top, inside functions and for types."""

    def walk(node: ast.AST, for_types: bool, in_function: bool) -> Iterator[Import]:
        for name in targets(node):
            yield Import(name, node.lineno, for_types, in_function)  # type: ignore[attr-defined]
        if isinstance(node, ast.If) and is_type_checking(node.test):
            for child in node.body:
                yield from walk(child, True, in_function)
            for child in node.orelse:
                yield from walk(child, for_types, in_function)
            return
        inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, for_types, inside)

    def targets(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (name if is_ours(name) else top(name) for name in (alias.name for alias in node.names))
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parent = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parent, base] if base else parent)
            if not is_ours(base):
                yield top(base)
                return
            # `from package import name`: a module of that package, or a name that the package itself defines.
            members = (f"{base}.{alias.name}" for alias in node.names)
            yield from dict.fromkeys(member if member in MODULES else base for member in members)

    yield from walk(ast.parse(source), False, False)


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def row_of(module: str) -> Row | None:
    return next((row for row in TABLE if matches(module, row.modules)), None)


def broken_rules(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """Return a sentence for each import that the tables do not allow."""
    row = row_of(module)
    if row is None:
        return [f"{module} has no row in the table of tests/test_imports.py: say there what it may import"]
    sentences = []
    for found in imports(module, source, is_package=is_package):
        where = f"{module}, line {found.line}, imports {found.target}"
        if found.target in sys.stdlib_module_names:
            if found.target in row.never and not found.for_types:
                sentences.append(f"{where}: {row.rule}")
            continue
        allowed = row.may
        allowed += row.types if found.for_types else ()
        allowed += row.in_functions if found.in_function else ()
        if not matches(found.target, allowed):
            sentences.append(f"{where}: {row.rule}")
        for target, importers in IMPORTED_ONLY_BY.items():
            if matches(found.target, (target,)) and not matches(module, importers):
                sentences.append(f"{where}: only {', '.join(importers)} may import {target}")
    return list(dict.fromkeys(sentences))


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_its_layer_may(module: str) -> None:
    path = MODULES[module]
    broken = broken_rules(module, path.read_text(), is_package=path.name == "__init__.py")
    assert not broken, "\n".join(broken)


# Runs in a new interpreter, which forks for each module and so imports it where nothing of ours is there yet. To
# import the same packages of others for each would take most of the time, so they come in stages: what a stage's
# modules may load all the same is there already, and what they may not load would be new.
FRESH = """
import importlib, json, os, sys
def report(module):
    sys.stdout.flush()
    before = set(sys.modules)
    pid = os.fork()
    if pid == 0:
        try:
            importlib.import_module(module)
            error = None
        except BaseException as exc:
            error = f"{type(exc).__name__}: {exc}"
        new = sorted({name.partition(".")[0] for name in sys.modules.keys() - before})
        print(json.dumps([module, error, new]), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
for packages, modules in json.load(sys.stdin):
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError:
            pass
    for module in modules:
        report(module)
"""

STAGES: tuple[tuple[str, ...], ...] = (
    (),
    ("orjson", "pydantic"),
    ("aiohttp", "aiohttp.web", "jinja2", "multidict", "prometheus_client", "tokenizers", "yaml", "yarl"),
)


WATCHED = frozenset(
    name for row in TABLE for name in (*row.may, *row.in_functions) if not is_ours(name) and name != "*"
)


@cache
def loadable() -> dict[str, frozenset[str]]:
    """Return which packages of others importing a module of ours may load, however far down."""
    rows = {module: row for module in MODULES if (row := row_of(module))}
    known = {module: WATCHED & (WATCHED if "*" in row.may else {*row.may}) for module, row in rows.items()}
    while True:
        wider = {
            module: known[module].union(*(known[below] for below in known if matches(below, row.may)))
            for module, row in rows.items()
        }
        if wider == known:
            return known
        known = wider


# __main__ runs the command line.
IMPORTABLE = tuple(module for module in MODULES if not module.endswith("__main__"))


def stages() -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Yield the packages to import and the modules that come then, each in the first stage that has all of its own.

    The last stage takes what is left.
    """
    there: frozenset[str] = frozenset({"pydantic_core"})
    left = list(IMPORTABLE)
    for packages in STAGES:
        there |= frozenset(packages)
        now = [m for m in left if packages == STAGES[-1] or loadable().get(m, WATCHED) <= there]
        left = [module for module in left if module not in now]
        yield packages, now


@pytest.fixture(scope="module")
def fresh() -> dict[str, tuple[str | None, list[str]]]:
    """Return, for each module, why it does not import alone, and which packages of others it loads."""
    command = [sys.executable, "-c", FRESH]
    question = json.dumps(list(stages()))
    run = subprocess.run(command, input=question, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True)
    return {module: (error, loaded) for module, error, loaded in map(json.loads, run.stdout.splitlines())}


@pytest.mark.parametrize("module", IMPORTABLE)
def test_a_module_imports_alone_and_loads_only_what_its_layer_may(
    module: str, fresh: dict[str, tuple[str | None, list[str]]]
) -> None:
    """A cycle hides behind the order of other imports, a heavy package behind a module that loads it."""
    assert module in fresh, f"the interpreter died while it imported {module}"
    error, loaded = fresh[module]
    assert error is None, f"{module} does not import alone in a new interpreter: {error}"
    row = row_of(module)
    assert row is not None, f"{module} has no row in the table of tests/test_imports.py"
    extra = sorted(WATCHED & set(loaded) - loadable()[module])
    assert not extra, f"importing {module} loads {', '.join(extra)}: {row.rule}"


@pytest.mark.parametrize(
    ("module", "source", "sentence"),
    [
        ("envelope.new", "import aiohttp", "envelope.new, line 1, imports aiohttp: envelope is pure"),
        ("envelope.new", "import time", "imports time: envelope is pure"),
        ("envelope.new", "import vllm", "imports vllm: envelope is pure"),
        ("envelope.new", "from coordinator import step", "imports coordinator.step: envelope is pure"),
        ("envelope.new", "from ..coordinator.step import Leg", "imports coordinator.step: envelope is pure"),
        ("steps.new", "from aiohttp import web", "imports aiohttp: a step imports"),
        ("steps.new", "if TYPE_CHECKING:\n    import aiohttp", "line 2, imports aiohttp: a step imports"),
        ("steps.new", "def run():\n    import aiohttp", "line 2, imports aiohttp: a step imports"),
        ("steps.new", "from . import other", "imports steps: a step imports"),
        ("steps.new", "import coordinator.app", "never another step"),
        ("coordinator.pipeline", "import prometheus_client", "only metrics imports prometheus_client"),
        ("coordinator.pipeline", "import steps", "only coordinator.registry, steps.*, coordinator.app"),
        ("coordinator.headers", "import pydantic", "the core (context"),
        ("coordinator.upstream", "from coordinator.config import Config", "the modules that do I/O"),
        ("coordinator.sim.new", "import envelope.errors", "share no code with what they test"),
        ("coordinator.utils", "", "coordinator.utils has no row in the table"),
    ],
)
def test_a_broken_rule_is_named_in_a_sentence(module: str, source: str, sentence: str) -> None:
    broken = broken_rules(module, source)
    assert sentence in "\n".join(broken)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("envelope.new", "import json\nimport orjson\nfrom envelope.errors import BadRequest"),
        ("envelope.new", "def tokens():\n    import vllm"),
        ("steps.new", "from coordinator.step import Leg\nfrom envelope import errors\nimport pydantic"),
        ("coordinator.upstream", "if typing.TYPE_CHECKING:\n    from coordinator.config import Config"),
        ("coordinator.sim.new", "import aiohttp, orjson, jinja2\nfrom coordinator.sim import model"),
        ("coordinator.cli", "import yaml\nfrom coordinator.app import build"),
    ],
)
def test_what_a_layer_may_import_passes(module: str, source: str) -> None:
    assert broken_rules(module, source) == []


def test_each_row_is_about_a_module_that_is_there() -> None:
    """A row that outlived its module would let a later module of that name in unseen."""
    dead = [name for row in TABLE for name in row.modules if not any(fnmatchcase(m, name) for m in MODULES)]
    assert not dead, f"no module is called {', '.join(dead)}: take them out of the table of tests/test_imports.py"


def test_the_packages_are_listed_by_name_in_pyproject() -> None:
    """Automatic discovery would ship tests/ and bench/ as top-level packages too."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        found = tomllib.load(file)["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert sorted(found) == sorted(PACKAGES)
