"""One YAML file as frozen models; ``load`` reads it, and says what is wrong with it in sentences.

Keys, meanings and defaults are llm-d's where llm-d has them, so that its ``coordinator.yaml`` runs unchanged.
A key without a value (``server:``) is a key that is not there.

Source: llm-d ``config/coordinator/coordinator.yaml`` and ``pkg/coordinator/config/config.go``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, ValidationError, WithJsonSchema

from coordinator.security.secret import ApiKeys
from coordinator.security.tls import parse_suite, parse_version
from coordinator.settings.environment import overrides, put
from coordinator.settings.outbound import Outbound
from coordinator.settings.pools import Pools
from coordinator.settings.problems import ConfigError, Sources, one_of, sentences
from coordinator.settings.proxied import Routes
from coordinator.settings.section import HeaderName, Section
from coordinator.settings.units import (
    BaseUrl,
    Count,
    Duration,
    Items,
    Listen,
    ListenAddr,
    Megabytes,
    PositiveDuration,
    Whole,
)
from coordinator.settings.yaml_file import read

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["Config", "ConfigError", "Gateway", "Pipeline", "Server", "StepConfig", "load"]

LogLevel = Literal["warning", "info", "debug", "trace"]
OnMissingHandover = Literal["fail", "decode_alone"]

_LEVELS: dict[int, LogLevel] = {1: "warning", 2: "info", 3: "debug", 4: "debug", 5: "trace"}


def _level(value: object) -> object:
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, str) and value.strip().lower() in _LEVELS.values():
        return value.strip().lower()
    if isinstance(value, int) and not isinstance(value, bool) and value in _LEVELS:
        return _LEVELS[value]
    raise ValueError(one_of(value, ["1 (warning)", "2 (info)", "3 (verbose)", "4 (debug)", "5 (trace)"]))


KvConnectorName = Literal[
    "kv-shared-storage",
    "kv-nixl",
    "kv-nixl-push",
    "kv-lmcache",
    "kv-mooncake",
    "kv-offloading",
    "kv-sglang",
]
EcConnectorName = Literal["ec-shared-storage", "ec-nixl"]
TlsVersion = Annotated[str, AfterValidator(parse_version)]
TlsSuites = Annotated[tuple[Annotated[str, AfterValidator(parse_suite)], ...], Items]


class Server(Section):
    """The coordinator's own listener."""

    listen_addr: Listen = Field(
        ListenAddr(None, 8080), description="host:port to listen on; no host is every interface"
    )
    read_timeout: Duration = Field(30.0, description="time for a request's whole body to arrive; 0 is no limit")
    write_timeout: Duration = Field(
        120.0,
        description="time to write a whole answer once it is there, streams exempt; 0 is no limit",
    )
    write_stall_timeout: Duration = Field(
        60.0,
        description="how long a client may take nothing of an answer, streams included, before it is hung up and its "
        "workers are freed; 0 is no limit",
    )
    read_header_timeout: Duration = Field(
        10.0,
        description="time for a request's head to arrive, on a new connection from its start on, and for the TLS "
        "handshake before it; 0 is no limit, but for a minute of the handshake",
    )
    idle_timeout: Duration = Field(
        3630.0,
        description="how long a connection is kept for the client's next request; stay above what the proxy in front "
        "has (Envoy: 1h), or its next request may meet a closing connection; 0 is no limit",
    )
    shutdown_timeout: Duration = Field(
        25.0,
        description="time that requests get to end after SIGTERM; stay below the pod's grace period",
    )
    max_request_body_size: Megabytes = Field(
        64, description="largest request body in megabytes; images sent as data: URIs are inside it"
    )
    metrics_port: Whole | None = Field(
        None,
        le=65535,
        description="own port of /metrics (llm-d: 9090); unset is the main port, 0 or less turns it off",
    )
    max_header_size: Count = Field(
        32768,
        description="largest header field in bytes; routers in front may put long lists into one; all fields together "
        "may have four times as much",
    )
    workers: Count = Field(
        1,
        description="serving processes on the port, for more cores; with more than 1, max_concurrency, queue_size and "
        "max_inflight are divided among them, and least_inflight sees the legs of its own process",
    )
    huge_pages: bool = Field(
        False,
        description="copy the interpreter's code into huge pages, where Linux gives them: 8 % less CPU for 4 MiB "
        "(docs/deploy.md); py-spy and perf may not recognise the process",
    )
    max_concurrency: Whole = Field(
        0, ge=0, description="requests that are worked on at a time, /v1/models aside; 0 is no limit"
    )
    queue_size: Whole = Field(
        100, ge=0, description="requests that may wait for a place, here or at a role; one more is refused with 429"
    )
    queue_timeout: Duration = Field(
        10.0, description="longest wait for a place, then the request is refused with 503; 0 is no limit"
    )
    readiness_interval: PositiveDuration = Field(
        5.0, description="how often /readyz's answer is renewed by asking the workers' /health"
    )
    heartbeat_after: Duration = Field(
        15.0,
        description="silence after which a streaming client is sent a comment line, before its first event too; "
        "from then on an error is an event and no status; 0 is never",
    )
    heartbeat_interval: PositiveDuration = Field(15.0, description="time between such comment lines")
    api_keys: ApiKeys = Field(
        (),
        description="keys of which clients must send one, as Authorization: Bearer or x-api-key; each is the key, "
        "env:NAME or file:PATH; none lets everybody in; /healthz, /health and /readyz stay open, and /metrics on its "
        "own port",
    )
    api_keys_file: str = Field("", description="file with more such keys, one on a line; read again when it changes")
    forward_authorization: bool | None = Field(
        None,
        description="send workers the key that a client sent; unset is false where keys are checked here, else true",
    )
    secure_serving: bool = Field(
        False, description="serve TLS with the certificate in cert_path (llm-d: true, with one of its own making)"
    )
    cert_path: str = Field(
        "", description="folder with tls.crt and tls.key; they are read again when they change, without a restart"
    )
    tls_min_version: TlsVersion = Field(
        "", description="lowest TLS version, VersionTLS12 or VersionTLS13; empty is VersionTLS12"
    )
    tls_cipher_suites: TlsSuites = Field(
        (),
        description="suites of TLS 1.2 by Go's names, such as TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256; empty is Python's "
        "own choice",
    )
    proxied_routes: Routes = Field(
        (),
        description="routes of the worker in pools.decode that are passed on as they are, such as POST /tokenize; "
        "every other one stays out of reach",
    )
    metrics_models: Annotated[tuple[str, ...], Items] = Field(
        (),
        description="models that metrics name beside those that the decode workers list; any other is called other",
    )
    server_timing: bool = Field(
        False, description="tell clients in a Server-Timing header how long each leg took; it tells of the fleet"
    )
    metrics_cert_dir: str = Field(
        "", description="folder with tls.crt and tls.key of the metrics port, which is plain HTTP without it"
    )

    status_page: bool = Field(
        True,
        description="show pools, load and the last requests at /status on metrics_port, without prompts, answers or "
        "keys; there is no page where that port is unset or off",
    )

    @property
    def shows_status(self) -> bool:
        return self.status_page and self.metrics_port is not None and self.metrics_port > 0

    @property
    def checks_keys(self) -> bool:
        return bool(self.api_keys or self.api_keys_file)

    @property
    def forwards_authorization(self) -> bool:
        return not self.checks_keys if self.forward_authorization is None else self.forward_authorization

    def _faults(self) -> Iterator[tuple[str, str]]:
        if self.metrics_port is None and any(route.path == "/metrics" for route in self.proxied_routes):
            yield (
                "proxied_routes",
                "/metrics is the coordinator's own page on this port: write metrics_port to have it elsewhere",
            )
        if self.metrics_port is not None and 0 < self.metrics_port == self.listen_addr.port:
            yield (
                "metrics_port",
                f"{self.metrics_port} is listen_addr's port too, take the key out to have /metrics there",
            )
        if self.secure_serving and not self.cert_path:
            yield "cert_path", "missing: write the folder that holds tls.crt and tls.key, or secure_serving: false"
        if "secure_serving" not in self.model_fields_set:
            for key in ("cert_path", "tls_min_version", "tls_cipher_suites"):
                if getattr(self, key):
                    yield key, "means nothing without TLS, which is off by default here: write secure_serving: true too"
        if self.tls_cipher_suites and self.tls_min_version == "VersionTLS13":
            yield "tls_cipher_suites", "are of TLS 1.2, which VersionTLS13 does not serve: take one of the two out"
        if self.metrics_cert_dir and (self.metrics_port is None or self.metrics_port <= 0):
            yield "metrics_cert_dir", "there is no metrics port of its own, write metrics_port or take this out"


class Gateway(Section, Outbound):
    """One gateway whose endpoint picker chooses the worker of every leg."""

    address: BaseUrl = Field(
        description="the base URL of the gateway, such as http://inference-gateway:80",
    )
    profile_header: Literal["EPP-Profile", "x-llm-d-epp-profile"] = Field(
        "EPP-Profile",
        description="header that tells the endpoint picker a leg's role; newer ones read x-llm-d-epp-profile",
    )
    max_idle_conns_per_host: Count = Field(100, description="keep-alive connections that are kept open")
    idle_conn_timeout: Duration = Field(90.0, description="how long an idle connection is kept; 0 is for ever")
    timeout: Duration = Field(
        0.0,
        description="time until a leg's response headers, which a long prompt or an unstreamed answer may take minutes "
        "for; 0 is no limit (llm-d: 60s)",
    )


class StepConfig(Section):
    """One step of the pipeline."""

    type: str = Field(description="the step's type, such as decode")
    params: dict[str, Any] = Field(default_factory=dict, description="the step's own parameters")


class Pipeline(Section):
    """What happens to a request, and what the steps have in common."""

    kv_connector: KvConnectorName = Field(
        "kv-shared-storage",
        description="how the KV cache gets from prefill to decode: kv-shared-storage, kv-nixl, kv-nixl-push or "
        "kv-lmcache with a prefill and a decode step; kv-mooncake, kv-offloading or kv-sglang with a prefill-decode "
        "step",
    )
    ec_connector: EcConnectorName = Field(
        "ec-shared-storage", description="how encoder output gets to prefill: ec-shared-storage or ec-nixl"
    )
    use_openai_format: bool = Field(
        True,
        description="true sends legs on the client's own path, false as token ids on /inference/v1/generate; "
        "every step but conditional-decode may override it",
    )
    forward_response_headers: Annotated[tuple[HeaderName, ...], Items] = Field(
        ("x-llm-d-disagg-revision",),
        description="headers of a leg's answer that later legs are sent; a client's own are discarded",
    )
    on_missing_handover: OnMissingHandover = Field(
        "fail", description="when prefill leaves nothing for decode: fail the request, or decode_alone"
    )
    on_prefill_failure: Literal["fail", "decode_alone"] = Field(
        "fail", description="when no prefill worker could do its leg: fail the request, or decode_alone"
    )
    on_encode_failure: Literal["fail", "prefill_encodes"] = Field(
        "fail",
        description="when media could not be encoded for prefill to fetch: fail the request, or prefill_encodes it",
    )
    max_handover_age: Duration = Field(
        15.0,
        description="age after which a hand-over is not sent to decode any more; prefill keeps its blocks for 30s; "
        "0 is no limit",
    )
    expose_transfer_params: bool = Field(
        False,
        description="leave the workers' hand-over, which names hosts and ports, in what clients get",
    )
    steps: tuple[StepConfig, ...] = Field(min_length=1, description="the steps, in the order in which they run")


class File(Section):
    """The file itself."""

    watch: bool = Field(
        False,
        description="apply the file when it changes, as SIGHUP does: as a whole or not at all; requests under way end "
        "as they began",
    )


class Config(Section):
    """The whole file."""

    log_level: Annotated[
        LogLevel,
        BeforeValidator(_level),
        WithJsonSchema({"enum": [*_LEVELS, *dict.fromkeys(_LEVELS.values())]}),
    ] = Field("info", description="1 or warning, 2 or info, 3 (verbose) and 4 or debug, 5 or trace")
    log_format: Literal["json", "human"] = Field("json", description="json for machines, human for a terminal")
    tracing: bool = Field(
        False,
        description="export OpenTelemetry spans, to where OTEL_EXPORTER_OTLP_ENDPOINT and its like say; needs the "
        "extra otel; trace context is passed on all the same",
    )
    config: File = Field(default_factory=File, description="the file itself")
    server: Server = Field(default_factory=Server, description="the coordinator's own listener")
    gateway: Gateway | None = Field(None, description="one gateway that picks the worker of every leg")
    pools: Pools = Field(default_factory=Pools, description="the workers of each role, picked here")
    pipeline: Pipeline = Field(description="what happens to a request")

    _sources: Sources = PrivateAttr(default_factory=Sources)

    @property
    def sources(self) -> Sources:
        """Where the values came from, for sentences about them."""
        return self._sources


def load(path: str, environ: Mapping[str, str]) -> Config:
    """Read a file, let the environment override it, and check it against the models.

    Raises:
        ConfigError: with everything that is wrong.
    """
    tree = read(path)
    values, sources, problems = overrides(Config, path, environ)
    for key, value in values.items():
        put(tree, key, value)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        problems += [sources.problem(where, sentence) for where, sentence in sentences(error, Config)]
    if problems:
        raise ConfigError(problems)
    config._sources = sources
    return config
