"""Routes of the local worker that are passed on as they are: which ones, as an operator writes them.

An exact list, never a pattern: what a later vLLM serves beside them stays out of reach until somebody writes it down.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from coordinator.settings.units import Items
from envelope.formats import PATHS, Format

_PATH = re.compile(r"(/[A-Za-z0-9_.~-]+)+", re.ASCII)

# Answered here, by the pipeline or about the coordinator itself.
_ABOUT_US = ("/v1/models", "/health", "/healthz", "/readyz")
_OWN = frozenset((*PATHS.values(), f"{PATHS[Format.MESSAGES]}/count_tokens", *_ABOUT_US))

# What these do to a worker, to other people's requests, or to what they are told.
_DANGEROUS = {
    "stops the worker's work": (
        *("/sleep", "/pause", "/scale_elastic_ep", "/fault_tolerance/apply"),
        *("/release_kv_cache_memory", "/resume_kv_cache_memory"),
    ),
    "starts work that somebody has stopped": ("/wake_up", "/resume"),
    "ends other people's requests": ("/abort_requests", "/inference/v1/abort_requests"),
    "changes the model that answers": (
        *("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update"),
        *("/start_draft_weight_update", "/update_weights", "/finish_weight_update", "/update_weight_version"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    ),
    "runs whatever it is told inside the engine": ("/collective_rpc",),
    # As a client's kv_transfer_params are taken off by the pipeline alone.
    "lets clients name machines that the worker fetches KV blocks from": ("/invocations", "/v1/chat/completions/batch"),
    "slows everybody down": (
        *("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/start_profile", "/stop_profile"),
    ),
    "tells of the worker's settings and environment": ("/server_info",),
}


@dataclass(frozen=True, slots=True)
class Route:
    """One method and one path."""

    method: str
    path: str

    def __str__(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def danger(self) -> str | None:
        """Say what whoever can call this route can do with it; None where that is only what clients are for."""
        return next((what for what, paths in _DANGEROUS.items() if self.path in paths), None)


def parse_route(value: object) -> Route:
    """Read ``GET /tokenizer_info`` or ``POST /tokenize``."""
    if isinstance(value, Route):
        return value
    method, _, path = value.strip().partition(" ") if isinstance(value, str) else ("", "", "")
    method, path = method.upper(), path.strip()
    if method not in ("GET", "POST") or not path:
        raise ValueError(f"{value!r} is not a route, write a method and a path, such as POST /tokenize")
    if not _PATH.fullmatch(path) or any(part in (".", "..") for part in path.split("/")):
        raise ValueError(f"{path!r} is not one exact path, write each path in full, such as /tokenize")
    if path in _OWN:
        raise ValueError(f"{path} is answered by the coordinator itself, take it out")
    return Route(method, path)


Routes = Annotated[
    tuple[
        Annotated[
            Route,
            PlainValidator(parse_route),
            PlainSerializer(str, return_type=str, when_used="json"),
            WithJsonSchema({"type": "string", "pattern": "^(GET|POST) /", "examples": ["POST /tokenize"]}),
        ],
        ...,
    ],
    Items,
]
