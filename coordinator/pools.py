"""The sections ``pools`` of the file: the workers of each role, and how one of them is picked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from coordinator.outbound import Outbound
from coordinator.section import HeaderName, Section, not_yet
from coordinator.units import Allow, BaseUrl, Count, Duration, Items, Whole, origin

Policy = Annotated[
    Literal["round_robin", "least_inflight"],
    not_yet(
        {
            name: f"{name} comes in a later release, write round_robin or least_inflight"
            for name in ("power_of_two", "prefix_affinity")
        }
    ),
]


class Pool(Section, Outbound):
    """The workers of one role: listed here, or named in each request by the router in front."""

    later: ClassVar[Mapping[str, str]] = {
        "dns": "finding workers by DNS comes in a later release, list them in endpoints",
        "kubernetes": "finding workers by Kubernetes comes in a later release, list them in endpoints",
        "bootstrap_port": "connectors that need a bootstrap port come in a later release, take the key out",
    }

    endpoints: Annotated[tuple[BaseUrl, ...], Items] | None = Field(
        None, description="base URLs of the workers; either this or header"
    )
    header: HeaderName | None = Field(
        None, description="request header in which the router in front names the worker, as host:port"
    )
    allow: Annotated[tuple[Allow, ...], Items] | None = Field(
        None,
        description="who the header may name: networks, IPs or host names, each also with :port or :low-high",
    )
    policy: Policy = Field(
        "round_robin", description="how one of the endpoints is picked: round_robin or least_inflight"
    )
    max_inflight: Whole = Field(
        0,
        ge=0,
        description="legs that one worker is given at a time; decode's place is kept from before prefill on, and a "
        "request waits in server.queue_size for it; 0 is no limit",
    )
    max_idle_conns_per_host: Count = Field(100, description="keep-alive connections kept open per worker")
    idle_conn_timeout: Duration = Field(
        4.0,
        description="how long an idle connection is kept; vLLM closes it after 5s, and we must be first",
    )

    def _faults(self) -> Iterator[tuple[str, str]]:
        if self.endpoints is not None and self.header is not None:
            yield "header", "a pool names its workers in one way, take out endpoints or header"
        elif self.header is not None:
            yield from self._header_faults()
        elif self.endpoints is not None:
            yield from self._endpoint_faults(self.endpoints)
        else:
            yield "", "the pool names no workers, write endpoints: [http://host:8000] or header: with allow:"

    def _header_faults(self) -> Iterator[tuple[str, str]]:
        if not self.allow:
            yield (
                "allow",
                "missing: whoever can send a request names the worker, so write which may be called, "
                "such as ['10.0.0.0/8:8000']",
            )
        if "policy" in self.model_fields_set:
            yield "policy", "the header names the worker, so there is none to pick: take the key out"

    def _endpoint_faults(self, endpoints: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        if not endpoints:
            yield "endpoints", "the list is empty, write at least one worker such as http://10.0.0.1:8000"
        if self.allow is not None:
            yield "allow", "belongs to header, and the workers are listed here: take the key out"
        seen: set[str] = set()
        for url in endpoints:
            if origin(url) in seen:
                yield "endpoints", f"{url} stands twice, take one out"
            seen.add(origin(url))


class Pools(Section):
    """The workers of each role, where the coordinator picks them itself."""

    encode: Pool | None = Field(None, description="the workers that turn media into embeddings")
    prefill: Pool | None = Field(None, description="the workers that compute prompts")
    decode: Pool | None = Field(None, description="the workers that generate answers")

    def _faults(self) -> Iterator[tuple[str, str]]:
        if self.encode is not None and self.encode.max_inflight:
            yield (
                "encode",
                "max_inflight counts requests, and one may make many encode legs: bound them by max_parallel",
            )
