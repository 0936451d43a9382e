"""Real servers for the tests: each in a process group of its own, on 127.0.0.1, with its log in a file.

``Process`` starts, awaits and ends one; ``vllm`` is the command line and environment of one vLLM server. Its
roles are ``render`` (no engine), ``encode``, and ``prefill`` and ``decode``, which hand KV blocks over by NIXL or
Mooncake on loopback, by files in a shared folder, or by the server that ``lmcache`` starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Self

from tests.bounds import HANG_S
from tests.ports import free_ports

MODEL = Path(__file__).parent.parent / "data" / "tiny-model"
MODEL_NAME = "tiny"
MAX_MODEL_LEN = 4096
BLOCK_TOKENS = 32  # NIXL on CPUs takes multiples of 32 only

# Set by the kernel, so that a test run that is killed leaves no server behind to hold both cores.
_DIE_WITH_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execvp(sys.argv[1], sys.argv[1:])"


class Process:
    """A server process, with its URL and its log.

    Attributes:
        side_port: of a vLLM worker: where others ask for its KV blocks, or, with Mooncake, for its engines;
            of LMCache: where workers store and load.
        env: what it was given beside our own.
        ended: by us.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        port: int,
        log: Path,
        env: dict[str, str] | None = None,
        side_port: int = 0,
    ):
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self.side_port = side_port
        self.env = env or {}
        self.log = log
        self.ended = False
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _DIE_WITH_PARENT, *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | self.env,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_until_ready(self, path: str, timeout_s: float) -> Self:
        """Wait for a 200 on ``path``; an end of the process or of the time is an error with the log in it."""
        deadline = time.monotonic() + timeout_s
        while True:
            if not self.alive:
                raise RuntimeError(f"{self.name} ended with {self._process.returncode}:\n{self.log_tail()}")
            with contextlib.suppress(OSError), urllib.request.urlopen(self.url + path, timeout=2):
                return self
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.name}: no 200 on {path} in {timeout_s} s:\n{self.log_tail()}")
            time.sleep(0.1)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def terminate(self) -> None:
        if self.alive:
            self.signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process and its children at once, as a machine that is lost."""
        self.ended = True
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def pause(self) -> None:
        """Stop the process and its children from running, their connections left as they are."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def stop(self) -> int:
        """End the process by SIGTERM, and what is left of its group by SIGKILL; return the exit status."""
        self.ended = True
        self.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(HANG_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def log_tail(self, start: int = 0, lines: int = 40) -> str:
        """Return the last lines that were logged after the first ``start`` bytes."""
        text = self.log.read_bytes()[start:].decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])


def vllm(
    role: str,
    python: Path,
    logs: Path,
    connector: str = "NixlConnector",
    kv_folder: Path | None = None,
    store: Process | None = None,
    model: Path = MODEL,
    tokenizer: bool = True,
    **flags: str,
) -> Process:
    """Start one vLLM server.

    Args:
        role: "render", "encode", "prefill" or "decode".
        python: that of the environment of vllm_env.py.
        logs: the folder for the log.
        connector: how KV blocks are handed over: NixlConnector, NixlPushConnector, MooncakeConnector.
        kv_folder: hand them over in this folder instead.
        store: the LMCache server of LMCacheMPConnector.
        model: the model's folder.
        tokenizer: whether the server has one, and parsers; without, it takes and gives token ids alone.
        flags: more of vLLM's, as kv_cache_memory_bytes="1000000".
    """
    port, side_port = free_ports(2)
    env = ON_CPU | _CORES | {"VLLM_HOST_IP": "127.0.0.1"}
    command = ["launch", "render"] if role == "render" else ["serve"]
    command += [str(model), "--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL_NAME]
    command += ["--max-model-len", str(MAX_MODEL_LEN), *(_PARSERS if tokenizer else ["--tokens-only"])]
    if role != "render":
        command += ["--enable-scale-out", "--enable-prompt-tokens-details", "--shutdown-timeout", "5"]
        command += ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", "32"]
        # In the engine's process: one fewer to start, and no queue between the two.
        command += ["--block-size", str(BLOCK_TOKENS), "--distributed-executor-backend", "uni"]
        flags.setdefault("kv_cache_memory_bytes", str(128 << 20))  # 1024 blocks
    if role in ("prefill", "decode"):
        command += ["--kv-transfer-config", json.dumps(_kv_transfer(role, connector, kv_folder, store))]
        env |= _TRANSFER | ({} if store is None else store.env)
        env |= dict.fromkeys(("VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_MOONCAKE_BOOTSTRAP_PORT"), str(side_port))
    for flag, value in flags.items():
        command += ["--" + flag.replace("_", "-"), value]
    module = [str(python), "-m", "vllm.entrypoints.cli.main"]
    return Process(role, module + command, port, logs / f"{role}-{port}.log", env, side_port)


def lmcache(python: Path, packages: Path, logs: Path) -> Process:
    """Start LMCache's server; ``packages`` is the folder of lmcache_env.py."""
    port, side_port = free_ports(2)
    command = [str(python), "-m", "lmcache.v1.multiprocess.http_server", "--disable-metrics"]
    command += ["--host", "127.0.0.1", "--port", str(side_port), "--http-host", "127.0.0.1", "--http-port", str(port)]
    # Without a device to map, the workers copy blocks to the server themselves.
    command += ["--supported-transfer-mode", "engine_driven", "--chunk-size", str(BLOCK_TOKENS)]
    command += ["--l1-size-gb", "0.25", "--eviction-policy", "LRU"]
    env = ON_CPU | {"PYTHONPATH": str(packages), "LMCACHE_TRACK_USAGE": "false"}
    return Process("lmcache", command, port, logs / f"lmcache-{port}.log", env, side_port)


def _kv_transfer(role: str, connector: str, kv_folder: Path | None, store: Process | None) -> dict[str, object]:
    config: dict[str, object] = {"kv_role": "kv_producer" if role == "prefill" else "kv_consumer"}
    if kv_folder is not None:
        folder = {"shared_storage_path": str(kv_folder)}
        return config | {"kv_connector": "ExampleConnector", "kv_connector_extra_config": folder}
    config |= {"kv_connector": connector, "kv_buffer_device": "cpu"}
    if store is not None:
        config["kv_connector_extra_config"] = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": store.side_port}
    if connector == "MooncakeConnector":
        config["kv_connector_extra_config"] = {"mooncake_protocol": "tcp"}
    return config


_PARSERS = ["--reasoning-parser", "qwen3", "--tool-call-parser", "hermes", "--enable-auto-tool-choice"]
ON_CPU = {
    "VLLM_TARGET_DEVICE": "cpu",  # 0.33 over older extensions has no other mark of a CPU build
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
_CORES = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # of a server: an engine and its worker in one process, as asked for above
    "CPU_VISIBLE_MEMORY_NODES": "0,0",  # one for each data-parallel rank
    # The three settings that vllm_env.py patches in, which says why.
    "PD_E2E_NO_PIN": "1",
    # With 0.002 a wake-up was lost now and then and a request hung for seconds.
    "PD_E2E_BUSY_LOOP_S": "0.05",
    "PD_E2E_PROGRESS_DELAY_US": "1000",
}
_TRANSFER = {
    "UCX_TLS": "tcp",
    "UCX_NET_DEVICES": "lo",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "MC_TCP_BIND_ADDRESS": "127.0.0.1",
}
