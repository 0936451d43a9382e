"""A release is the same bytes wherever it is built, and has what runs and nothing else."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION = PROJECT["project"]["version"]
PACKAGES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
BESIDE = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md")
EPOCH_S = 1_800_000_000


def copy_of_the_tree(folder: Path, age_s: int) -> Path:
    """Copy what a checkout has, without .git, and with times of its own."""
    for name in (*PACKAGES, "pipeline_configs", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "data"))
    for name in (*BESIDE, ".gitignore"):
        shutil.copy(ROOT / name, folder / name)
    for path in folder.rglob("*"):
        os.utime(path, (age_s, age_s))
    return folder


def build(tree: Path) -> dict[str, Path]:
    """Build sdist and wheel, and return them by their endings."""
    environment = os.environ | {"SOURCE_DATE_EPOCH": str(EPOCH_S)}
    subprocess.run([sys.executable, "-m", "hatchling", "build"], cwd=tree, env=environment, check=True)
    return {path.suffix: path for path in (tree / "dist").iterdir()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return build(copy_of_the_tree(tmp_path_factory.mktemp("one"), 1_000_000_000))


def digests(built: dict[str, Path]) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in built.values()}


def test_two_builds_are_the_same_bytes(built: dict[str, Path], tmp_path: Path) -> None:
    again = build(copy_of_the_tree(tmp_path, 1_700_000_000))
    assert digests(again) == digests(built)
    assert {f"pd_coordinator-{VERSION}.tar.gz", f"pd_coordinator-{VERSION}-py3-none-any.whl"} == digests(built).keys()


def test_the_wheel_of_the_sdist_is_the_wheel_of_the_tree(built: dict[str, Path], tmp_path: Path) -> None:
    """A version that came out of .git would be lost in the sdist."""
    subprocess.run(["tar", "-xzf", built[".gz"], "-C", tmp_path], check=True)
    again = build(tmp_path / f"pd_coordinator-{VERSION}")
    assert digests(again)[built[".whl"].name] == digests(built)[built[".whl"].name]


def test_the_wheel_has_each_module_and_its_data_and_nothing_else(built: dict[str, Path]) -> None:
    names = {name for name in ZipFile(built[".whl"]).namelist() if ".dist-info/" not in name}
    tree = (path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file())
    assert names == {str(path.relative_to(ROOT)) for path in tree if "__pycache__" not in path.parts}


def test_the_wheel_has_the_command_and_the_license(built: dict[str, Path]) -> None:
    wheel, info = ZipFile(built[".whl"]), f"pd_coordinator-{VERSION}.dist-info"
    assert "coordinator = coordinator.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert f"{info}/licenses/LICENSE" in wheel.namelist()


def dist(tree: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run([tree / "scripts" / "dist"], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("tag", "changelog", "left", "complaint"),
    [
        ("v9.9.9", f"## {VERSION}\n", False, f'the tag is v9.9.9, and pyproject.toml has version = "{VERSION}"'),
        (f"v{VERSION}", "## Unreleased\n", False, f"CHANGELOG.md has no '## {VERSION}'"),
        (f"v{VERSION}", f"## {VERSION}\n", True, "there is something that is not committed"),
    ],
)
def test_what_is_built_from_a_tag_is_that_version(
    tag: str, changelog: str, left: bool, complaint: str, tmp_path: Path
) -> None:
    def git(*args: str) -> None:
        who = ("-c", "user.name=t", "-c", "user.email=t@example.test", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", tmp_path, *who, *args], check=True, capture_output=True)

    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "dist", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "CHANGELOG.md").write_text(changelog)
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "a release")
    git("tag", tag)
    if left:
        (tmp_path / "left").touch()
    ended = dist(tmp_path)
    assert (ended.returncode, ended.stderr) == (1, f"scripts/dist: {complaint}\n")
