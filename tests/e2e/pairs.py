"""What a prefill and a decode worker say of the prompts that went from one to the other.

``RANKS`` are the flags of a worker with two data-parallel ranks behind one port.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.bounds import HANG_S
from tests.e2e.wire import Metrics, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.servers import Process

RANKS = {"data_parallel_size": "2", "api_server_count": "1"}
_SOURCES = ("external_kv_transfer", "local_compute", "local_cache_hit")


def by_rank(worker: Process, source: str) -> list[float]:
    """Return the prompt tokens from one source that each of two ranks has counted."""
    seen = Metrics(worker.url)
    return [seen.total("vllm:prompt_tokens_by_source_total", source=source, engine=rank) for rank in ("0", "1")]


class Taken:
    """Where the prompts came from that a decode worker has been given since."""

    def __init__(self, decode: Process) -> None:
        self._url = decode.url
        self._before = Metrics(decode.url)

    def check(self, tokens: int) -> None:
        """Expect so many tokens to have come from prefill, and none to have been computed or found."""
        until(lambda: self._since("external_kv_transfer") >= tokens, f"{tokens} tokens come from prefill")
        came = {source: self._since(source) for source in _SOURCES}
        assert came == dict.fromkeys(_SOURCES, 0) | {"external_kv_transfer": tokens}

    def _since(self, source: str) -> float:
        return Metrics(self._url).prompt_tokens(source) - self._before.prompt_tokens(source)


def at_rest(*workers: Process) -> bool:
    """Say whether none of the workers runs a request or holds a block."""
    seen = [Metrics(worker.url) for worker in workers]
    return all(m.kv_usage == 0 and m.running == 0 and m.waiting == 0 for m in seen)


def until(condition: Callable[[], bool], what: str) -> None:
    wait_until(condition, HANG_S, what)
