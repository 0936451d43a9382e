"""What ``coordinator serve`` imports before it listens: nothing that it does not need, since a pod waits for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# What takes a while to import, by what it is for. Each is imported by whoever needs it, when it is needed.
HEAVY = {
    "the simulator and other commands": ("coordinator.sim", "coordinator.demo", "coordinator.explain"),
    "the simulator's tokenizer and templates": ("tokenizers", "jinja2"),
    "tests and checks of files": ("pytest", "jsonschema", "unittest"),
    "models": ("transformers", "vllm", "torch", "numpy"),
    "looking up workers": ("dns", "kubernetes_asyncio", "coordinator.routing.dns", "coordinator.routing.kubernetes"),
    "exporting spans": ("opentelemetry", "grpc", "google.protobuf"),
    "several processes": ("coordinator.processes", "multiprocessing"),
}

SCRIPT = """
import json, sys
from coordinator import cli
def run(main):
    main.close()
    from coordinator.app import build
    build(cli.load(sys.argv[1], {}))
    return 0
cli.run = run
assert cli._main(["serve", "--config", sys.argv[1]]) == 0
print(json.dumps(sorted(sys.modules)))
"""

CONFIG = """
pools: {decode: {endpoints: ["http://127.0.0.1:9"]}}
pipeline: {steps: [{type: render, params: {address: "http://127.0.0.1:8"}}, {type: decode}]}
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("start") / "pd.yaml"
    path.write_text(CONFIG)
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(path)], cwd=ROOT, capture_output=True, check=True)
    found: list[str] = json.loads(done.stdout)
    return found


def test_serving_is_what_was_started(imported: list[str]) -> None:
    assert {"coordinator.serve", "coordinator.app", "coordinator.http.server", "steps.decode"} <= set(imported)


@pytest.mark.parametrize("purpose", HEAVY)
def test_the_start_does_not_import_what_is_for(purpose: str, imported: list[str]) -> None:
    found = [
        name for name in imported if any(name == heavy or name.startswith(f"{heavy}.") for heavy in HEAVY[purpose])
    ]
    assert found == [], f"serve needs nothing for {purpose}: import it in the function that does"
