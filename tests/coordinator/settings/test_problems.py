"""Paths, values and near names, as they stand in a sentence about a configuration."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coordinator.settings.problems import ConfigError, Sources, nearest, section_at, sentences, show, show_path


class Leaf(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: int = Field(1, gt=0, lt=10)
    any_key: dict[str, float] = {}


class Root(BaseModel):
    model_config = ConfigDict(extra="forbid")
    leaf: Leaf | None = None
    leaves: tuple[Leaf, ...] = ()


def said(value: object) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        Root.model_validate(value)
    return [f"{show_path(path)}: {sentence}" for path, sentence in sentences(caught.value, Root)]


def test_a_path_is_written_as_an_operator_would() -> None:
    assert show_path(("pipeline", "steps", 2, "params", "timeout")) == "pipeline.steps[2].params.timeout"


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "null"), (True, "true"), (3, "3"), ("a", "'a'"), ("x" * 99, "'" + "x" * 56 + "...")]
)
def test_a_value_is_shown_as_the_file_has_it_and_cut_short(value: object, shown: str) -> None:
    assert show(value) == shown


@pytest.mark.parametrize(
    ("name", "meant"),
    [("kv-conector", "kv_connector"), ("KV_CONNECTOR", "kv_connector"), ("leaf-", "leaf"), ("zzz", None)],
)
def test_the_nearest_name_is_found_whatever_its_case_and_dashes(name: str, meant: str | None) -> None:
    assert nearest(name, ["kv_connector", "leaf"]) == meant


def test_a_problem_names_the_variable_that_its_value_came_from() -> None:
    sources = Sources("pd.yaml", {("a", "b"): "COORDINATOR_A_B"})
    assert sources.problem(("a", "b", 1), "x") == "environment variable COORDINATOR_A_B: a.b[1]: x"
    assert sources.problem(("a",), "x") == "pd.yaml: a: x"
    assert sources.problem((), "x") == "pd.yaml: x"


def test_unknown_keys_are_answered_with_the_keys_of_their_own_section() -> None:
    assert said({"leaf": {"sise": 1}}) == ["leaf.sise: unknown key, did you mean size?"]
    assert said({"leaves": [{}, {"sise": 1}]}) == ["leaves[1].sise: unknown key, did you mean size?"]
    assert said({"size": 1}) == ["size: unknown key here, did you mean leaf.size?"]


def test_numbers_out_of_range_are_answered_with_the_range() -> None:
    assert said({"leaf": {"size": 0}}) == ["leaf.size: 0 is too small, write a number above 0"]
    assert said({"leaf": {"size": 10}}) == ["leaf.size: 10 is too large, write a number below 10"]


def test_a_fault_that_has_no_sentence_of_its_own_still_shows_the_value() -> None:
    assert said({"leaf": {"any_key": {"a": "x"}}}) == ["leaf.any_key.a: 'x' cannot be used here"]


def test_a_path_that_no_model_describes_has_no_section() -> None:
    assert section_at(Root, ("leaf", "size")) is None
    assert section_at(Root, ("leaf", "size", "x")) is None
    assert section_at(Root, ("leaves", 3)) is Leaf


def test_the_error_reads_as_one_line_for_each_problem() -> None:
    assert str(ConfigError(["a", "b"])) == "a\nb"
