"""Every shipped configuration loads and builds, and the reference holds exactly the models' keys and defaults.

In reference.yaml a line of ``#`` and a key (no space between) is a key that is switched off; ``# `` begins prose.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_origin

import pytest
import yaml
from jsonschema import Draft202012Validator

from coordinator.config import Config, load
from coordinator.registry import STEP_TYPES, build, json_schema
from coordinator.settings.problems import section_in
from coordinator.settings.rules import OF_ADDRESS
from steps.render import InProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic import BaseModel

FOLDER = Path(__file__).resolve().parents[1] / "pipeline_configs"
FILES = sorted(FOLDER.glob("*.yaml"))
REFERENCE = (FOLDER / "reference.yaml").read_text()

_OFF = re.compile(r"^(\s*)#(?=[a-z-])", re.MULTILINE)
_KEY = re.compile(r"(?:- )?([a-z_]+):")


class NoEvents:
    def handover_sent(self, age_s: float) -> None: ...

    def handover_missing(self, reason: str, policy: str) -> None: ...

    def prefill_skipped(self, reason: str) -> None: ...


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_it_loads_and_builds(file: Path) -> None:
    config = load(str(file), {})
    assert [step.type for step in build(config, NoEvents())] == [step.type for step in config.pipeline.steps]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_an_editor_that_has_the_schema_finds_no_fault_with_it(file: Path) -> None:
    faults = Draft202012Validator(json_schema()).iter_errors(yaml.safe_load(file.read_text()))
    assert [fault.message for fault in faults] == []


@pytest.mark.parametrize("file", [file for file in FILES if file.name != "reference.yaml"], ids=lambda file: file.name)
def test_it_opens_with_what_it_is_for_what_the_fleet_is_and_what_workers_need(file: Path) -> None:
    assert [line.split(":")[0] for line in file.read_text().splitlines()[:3]] == ["# For", "# Fleet", "# Workers"]


def switched_on() -> dict[str, Any]:
    tree = yaml.safe_load(_OFF.sub(r"\1", REFERENCE))
    assert isinstance(tree, dict)
    return tree


def served_render(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree with a render service alone: the reference describes both ways, and a file has one."""
    for step in tree["pipeline"]["steps"]:
        if step["type"] == "render":
            step["params"] = {key: value for key, value in step["params"].items() if key not in InProcess.model_fields}
    return tree


def walk(model: type[BaseModel], given: dict[str, Any], path: str = "") -> Iterator[tuple[str, set[str], set[str]]]:
    """Yield each section of the reference, with the keys that its model has and the keys that are written."""
    yield path, set(model.model_fields), set(given)
    for name, info in model.model_fields.items():
        section = section_in(info.annotation)
        if section is not None and name in given and get_origin(info.annotation) is not tuple:
            yield from walk(section, given[name], f"{path}{name}.")


def test_the_reference_has_every_key_of_the_models_and_no_other() -> None:
    tree = switched_on()
    sections = {path: (has, written) for path, has, written in walk(Config, tree)}
    # A pool is described once, over all roles: one is named by a header, the others by their endpoints.
    roles = ("encode", "prefill", "decode", "render")
    for inside in ("", "policy_params.", "health."):
        paths = [path for role in roles if (path := f"pools.{role}.{inside}") in sections]
        pools = [sections.pop(path) for path in paths]
        sections[f"a pool's {inside}"] = (pools[0][0], set().union(*(keys for _, keys in pools)))
    sections |= {
        step["type"]: (set(STEP_TYPES[step["type"]].params.model_fields), set(step["params"]))
        for step in tree["pipeline"]["steps"]
    }
    assert {name: written for name, (_, written) in sections.items()} == {
        name: has for name, (has, _) in sections.items()
    }
    assert [step["type"] for step in tree["pipeline"]["steps"]] == list(STEP_TYPES)


def test_a_key_that_is_on_in_the_reference_has_its_default() -> None:
    config = load(str(FOLDER / "reference.yaml"), {})
    bare = Config.model_validate(
        {"gateway": {"address": config.gateway.address}, "pipeline": {"steps": [{"type": "decode"}]}}
    )
    assert config.model_dump(exclude={"pipeline": {"steps"}}) == bare.model_dump(exclude={"pipeline": {"steps"}})
    for step in config.pipeline.steps:
        params = STEP_TYPES[step.type].params
        shown = {name: info for name, info in params.model_fields.items() if name in step.params}
        needed = {name: step.params[name] for name, info in shown.items() if info.is_required() or info.default is None}
        assert params.model_validate(step.params) == params.model_validate(needed)


SERVICE, SELECTOR = (("pools", "decode", "kubernetes", name) for name in ("service", "selector"))
PORT = ("pools", "prefill", "bootstrap_port")
ADDRESS = [("pipeline", "steps", 1, "params", key) for key in OF_ADDRESS]
# What is taken out of the reference, where it has two ways of saying one thing; numbers are steps.
WITHOUT: dict[str, tuple[tuple[str | int, ...], ...]] = {
    "pools": (("pools",),),
    "gateway": (("gateway",), ("pools", "render"), SELECTOR, PORT),
    "an address of render": (("gateway",), SERVICE, PORT, *ADDRESS),
}


def taken_out(tree: dict[str, Any], paths: tuple[tuple[str | int, ...], ...]) -> dict[str, Any]:
    for *above, key in paths:
        section: Any = tree
        for part in above:
            section = section[part]
        del section[key]
    return tree


@pytest.mark.parametrize("without", WITHOUT)
def test_the_reference_works_with_everything_switched_on(without: str, tmp_path: Path) -> None:
    assert built(taken_out(served_render(switched_on()), WITHOUT[without]), ("prefill-decode",), tmp_path)


def test_the_reference_works_with_both_legs_at_once(tmp_path: Path) -> None:
    tree = taken_out(served_render(switched_on()), (("gateway",), ("pools", "render"), SELECTOR))
    assert built(tree, ("prefill", "decode"), tmp_path)


def built(tree: dict[str, Any], without: tuple[str, ...], folder: Path) -> bool:
    """Build the pipeline but for some steps, whose place another one takes."""
    steps = [step for step in tree["pipeline"]["steps"] if step["type"] not in without]
    for step in steps:
        if "derender" in step["params"]:  # its default leaves a derender step no tokens
            for key in ("tokenizer", "tool_parser", "reasoning_parser"):
                del step["params"][key]  # for derender: coordinator alone
            step["params"] |= {"derender": "service", "output_mode": "tokens"}
    tree["pipeline"]["steps"] = steps
    file = folder / "on.yaml"
    file.write_text(yaml.safe_dump(tree))
    return len(build(load(str(file), {}), NoEvents())) == len(STEP_TYPES) - len(without)


def test_a_key_that_is_off_and_has_a_default_shows_it(tmp_path: Path) -> None:
    tree = switched_on()
    (rendered_here,) = (step["params"] for step in tree["pipeline"]["steps"] if step["type"] == "render")
    shown = InProcess.model_validate({name: rendered_here[name] for name in InProcess.model_fields})
    assert {name for name, info in InProcess.model_fields.items() if info.default is None} == {
        name for name in InProcess.model_fields if getattr(shown, name) != getattr(InProcess(), name)
    }
    served_render(tree)
    for step in tree["pipeline"]["steps"]:
        params = STEP_TYPES[step["type"]].params
        shown = params.model_validate(step["params"])
        for name, info in params.model_fields.items():
            if not info.is_required() and info.default is not None:
                assert getattr(shown, name) == info.default, (step["type"], name)
    config = Config.model_validate(taken_out(tree, (SELECTOR,)))
    pools = config.pools
    lookups = (pools.decode.kubernetes, pools.render.dns)
    for section in (pools.encode, pools.prefill, pools.decode, pools.render, *lookups):
        for name in section.model_fields_set - {"policy"}:  # each shows one that has parameters
            info = type(section).model_fields[name]
            default = info.get_default(call_default_factory=True)
            assert info.is_required() or default in (None, ()) or getattr(section, name) == default, name


def comments() -> Iterator[tuple[str, str]]:
    """Yield each key of the reference with the prose right above it."""
    prose: list[str] = []
    for line in REFERENCE.split("\n\n", 1)[1].splitlines():
        text = line.strip()
        if text.startswith("# "):
            prose.append(text.removeprefix("# "))
        elif key := _KEY.match(text.removeprefix("#")):
            yield key.group(1), " ".join(prose)
            prose = []


def descriptions(model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    for name, info in model.model_fields.items():
        yield name, info.description or ""
        section = section_in(info.annotation)
        if section is not None and get_origin(info.annotation) is not tuple:
            yield from descriptions(section)


def test_the_reference_says_of_each_key_what_the_schema_says() -> None:
    """One sentence for each key: what editors show from the schema and what the reference says cannot drift apart."""
    said = {pair for pair in comments() if pair[1]}
    meant = set(descriptions(Config))
    for kind in STEP_TYPES.values():
        meant |= set(descriptions(kind.params))
    assert said == meant
