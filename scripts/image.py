"""Run the steps of deploy/Dockerfile without a container engine, and the command that the image starts.

The build stage's COPY and RUN are done in a temporary folder that stands for the root, with a fresh virtual
environment for the Python image. Then the image's command is started, as root's guest: with the image's user and a
root file system that is read-only, which it says; its health check is asked until it passes, and SIGTERM must end it
with 0. What only an engine can show, layers and the base image, is not shown.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
_ABSOLUTE = re.compile(r"(?<![\w./:-])/(?=src\b|opt/venv\b|wheels\b|etc/coordinator\b)")
_CONFIG = "pools: {prefill: {endpoints: [http://127.0.0.1:9]}, decode: {endpoints: [http://127.0.0.1:9]}}\n" + (
    "pipeline: {steps: [{type: prefill}, {type: decode}]}\n"
)


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """Return ``(keyword, rest)`` of each instruction, in order, with continued lines joined."""
    lines = [line for line in dockerfile.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [(line.split(None, 1)[0], line.split(None, 1)[1].strip()) for line in joined.splitlines() if line.strip()]


@dataclass
class Stage:
    """One stage of the Dockerfile, in a folder that stands for the root."""

    root: Path
    env: dict[str, str]
    folder: Path
    user: str = "0:0"
    said: dict[str, list[str]] = field(default_factory=dict)

    def moved(self, text: str) -> str:
        return _ABSOLUTE.sub(f"{self.root}/", text)

    def do(self, keyword: str, rest: str) -> None:
        match keyword:
            case "ARG":
                name, _, value = rest.partition("=")
                self.env[name] = value.strip('"')
            case "ENV":
                for name, value in re.findall(r"(\w+)=(\S+)", rest):
                    self.env[name] = os.path.expandvars(self.moved(value).replace("$PATH", self.env["PATH"]))
            case "WORKDIR":
                self.folder = Path(self.moved(rest))
                self.folder.mkdir(parents=True)
            case "COPY" if not rest.startswith("--from"):
                *sources, target = rest.split()
                for source in sources:
                    self._copy(REPO / source, self.folder / target)
            case "RUN":
                print(f"RUN {rest}", flush=True)
                subprocess.run(["sh", "-euc", self.moved(rest)], cwd=self.folder, env=self.env, check=True)
            case "USER":
                self.user = rest
            case "HEALTHCHECK" | "ENTRYPOINT" | "CMD":
                self.said[keyword] = json.loads(rest[rest.index("[") :])

    def _copy(self, source: Path, target: Path) -> None:
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)


def interpreter() -> str:
    """Return a Python that the image's user can reach too: one in a folder of root's is closed to it."""
    for candidate in (sys.executable, "/usr/bin/python3"):
        path = Path(candidate).resolve()
        if all(folder.stat().st_mode & 0o001 for folder in path.parents):
            return candidate
    return sys.executable


def confined(user: str) -> list[str]:
    """Return what starts a command with a read-only root and as a user; nothing where we may not."""
    uid, _, gid = user.partition(":")
    drop = f"exec setpriv --reuid {uid} --regid {gid} --clear-groups -- "
    prefix = ["unshare", "--mount", "sh", "-c", f'mount -o remount,bind,ro / && {drop} "$@"', "confined"]
    if subprocess.run([*prefix, interpreter(), "-c", ""], check=False).returncode == 0:
        print(f"starting it as {user}, with a read-only root", flush=True)
        return prefix
    print("starting it as who we are: user and read-only root are not tried", flush=True)
    return []


def build(root: Path) -> Stage:
    """Do all the steps; return the last stage."""
    python = root / "python"
    subprocess.run([interpreter(), "-m", "venv", python], check=True)
    outer = {name: os.environ[name] for name in os.environ if name.startswith(("PIP_", "SSL_", "REQUESTS_"))}
    path = f"{python}/bin:/usr/local/bin:/usr/bin:/bin"
    stage = Stage(root, {}, root)
    for keyword, rest in instructions((REPO / "deploy" / "Dockerfile").read_text()):
        if keyword == "FROM":
            stage = Stage(root, {"PATH": path, "HOME": str(root), **outer}, root)
        else:
            stage.do(keyword, rest)
    return stage


def start(stage: Stage) -> None:
    """Start the image's command as its user, ask its health, and end it.

    Raises:
        SystemExit: it did not become healthy, or did not end with 0.
    """
    config = stage.root / "etc" / "coordinator" / "coordinator.yaml"
    config.parent.mkdir(parents=True)
    config.write_text(_CONFIG)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    env = stage.env | {"COORDINATOR_SERVER_LISTEN_ADDR": f"127.0.0.1:{port}", "HOME": "/"}
    health = [part.replace("8080", port) for part in stage.said["HEALTHCHECK"]]
    command = [stage.moved(part) for part in stage.said["ENTRYPOINT"] + stage.said["CMD"]]
    process = subprocess.Popen([*confined(stage.user), *command], env=env, cwd="/")
    try:
        if not _healthy(health, env, process):
            raise SystemExit("the image's command did not become healthy")
        process.send_signal(signal.SIGTERM)
        if process.wait(30) != 0:
            raise SystemExit(f"the image's command ended with {process.returncode}")
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()
    print("healthy, and ended with 0")


def _healthy(command: list[str], env: dict[str, str], process: subprocess.Popen[bytes]) -> bool:
    for _ in range(60):
        if subprocess.run(command, env=env, stderr=subprocess.DEVNULL, check=False).returncode == 0:
            return True
        if process.poll() is not None:
            return False
        time.sleep(1)
    return False


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="image-") as folder:
        root = Path(folder)
        root.chmod(0o755)  # the image's user must reach what root has installed
        stage = build(root)
        installed = root / "opt" / "venv"
        size = sum(file.lstat().st_blocks * 512 for file in installed.rglob("*"))
        print(f"/opt/venv, all that is added to the base image: {size / 2**20:.0f} MiB")
        start(stage)
    return 0


if __name__ == "__main__":
    sys.exit(main())
