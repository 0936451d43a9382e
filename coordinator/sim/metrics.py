"""``GET /metrics``: the few vLLM series that somebody in front of a worker looks at."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from coordinator.sim.core import Core

_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


def exposition(core: Core) -> str:
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
