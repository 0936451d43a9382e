"""The wiring takes every configuration that ships, and not only its steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.app import build
from coordinator.config import load
from coordinator.settings.problems import ConfigError

FILES = sorted((Path(__file__).parents[2] / "pipeline_configs").glob("*.yaml"))
# What they name is on the operator's disk, or in packages that these tests do without.
NEED = {
    "render-in-process.yaml": "tokenizer",
    "tokens-in-derender-coordinator.yaml": "vllm is not installed",
}


@pytest.mark.parametrize("file", [file for file in FILES if file.name not in NEED], ids=lambda file: file.name)
def test_a_shipped_configuration_becomes_an_application(file: Path) -> None:
    assert build(load(str(file), {})).front.plan.config.pipeline.steps


@pytest.mark.parametrize("name", NEED)
def test_what_a_shipped_configuration_needs_here_is_said(name: str) -> None:
    (file,) = (file for file in FILES if file.name == name)
    with pytest.raises(ConfigError, match=NEED[name]):
        build(load(str(file), {}))
