"""What a server tells about itself: health, version, models, and the few metrics that a router looks at.

Source: recordings ``misc/``.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

from coordinator.sim.answers import Answer, Whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from coordinator.sim.core import Core

_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


PATHS = ("/health", "/ping", "/v1/models", "/version", "/metrics", "/load")


def answer(core: Core, path: str) -> Answer:
    if path == "/v1/models":
        return Whole({"object": "list", "data": [_model(core)]})
    if path == "/version":
        return Whole({"version": core.settings.version})
    if path == "/load":
        return Whole({"server_load": 0})
    return Whole(_exposition(core) if path == "/metrics" else None)


def _model(core: Core) -> dict[str, Any]:
    created = int(time.time())
    permission = {
        "id": f"modelperm-{secrets.token_hex(8)}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": core.settings.model,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": f"/models/{core.settings.model}",
        "parent": None,
        "max_model_len": core.settings.max_model_len,
        "permission": [permission],
    }


def _exposition(core: Core) -> str:
    return "\n".join(_lines(core)) + "\n"


def _lines(core: Core) -> Iterator[str]:
    labels = f'engine="0",model_name="{core.settings.model}"'

    def series(name: str, kind: str, values: dict[str, float]) -> Iterator[str]:
        yield f"# TYPE vllm:{name} {kind}"
        for extra, value in values.items():
            yield f"vllm:{name}{{{labels}{extra}}} {float(value)}"

    yield from series("num_requests_running", "gauge", {"": core.running_count})
    yield from series("num_requests_waiting", "gauge", {"": 0})
    yield from series("kv_cache_usage_perc", "gauge", {"": 0})
    yield from series("prompt_tokens_total", "counter", {"": sum(core.prompt_tokens.values())})
    by_source = {f',source="{source}"': float(core.prompt_tokens[source]) for source in _SOURCES}
    yield from series("prompt_tokens_by_source_total", "counter", by_source)
    yield from series("generation_tokens_total", "counter", {"": core.generated})
    reasons = ("stop", "length", "abort", "error")
    by_reason = {f',finished_reason="{reason}"': float(core.finished[reason]) for reason in reasons}
    yield from series("request_success_total", "counter", by_reason)
