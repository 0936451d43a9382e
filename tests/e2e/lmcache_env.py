"""LMCache, beside the environment of vllm_env.py: a folder of packages for the ``PYTHONPATH`` of those that need it.

    python tests/e2e/lmcache_env.py [0.33]

prints the folder, after making it where it is missing: some seconds and 120 MB. It is apart from that environment
because LMCache requires CUDA's packages by name. On a CPU its transfers are torch's own, and what it imports for them
is named here.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.e2e import vllm_env

PACKAGES = ("lmcache==0.5.6", "nvtx==0.2.17", "redis==8.1.0", "sortedcontainers==2.4.0")
MARKER = "pd-e2e-complete"


def ensure(version: str = vllm_env.DEFAULT_VERSION) -> Path:
    """Return the folder; install into it first if it is missing or was left half made.

    Raises:
        RuntimeError: pip cannot install them, and its words.
    """
    python = vllm_env.ensure(version)
    recipe = Path(__file__).read_bytes() + f"{sys.version_info[:2]}".encode()
    folder = python.parents[2] / f"lmcache-{hashlib.sha256(recipe).hexdigest()[:12]}"
    with folder.with_name(folder.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / MARKER).exists():
            shutil.rmtree(folder, ignore_errors=True)
            pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-deps"]
            into = ["--only-binary", ":all:", "--target", str(folder)]
            done = subprocess.run([*pip, *into, *PACKAGES], stdin=subprocess.DEVNULL, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{done.stdout}{done.stderr}\nLMCache could not be installed")
            (folder / MARKER).write_text(" ".join(PACKAGES) + "\n")
    return folder


if __name__ == "__main__":
    print(ensure(*sys.argv[1:2]))
