"""The sections ``pools`` of the file: the workers of each role, and how one of them is picked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from coordinator.settings.lookup import Dns, DnsOrText, Kubernetes
from coordinator.settings.outbound import Outbound
from coordinator.settings.section import HeaderName, Section
from coordinator.settings.units import Allow, BaseUrl, Count, Duration, Items, Port, PositiveDuration, Whole, origin

PolicyName = Literal["round_robin", "random", "power_of_two", "least_inflight", "prefix_affinity", "load_aware"]

_PARAMS_OF: dict[PolicyName, tuple[str, ...]] = {
    "prefix_affinity": ("block_tokens", "remembered_blocks", "max_load", "free_tokens"),
    "load_aware": ("scrape_interval", "scrape_timeout", "stale_after"),
}


class PolicyParams(Section):
    """What a policy goes by; each key belongs to one policy."""

    block_tokens: Count = Field(
        128,
        description="prefix_affinity: prompts are compared in blocks of so many tokens; a multiple of the workers' own "
        "block size",
    )
    remembered_blocks: Count = Field(
        200_000,
        description="prefix_affinity: marks of which it is remembered who was sent what is before them; a new "
        "prompt takes two or three, at some 300 bytes each here",
    )
    max_load: float = Field(
        1.25,
        ge=1,
        description="prefix_affinity: a worker with more than so many times the mean of tokens in flight gets nothing "
        "more",
    )
    free_tokens: Whole = Field(
        8192,
        ge=0,
        description="prefix_affinity: tokens in flight that a worker may have whatever the others have",
    )
    scrape_interval: PositiveDuration = Field(1.0, description="load_aware: how often workers' /metrics are read")
    scrape_timeout: PositiveDuration = Field(1.0, description="load_aware: how long one may take to answer")
    stale_after: PositiveDuration = Field(
        5.0,
        description="load_aware: how long an answer is gone by; without one, a worker is judged by its legs in flight",
    )


class HealthParams(Section):
    """When a worker is left out for a while."""

    failures: Whole = Field(
        5,
        ge=0,
        description="legs that fail in a row before a worker is left out; 4xx, full queues and clients that left are "
        "no failures; 0 is never",
    )
    ejection_time: PositiveDuration = Field(
        10.0, description="how long it is left out at first; each time after that twice as long"
    )
    max_ejection_time: PositiveDuration = Field(
        300.0, description="and never longer; after as long without a failure it begins anew"
    )
    panic_threshold: Whole = Field(
        20,
        ge=0,
        le=100,
        description="percent of the workers that must be left; with fewer all are used, whatever is known of them; 0 "
        "uses none that are out",
    )

    def _faults(self) -> Iterator[tuple[str, str]]:
        if self.max_ejection_time < self.ejection_time:
            yield "max_ejection_time", "is shorter than ejection_time, write the longer of both here"


_WAYS = ("endpoints", "dns", "kubernetes", "header")


def _ports(value: object) -> object:
    return (value,) if isinstance(value, int) or (isinstance(value, str) and value.strip().isdecimal()) else value


_PORT_SCHEMA = {"type": "integer", "minimum": 1, "maximum": 65535}
Ports = Annotated[
    tuple[Port, ...],
    Items,
    BeforeValidator(_ports),
    WithJsonSchema({"anyOf": [_PORT_SCHEMA, {"type": "array", "items": _PORT_SCHEMA}]}),
]

DEFAULT_BOOTSTRAP_PORT = 8998


class Pool(Section, Outbound):
    """The workers of one role: listed here, looked up, or named in each request by the router in front."""

    later: ClassVar[Mapping[str, str]] = {
    }

    endpoints: Annotated[tuple[BaseUrl, ...], Items] | None = Field(
        None, description="base URLs of the workers; either this, dns, kubernetes or header"
    )
    dns: DnsOrText | None = Field(None, description="a DNS name whose records are the workers, as they change")
    kubernetes: Kubernetes | None = Field(
        None, description="a Service whose endpoints, or a selector whose pods, are the workers, as they change"
    )
    header: HeaderName | None = Field(
        None, description="request header in which the router in front names the worker, as host:port"
    )
    allow: Annotated[tuple[Allow, ...], Items] | None = Field(
        None,
        description="who the header may name: networks, IPs or host names, each also with :port or :low-high",
    )
    policy: PolicyName = Field(
        "round_robin",
        description="how a worker is picked: round_robin (the default), random, power_of_two, least_inflight, "
        "prefix_affinity or load_aware; docs/routing.md says when to use which",
    )
    policy_params: PolicyParams = Field(default_factory=PolicyParams, description="what the policy goes by")
    health: HealthParams = Field(default_factory=HealthParams, description="when a worker is left out for a while")
    max_inflight: Whole = Field(
        0,
        ge=0,
        description="legs that one worker is given at a time; decode's place is kept from before prefill on, and a "
        "request waits in server.queue_size for it; 0 is no limit",
    )
    bootstrap_port: Ports = Field(
        (),
        description="of prefill: the port of a worker's bootstrap server (kv-sglang, kv-mooncake; unset is 8998) or of "
        "its P2P tier (kv-offloading); one for all, or a list in the order of endpoints",
    )
    max_idle_conns_per_host: Count = Field(100, description="keep-alive connections kept open per worker")
    idle_conn_timeout: Duration = Field(
        4.0,
        description="how long an idle connection is kept; vLLM closes it after 5s, and we must be first",
    )

    def _faults(self) -> Iterator[tuple[str, str]]:
        if len(self.bootstrap_port) > 1 and len(self.bootstrap_port) != len(self.endpoints or ()):
            yield "bootstrap_port", "a list has one port for each of endpoints, in their order; one number is for all"
        ways = [name for name in _WAYS if getattr(self, name) is not None]
        if len(ways) > 1:
            yield ways[-1], f"a pool names its workers in one way, take out {' or '.join(ways)}"
        elif not ways:
            yield (
                "",
                "the pool names no workers, write endpoints: [http://host:8000], dns:, kubernetes:, or header: "
                "with allow:",
            )
        elif self.header is not None:
            yield from self._header_faults()
        else:
            if self.allow is not None:
                yield "allow", "belongs to header, and the workers are known here: take the key out"
            if self.endpoints is not None:
                yield from self._endpoint_faults(self.endpoints)
            yield from self._policy_faults()

    @property
    def lookup(self) -> Dns | Kubernetes | None:
        """How the workers are looked up; None where they are listed or named."""
        return self.dns or self.kubernetes

    def _header_faults(self) -> Iterator[tuple[str, str]]:
        if not self.allow:
            yield (
                "allow",
                "missing: whoever can send a request names the worker, so write which may be called, "
                "such as ['10.0.0.0/8:8000']",
            )
        for key in ("policy", "policy_params", "health"):
            if key in self.model_fields_set:
                yield key, "the header names the worker, so there is none to pick: take the key out"

    def _policy_faults(self) -> Iterator[tuple[str, str]]:
        for key in sorted(self.policy_params.model_fields_set.difference(_PARAMS_OF.get(self.policy, ()))):
            owner = next(name for name, keys in _PARAMS_OF.items() if key in keys)
            yield "policy_params", f"{key} means nothing to {self.policy}: take it out, or write policy: {owner}"

    def _endpoint_faults(self, endpoints: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        if not endpoints:
            yield "endpoints", "the list is empty, write at least one worker such as http://10.0.0.1:8000"
        seen: set[str] = set()
        for url in endpoints:
            if origin(url) in seen:
                yield "endpoints", f"{url} stands twice, take one out"
            seen.add(origin(url))

    def bootstrap_port_of(self, url: str) -> int:
        """Return the port of what tells decode workers of this one."""
        ports = self.bootstrap_port or (DEFAULT_BOOTSTRAP_PORT,)
        if len(ports) == 1:
            return ports[0]
        return ports[[origin(each) for each in self.endpoints or ()].index(origin(url))]


class Pools(Section):
    """The workers of each role, where the coordinator picks them itself."""

    encode: Pool | None = Field(None, description="the workers that turn media into embeddings")
    prefill: Pool | None = Field(None, description="the workers that compute prompts")
    decode: Pool | None = Field(None, description="the workers that generate answers")
    render: Pool | None = Field(
        None, description="the servers that turn prompts into token ids; either this or the render step's address"
    )

    def _faults(self) -> Iterator[tuple[str, str]]:
        if self.encode is not None and self.encode.max_inflight:
            yield (
                "encode",
                "max_inflight counts requests, and one may make many encode legs: bound them by max_parallel",
            )
        if self.encode is not None and self.encode.policy == "prefix_affinity":
            yield "encode", "prefix_affinity goes by the prompt, and encode legs hold media: write least_inflight"
        if self.render is not None and self.render.header is not None:
            yield "render", "no router in front names render servers, write endpoints, dns or kubernetes"
        for role in ("encode", "decode"):
            pool = getattr(self, role)
            if pool is not None and pool.bootstrap_port:
                yield role, "bootstrap_port is a port of prefill workers: write it in pools.prefill"
