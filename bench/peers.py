"""The proxies that are measured: how each is installed, which version it is, how it is started, and what it does.

``python -m bench.peers`` says which are here, ``python -m bench.peers install [NAME ...]`` installs them below
``bench/.peers``, each apart from the others: nginx from a Debian package that is unpacked there, the rest from PyPI
into virtual environments. Those are pinned, so that two runs compare the same programs.

Each is set up to cost little: round robin, where a cache-aware choice would walk a tree, and no log line per request.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import version as package_version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

HERE = Path(__file__).resolve().parent
FOLDER = HERE / ".peers"
CONFIGS = HERE / "configs"

# The ports that the files in configs/ name.
_LISTEN, _RENDER, _PREFILL, _DECODE = "9000", "9001", "9002", "9003"


class Missing(Exception):
    """A proxy is not installed, or does not run here."""


@dataclass(frozen=True)
class Site:
    """Where a proxy listens, its workers, and a folder of its own."""

    listen: int
    metrics: int
    render: int
    prefill: int
    decode: int
    folder: Path

    def config(self, file: str) -> str:
        """Copy a file of configs/ with these ports in it, and return its path."""
        ports = {_LISTEN: self.listen, _RENDER: self.render, _PREFILL: self.prefill, _DECODE: self.decode}
        text = re.sub(r"\b900[0-3]\b", lambda found: str(ports[found[0]]), (CONFIGS / file).read_text())
        copy = self.folder / Path(file).name
        copy.write_text(text)
        return str(copy)


@dataclass(frozen=True)
class Proxy:
    """One proxy in one set-up.

    Attributes:
        does: what it does with a request, for the report.
        shown: how it is started, for the report.
        legs: requests that one request of a client makes to render, prefill and decode.
        version: raises Missing.
        install: None for our own.
        processes: that share its work.
    """

    name: str
    does: str
    shown: str
    legs: tuple[int, int, int]
    version: Callable[[], str]
    command: Callable[[Site], list[str]]
    install: Callable[[], None] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    processes: int = 1


def coordinator(name: str, config: str, does: str, legs: tuple[int, int, int], processes: int = 1) -> Proxy:
    def command(site: Site) -> list[str]:
        return [sys.executable, "-m", "coordinator", "serve", "--config", site.config(config)]

    def version() -> str:
        return package_version("pd-coordinator")

    shown = f"coordinator serve --config bench/configs/{config}"
    return Proxy(name, does, shown, legs, version, command, processes=processes)


OURS = (
    coordinator("coordinator", "openai-warning.yaml", "prefill, then decode; answers pass through", (0, 1, 1)),
    coordinator("coordinator, 2 processes", "openai-2-warning.yaml", "the same, two processes", (0, 1, 1), processes=2),
    coordinator("coordinator, log info", "openai-info.yaml", "the same, a log line per request", (0, 1, 1)),
    coordinator(
        "coordinator tokens-in",
        "tokens-warning.yaml",
        "render, prefill, decode with token ids; each answer and chunk is rebuilt as chat",
        (1, 1, 1),
    ),
    coordinator("coordinator tokens-in, log info", "tokens-info.yaml", "the same, a log line per request", (1, 1, 1)),
)


def _run(*args: str) -> None:
    """Run a step of an installation.

    Raises:
        Missing: it failed; with the end of what it said.
    """
    done = subprocess.run(args, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise Missing(f"{Path(args[0]).name} {args[1]} failed: {' '.join(last)}")


def from_pypi(name: str, pinned: str, **rest: object) -> Proxy:
    """Return a peer that lives in a virtual environment; its command's first word is a program of it."""
    home = FOLDER / name
    words: Callable[[Site], list[str]] = rest.pop("command")  # type: ignore[assignment]  # as Proxy has it

    def version() -> str:
        found = sorted(home.glob(f"lib/python3*/site-packages/{name.replace('-', '_')}-*.dist-info"))
        if not found:
            raise Missing("not installed: make bench-peers")
        return found[-1].name.removesuffix(".dist-info").rpartition("-")[2]

    def install() -> None:
        _run(sys.executable, "-m", "venv", "--clear", str(home))
        _run(str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", f"{name}=={pinned}")

    def command(site: Site) -> list[str]:
        program, *args = words(site)
        return [str(home / "bin" / program), *args]

    return Proxy(name=name, version=version, install=install, command=command, **rest)  # type: ignore[arg-type]  # the rest of Proxy's


def _nginx() -> str:
    here = FOLDER / "nginx" / "usr" / "sbin" / "nginx"
    program = str(here) if here.exists() else shutil.which("nginx")
    if program is None:
        raise Missing("not installed: make bench-peers")
    return program


def _nginx_version() -> str:
    said = subprocess.run([_nginx(), "-v"], capture_output=True, text=True, check=False)
    if said.returncode:
        raise Missing(f"it does not run: {said.stderr.strip()}")
    return said.stderr.strip().rpartition("/")[2]


def _nginx_command(site: Site) -> list[str]:
    return [_nginx(), "-p", str(site.folder), "-e", "stderr", "-c", site.config("peers/nginx.conf")]


def _install_nginx() -> None:
    """Unpack Debian's package: nothing of the system changes, and no service starts."""
    if shutil.which("nginx"):
        return
    home = FOLDER / "nginx"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    fetch = f"cd {shlex.quote(str(home))} && (apt-get download nginx || (apt-get update && apt-get download nginx))"
    _run("sh", "-c", fetch)
    for package in home.glob("nginx_*.deb"):
        _run("dpkg-deb", "-x", str(package), str(home))
        package.unlink()
    _nginx_version()


def _sglang(*program: str, limit: int) -> Callable[[Site], list[str]]:
    def command(site: Site) -> list[str]:
        return [
            *program,
            *("--host", "127.0.0.1", "--port", str(site.listen)),
            *("--pd-disaggregation", "--prefill", f"http://127.0.0.1:{site.prefill}", "8998"),
            *("--decode", f"http://127.0.0.1:{site.decode}", "--policy", "round_robin", "--log-level", "warn"),
            *("--prometheus-port", str(site.metrics), "--prometheus-host", "127.0.0.1"),
            *("--max-concurrent-requests", str(limit)),  # none: the two write that in different ways
        ]

    return command


def _vllm_router(site: Site) -> list[str]:
    return [
        "vllm-router",
        *("--host", "127.0.0.1", "--port", str(site.listen)),
        *("--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy", "round_robin", "--log-level", "warning"),
        *("--prefill", f"http://127.0.0.1:{site.prefill}", "--decode", f"http://127.0.0.1:{site.decode}"),
        *("--prometheus-port", str(site.metrics), "--prometheus-host", "127.0.0.1"),
    ]


_BOTH = "prefill and decode at the same time, as SGLang's workers need it; decode's answer passes through"
_PD = "--pd-disaggregation --prefill URL 8998 --decode URL --policy round_robin --log-level warn"

PEERS = (
    Proxy(
        "nginx",
        does="one leg, to decode: the floor of a relay; it knows nothing of prefill",
        shown="nginx -c bench/configs/peers/nginx.conf",
        legs=(0, 0, 1),
        version=_nginx_version,
        command=_nginx_command,
        install=_install_nginx,
    ),
    from_pypi(
        "vllm-router",
        "0.1.17",
        does="prefill, then decode; decode's answer passes through",
        shown="vllm-router --vllm-pd-disaggregation --kv-connector nixl --policy round_robin --log-level warning "
        "--prefill URL --decode URL",
        legs=(0, 1, 1),
        command=_vllm_router,
    ),
    from_pypi(
        "sglang-router",
        "0.3.2",
        does=_BOTH,
        shown=f"python -m sglang_router.launch_router {_PD}",
        legs=(0, 1, 1),
        command=_sglang("python", "-m", "sglang_router.launch_router", limit=-1),
    ),
    from_pypi(
        "smg",
        "1.13.0",
        does=f"the successor of sglang-router: {_BOTH}",
        shown=f"smg launch {_PD}",
        legs=(0, 1, 1),
        command=_sglang("smg", "launch", limit=0),
    ),
    from_pypi(
        "xpyd-proxy",
        "1.8.0",
        does="prefill, then decode; decode's answer passes through",
        shown="xpyd proxy --config bench/configs/peers/xpyd-proxy.yaml --log-level warning",
        legs=(0, 1, 1),
        command=lambda site: ["xpyd", "--config", site.config("peers/xpyd-proxy.yaml"), "--log-level", "warning"],
        env={"HF_HUB_OFFLINE": "1"},  # without a tokenizer it goes round robin, and counts no tokens
    ),
)

ALL = (*OURS, *PEERS)


def state(proxy: Proxy) -> tuple[str | None, str | None]:
    """Return a proxy's version, or None and why it is missing."""
    try:
        return proxy.version(), None
    except (Missing, OSError) as error:
        return None, str(error)


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("action", nargs="?", choices=["list", "install"], default="list")
    parser.add_argument("names", nargs="*", metavar="NAME", help="some of the peers, all by default")
    options = parser.parse_args()
    if unknown := set(options.names) - {peer.name for peer in PEERS}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(peer.name for peer in PEERS)}")
    for peer in PEERS:
        if options.names and peer.name not in options.names:
            continue
        if options.action == "install" and peer.install is not None and state(peer)[0] is None:
            try:
                peer.install()
            except (Missing, subprocess.TimeoutExpired, OSError) as error:
                print(f"{peer.name:14} cannot be installed: {error}")
                continue
        version, why = state(peer)
        print(f"{peer.name:14} {version or why}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
