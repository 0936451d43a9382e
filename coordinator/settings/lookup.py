"""The sections ``dns`` and ``kubernetes`` of a pool: where its workers are looked up while the coordinator runs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, GetJsonSchemaHandler, WithJsonSchema, model_validator

from coordinator.settings.section import Section
from coordinator.settings.units import Duration, Items, PositiveDuration, is_host_name, parse_port, split_host_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema

_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
# A port's name in Kubernetes: at most 15 characters, with a letter among them.
_PORT_NAME = re.compile(r"(?=[-0-9]*[a-z])[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?", re.ASCII)


def _host_name(value: str) -> str:
    name = value.strip().lower()
    if not is_host_name(name):
        raise ValueError(f"{value!r} is not a DNS name, write one such as prefill.default.svc.cluster.local")
    return name


def _label(value: str) -> str:
    if not _DNS_LABEL.fullmatch(value):
        raise ValueError(f"{value!r} is not a name in Kubernetes, write lower-case letters, digits and dashes")
    return value


def _name_server(value: str) -> str:
    """Return ``ip:port``; the port is 53 unless it is said."""
    host, port = split_host_port(value.strip())
    if is_host_name(host):
        raise ValueError(f"{value!r} is not the IP address of a name server, write one such as 10.96.0.10")
    return f"[{host}]:{parse_port(port or '53')}" if ":" in host else f"{host}:{parse_port(port or '53')}"


def _port(value: object) -> object:
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return parse_port(str(value))
    if isinstance(value, str) and _PORT_NAME.fullmatch(value):
        return value
    raise ValueError(f"{value!r} is no port, write its number, or the name that it has in Kubernetes")


HostName = Annotated[str, AfterValidator(_host_name)]
Label = Annotated[str, AfterValidator(_label)]
NameServer = Annotated[str, AfterValidator(_name_server)]
Port = Annotated[int, Field(ge=1, le=65535)]
NamedPort = Annotated[
    int | str,
    BeforeValidator(_port),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": 65535}, {"type": "string"}]}),
]


class Lookup(Section):
    """What both ways have in common."""

    scheme: Literal["http", "https"] = Field("http", description="how the workers that are found are reached")
    keep: Duration = Field(
        600.0,
        description="how long the workers that were found last are used while look-ups fail; then the pool is empty; "
        "0 is for ever",
    )


class Dns(Lookup):
    """Workers by the records of one name; a text is the name and the port, as ``prefill:8000``."""

    name: HostName = Field(
        description="the name, such as prefill.default.svc.cluster.local; without a dot at its end, the system's "
        "search list applies"
    )
    port: Port | None = Field(None, description="the workers' port; SRV records bring their own")
    records: Literal["address", "a", "aaaa", "srv"] = Field(
        "address",
        description="what is asked for: a, aaaa, srv, or address, which is A, and AAAA where there is no A",
    )
    resolvers: Annotated[tuple[NameServer, ...], Items] = Field(
        (), description="name servers, as IP or IP:port, which are asked for the name as it is; none is the system's"
    )
    timeout: PositiveDuration = Field(5.0, description="one look-up, over all name servers")
    min_interval: PositiveDuration = Field(
        5.0, description="least time between two look-ups, where records may be kept for less"
    )
    max_interval: PositiveDuration = Field(
        30.0, description="most time between two look-ups, where records may be kept for longer"
    )

    @model_validator(mode="before")
    @classmethod
    def _read_text(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        if "://" in value:
            raise ValueError(f"{value!r} is a URL, write only name and port, and scheme: https where it is needed")
        name, port = split_host_port(value.strip())
        return {"name": name, "port": port}

    def __str__(self) -> str:
        return f"the workers that DNS has for {self.name}" + (f" on port {self.port}" if self.port else "")

    def _faults(self) -> Iterator[tuple[str, str]]:
        if self.records == "srv" and self.port is not None:
            yield "port", "SRV records bring the port of each worker, take the key out"
        if self.records != "srv" and self.port is None:
            yield "port", "missing: write the workers' port, such as 8000, or records: srv"
        if self.max_interval < self.min_interval:
            yield "max_interval", "is less than min_interval, write a longer one"


class _TextToo:
    """Says in the JSON Schema that a section may be written as a text."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        text = {"type": "string", "pattern": "^[^:/]+:[0-9]+$", "examples": ["prefill.default.svc.cluster.local:8000"]}
        return {"anyOf": [text, handler(schema)]}


DnsOrText = Annotated[Dns, _TextToo()]


class Kubernetes(Lookup):
    """Workers by a Service's EndpointSlices, or pods by their labels."""

    service: Label | None = Field(None, description="name of the Service whose ready endpoints are the workers")
    selector: str | None = Field(
        None,
        min_length=1,
        description="label selector of the pods that are the workers, such as llm-d.ai/role=prefill; either this or "
        "service",
    )
    namespace: Label | None = Field(
        None, description="where they are; unset is the coordinator's own, or that of the kubeconfig's context"
    )
    port: NamedPort | None = Field(
        None, description="the workers' port, by number or name; may be left out where a Service has only one"
    )
    kubeconfig: str | None = Field(
        None,
        min_length=1,
        description="file that says how the API server is reached; unset is the pod's service account, and outside of "
        "a cluster KUBECONFIG or ~/.kube/config",
    )
    context: str | None = Field(None, min_length=1, description="context of the kubeconfig; unset is its current one")

    def __str__(self) -> str:
        what = f"endpoints of the Service {self.service}" if self.service else f"pods {self.selector}"
        return f"the ready {what} in Kubernetes"

    def _faults(self) -> Iterator[tuple[str, str]]:
        if self.service is None and self.selector is None:
            yield "", "names no workers, write service: NAME, or selector: llm-d.ai/role=prefill"
        elif self.service is not None and self.selector is not None:
            yield "selector", "the workers are found in one way, take out service or selector"
        if self.selector is not None and self.port is None:
            yield "port", "missing: write the pods' port, such as 8000 or the name of a container's port"
