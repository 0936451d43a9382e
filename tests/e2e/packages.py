"""Folders of packages beside the environment of vllm_env.py, for the ``PYTHONPATH`` of those that need them.

They are apart from it because they require by name what must not be in it, such as CUDA's packages; so nothing that
they require is installed, and what they import that is not there is named with them.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from tests.e2e import vllm_env

MARKER = "pd-e2e-complete"


def ensure(name: str, packages: tuple[str, ...], version: str) -> Path:
    """Return the folder; install into it first if it is missing or was left half made.

    Args:
        version: of vLLM, as vllm_env.py has it.

    Raises:
        RuntimeError: pip cannot install them, and its words.
    """
    python = vllm_env.ensure(version)
    recipe = Path(__file__).read_bytes() + f"{packages}{version}{sys.version_info[:2]}".encode()
    folder = python.parents[2] / f"{name}-{hashlib.sha256(recipe).hexdigest()[:12]}"
    with folder.with_name(folder.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / MARKER).exists():
            shutil.rmtree(folder, ignore_errors=True)
            pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-deps"]
            into = ["--only-binary", ":all:", "--target", str(folder)]
            done = subprocess.run([*pip, *into, *packages], stdin=subprocess.DEVNULL, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{done.stdout}{done.stderr}\n{name} could not be installed")
            (folder / MARKER).write_text(" ".join(packages) + "\n")
    return folder
