"""The documents are true: links lead somewhere, files load, commands run, and pages that follow from code are new."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from coordinator import cli, demo, registry
from coordinator.config import Config, load
from coordinator.context import RequestContext
from coordinator.registry import STEP_TYPES, StepType, build
from envelope.errors import BadRequest
from envelope.formats import Format
from scripts import docs

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
MAKEFILE = (ROOT / "Makefile").read_text()

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@dataclass(frozen=True)
class Block:
    page: Path
    language: str
    text: str

    def __str__(self) -> str:
        return f"{name_of(self.page)}: {self.text.splitlines()[0][:60]}"


BLOCKS = [Block(page, *found) for page in PAGES for found in _BLOCK.findall(page.read_text())]


def blocks(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def anchors(page: Path) -> set[str]:
    """Return the anchors that a git host makes of a page's headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in _HEADING.findall(text))
    return {heading.strip().replace(" ", "-") for heading in kept}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in ("".join(found) for found in _LINK.findall(page.read_text())):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)}: {link}"
        assert not anchor or anchor in anchors(target), f"{name_of(page)}: {link}"


def test_the_index_has_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"({page.name})" not in index] == ["README.md"]


def test_the_page_of_every_key_is_current() -> None:
    assert docs.CONFIGURATION.read_text() == docs.configuration(), "make docs"


def test_the_page_of_every_key_has_every_key() -> None:
    """The generator is held against the models, and not against itself alone."""
    page = docs.CONFIGURATION.read_text()
    for kind in STEP_TYPES.values():
        assert [key for key in kind.params.model_fields if f"| `{key}` |" not in page] == []
    tables = page.split("\n## ")
    (server,) = (table for table in tables if table.startswith("`server`"))
    fields = Config.model_fields["server"].annotation.model_fields  # type: ignore[union-attr]
    assert re.findall(r"^\| `(\w+)` \|", server, re.MULTILINE) == list(fields)


def test_the_diagram_of_imports_is_current() -> None:
    page = docs.ARCHITECTURE.read_text()
    assert docs.architecture(page) == page, "make docs"


def test_no_group_of_modules_imports_what_imports_it() -> None:
    """Where this fails, an import is a step back up, or a new module should be named in GROUPS of scripts/docs.py."""
    arrows = docs.Tree().arrows()
    assert [pair for pair in arrows if docs.reaches(pair[1], pair[0], arrows)] == []


# --- what a reader copies ------------------------------------------------------------------------------------------


def named_files() -> dict[tuple[str, str], str]:
    """Return the files that a page shows under their name, in a first line such as ``# pd.yaml``."""
    found = {}
    for block in blocks("yaml"):
        if match := re.match(r"# ([\w.-]+\.yaml)\n", block.text):
            found[name_of(block.page), match[1]] = block.text
    return found


CONFIGURATIONS = {key: text for key, text in named_files().items() if key[1] != "kustomization.yaml"}


@pytest.mark.parametrize("block", blocks("yaml", "json"), ids=str)
def test_what_looks_like_yaml_is_yaml(block: Block) -> None:
    yaml.safe_load(block.text)


@dataclass(frozen=True)
class Command:
    page: Path
    line: str
    output: str

    def __str__(self) -> str:
        return f"{name_of(self.page)}: {self.line}"


def commands() -> Iterator[Command]:
    """Yield what stands behind a ``$`` with its output, each command of a block of sh, and ``make`` in a sentence."""
    for page in PAGES:
        for line in re.findall(r"`(make [^`]+)`", page.read_text()):
            yield Command(page, line, "")
    for block in blocks("console"):
        for chunk in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            line, _, output = chunk.partition("\n")
            yield Command(block.page, line.partition("  #")[0].strip(), output)
    for block in blocks("sh"):
        for line in block.text.replace("\\\n", " ").splitlines():
            yield Command(block.page, " ".join(line.partition("  #")[0].split()), "")


COMMANDS = list(commands())


def about(*begins: str) -> list[Command]:
    return [command for command in COMMANDS if command.line.startswith(begins)]


def test_commands_are_found() -> None:
    """A change of the pages' form must not leave these tests with nothing to do."""
    assert len(about("make ")) >= 15
    assert len(about("coordinator ")) >= 5
    assert len(about("kubectl ")) >= 2


@pytest.mark.parametrize("command", about("make "), ids=str)
def test_what_make_is_asked_for_is_there(command: Command) -> None:
    targets = [word for word in shlex.split(command.line)[1:] if "=" not in word]
    for target in targets:
        assert re.search(rf"^{target}:.*## ", MAKEFILE, re.MULTILINE), command.line
    for option in re.findall(r"ARGS='([^']*)'", command.line) if targets == ["demo"] else ():
        cli._parser().parse_args(["demo", *shlex.split(option)])


@pytest.mark.parametrize("command", about("coordinator check", "coordinator explain"), ids=str)
def test_check_and_explain_print_what_the_page_says(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = name_of(command.page)
    for (owner, file), text in CONFIGURATIONS.items():
        if owner in (page, "README.md"):
            (tmp_path / file).write_text(text)
    (tmp_path / "coordinator.yaml").write_text((ROOT / "pipeline_configs" / "llm-d.yaml").read_text())
    (tmp_path / "body.json").write_text('{"model": "m", "messages": [{"role": "user", "content": "Hello"}]}')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(shlex.split(command.line)[1:])
    said = capsys.readouterr()
    assert ended.value.code == 0, said.err
    shown, _, _ = command.output.partition("\n...")
    assert said.out.startswith(shown.rstrip("\n"))


@pytest.mark.parametrize("command", about("coordinator "), ids=str)
def test_the_command_line_takes_what_the_pages_write(command: Command) -> None:
    with contextlib.redirect_stderr(io.StringIO()) as complaint:
        try:
            cli._parser().parse_args(shlex.split(command.line)[1:])
        except SystemExit as ended:
            assert ended.code == 0, complaint.getvalue()


@pytest.mark.parametrize(("page", "file"), CONFIGURATIONS, ids=str)
def test_a_configuration_on_a_page_loads_and_builds(page: str, file: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text(CONFIGURATIONS[page, file])
    config = load(str(tmp_path / file), {})
    assert build(config, cli.NoEvents())


@pytest.mark.parametrize("command", about("kubectl ", "docker build"), ids=str)
def test_paths_of_manifests_are_there(command: Command) -> None:
    paths = [word for word in shlex.split(command.line) if word.startswith("deploy/")]
    assert paths
    for path in paths:
        assert (ROOT / path).exists(), path


def test_the_overlay_that_is_shown_can_be_built(tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is needed")
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "kustomization.yaml").write_text(named_files()["docs/deploy.md", "kustomization.yaml"])
    command = ["kubectl", "kustomize", str(tmp_path / "mine")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    made = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(ended.stdout)}
    assert made["StatefulSet", "decode"]["spec"]["replicas"] == 4
    (container,) = made["Deployment", "coordinator"]["spec"]["template"]["spec"]["containers"]
    assert container["image"].startswith("registry.example.com/pd-coordinator:")
    assert {each["metadata"]["namespace"] for each in made.values()} == {"inference"}


def test_the_readme_shows_what_the_demo_prints() -> None:
    """Ports aside."""
    (shown,) = (command.output for command in about("make demo") if command.page.name == "README.md" and command.output)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        roles = {"render": ["R"], "encode": ["E"], "prefill": ["P", "P"], "decode": ["D", "D"]}
        demo._greet("127.0.0.1:8080", roles)
    assert _without_urls(shown) == _without_urls(printed.getvalue())


def _without_urls(text: str) -> str:
    return re.sub(r"(?<=  )(http://127\.0\.0\.1:\d+|[REPD])\b", "URL", text).strip()


# --- the step of docs/extending.md ---------------------------------------------------------------------------------


@cache
def shown_step() -> Any:
    """Return the module that the page shows, as if it stood where its first line says."""
    (source,) = (block.text for block in blocks("python") if block.text.startswith("# steps/limit_messages.py"))
    spec = importlib.util.spec_from_loader("steps.limit_messages", loader=None)
    assert spec
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    exec(compile(source, "docs/extending.md", "exec"), module.__dict__)
    return module


def test_the_step_that_is_shown_works(monkeypatch: pytest.MonkeyPatch) -> None:
    module = shown_step()
    (line,) = (block.text for block in blocks("python") if block.text.startswith('"limit-messages"'))
    entry = eval("{" + line + "}", {"StepType": StepType, "limit_messages": module})
    monkeypatch.setattr(registry, "STEP_TYPES", {**STEP_TYPES, **entry})
    (step,) = (yaml.safe_load(block.text) for block in blocks("yaml") if "limit-messages" in block.text)
    tree = {
        "pools": {"decode": {"endpoints": ["http://d:1"]}},
        "pipeline": {"steps": [*step, {"type": "decode"}]},
    }
    limit, _ = registry.build(Config.model_validate(tree), cli.NoEvents())
    limit.admit(context(20))
    with pytest.raises(BadRequest, match="at most 20 messages, not 21"):
        limit.admit(context(21))
    assert limit.plan(Format.CHAT).notes == ("at most 20 messages",)


def context(messages: int) -> RequestContext:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}] * messages}
    return RequestContext("req", "req-1", Format.CHAT, body, headers=(), routing={}, stream=False)
