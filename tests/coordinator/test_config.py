"""One file, the environment over it, and every fault of both as one sentence."""

# ruff: noqa: E501  # a sentence stands on one line, as the operator reads it
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from coordinator import headers
from coordinator.config import Config, ConfigError, load
from coordinator.settings.units import ListenAddr
from envelope.connectors import KV_CONNECTORS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

STEPS = "pipeline: {steps: [{type: decode}]}\n"


@pytest.fixture
def read(tmp_path: Path):
    """Load a text as the file ``pd.yaml``."""

    def load_text(text: str | bytes, environ: Mapping[str, str] | None = None) -> Config:
        file = tmp_path / "pd.yaml"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load(str(file), environ or {})

    return load_text


@pytest.fixture
def refused(read, tmp_path: Path):
    """Return the sentences that a text is refused with, the folder of the file taken off."""

    def sentences(text: str | bytes, environ: Mapping[str, str] | None = None) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            read(text, environ)
        return [problem.replace(f"{tmp_path}/", "") for problem in caught.value.problems]

    return sentences


def test_defaults_are_those_of_llm_d(read) -> None:
    config = read(STEPS)
    server = config.server
    assert (config.log_level, config.log_format, config.tracing) == ("info", "json", False)
    assert server.listen_addr == ListenAddr(None, 8080)
    assert (server.read_timeout, server.write_timeout, server.shutdown_timeout) == (30.0, 120.0, 25.0)
    assert server.max_request_body_size == 64
    assert config.pipeline.kv_connector == "kv-shared-storage"
    assert config.pipeline.ec_connector == "ec-shared-storage"
    assert config.pipeline.use_openai_format is True
    assert config.pipeline.forward_response_headers == ("x-llm-d-disagg-revision",)
    gateway = read("gateway: {address: 'http://g'}\n" + STEPS).gateway
    assert (gateway.max_idle_conns_per_host, gateway.idle_conn_timeout) == (100, 90.0)


def test_defaults_that_differ_from_llm_d_are_plain_http_one_port_and_no_limit_on_a_gateway(read) -> None:
    config = read("gateway: {address: 'http://g'}\n" + STEPS)
    assert config.server.secure_serving is False
    assert config.server.metrics_port is None
    assert config.gateway.timeout == 0


def test_the_connectors_are_those_that_the_envelope_knows(read) -> None:
    for name in KV_CONNECTORS:
        assert read(f"pipeline: {{kv_connector: {name}, steps: [{{type: decode}}]}}").pipeline.kv_connector == name


@pytest.mark.parametrize(
    ("written", "level"),
    [
        ("1", "warning"), ("2", "info"), ("3", "debug"), ("4", "debug"), ("5", "trace"),
        ("'2'", "info"), ("warning", "warning"), ("DEBUG", "debug"), ("trace", "trace"),
    ],
)  # fmt: skip
def test_log_level_is_a_number_of_llm_d_or_a_name(read, written: str, level: str) -> None:
    assert read(f"log_level: {written}\n" + STEPS).log_level == level


def test_a_section_or_key_without_a_value_is_one_that_is_not_there(read) -> None:
    config = read("server:\ngateway:\npools:\npipeline: {steps: [{type: decode, params: }], kv_connector: }\n")
    assert config == read(STEPS)


def test_json_is_accepted_because_it_is_yaml(read) -> None:
    assert read('{"pipeline": {"steps": [{"type": "decode"}]}}') == read(STEPS)


def test_numbers_and_booleans_in_quotes_are_read_as_templates_write_them(read) -> None:
    text = "server: {max_request_body_size: '8', metrics_port: '9090'}\n"
    config = read(text + "pipeline: {use_openai_format: 'false', steps: [{type: decode}]}\n")
    assert (config.server.max_request_body_size, config.server.metrics_port) == (8, 9090)
    assert config.pipeline.use_openai_format is False


def test_an_alias_and_a_merge_key_stand_for_what_they_name(read) -> None:
    config = read(
        "pools:\n"
        "  prefill: &pool {endpoints: ['http://a'], policy: least_inflight}\n"
        "  decode: {<<: *pool, endpoints: ['http://b']}\n" + STEPS
    )
    assert config.pools.decode.policy == "least_inflight"
    assert config.pools.decode.endpoints == ("http://b",)


def test_a_configuration_does_not_change_after_it_was_read(read) -> None:
    with pytest.raises(ValueError, match="frozen"):
        read(STEPS).server.read_timeout = 1.0


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "pd.yaml: the file is empty, write at least a pipeline with its steps"),
        ("# nothing\n", "pd.yaml: the file is empty, write at least a pipeline with its steps"),
        ("- a", "pd.yaml: the file is not a mapping, write sections such as 'pipeline:' at its top"),
        ("a: 1\na: 2", "pd.yaml: line 2, column 1: the key a stands twice in one mapping, take one out"),
        ("a: {b: 1, b: 2}", "pd.yaml: line 1, column 11: the key b stands twice in one mapping, take one out"),
        ("\ta: b", "pd.yaml: line 1, column 1: a tab cannot indent YAML, write spaces"),
        ("a: !x y", "pd.yaml: line 1, column 4: tags such as !name have no meaning here, take it out"),
        ("a: b: c", "pd.yaml: line 1, column 5: is not YAML: mapping values are not allowed here"),
        ("a: *b", "pd.yaml: line 1, column 4: is not YAML: found undefined alias 'b'"),
        ("? [a]\n: b", "pd.yaml: line 1, column 3: is not YAML: found unhashable key"),
        ("a: 1\n---\nb: 2", "pd.yaml: line 2, column 1: is not YAML: but found another document"),
        (b"a: \xff", "pd.yaml: byte 3 is not UTF-8, save the file as UTF-8"),
        ("[" * 3000, "pd.yaml: is nested too deeply, write it flatter"),
        ("a: " + "9" * 5000, "pd.yaml: holds a number with too many digits, put it in quotes if it is a text"),
    ],
)
def test_a_file_that_is_no_yaml_mapping_is_refused_with_its_line(refused, text: str | bytes, sentence: str) -> None:
    assert refused(text) == [sentence]


def test_a_control_character_is_refused(refused) -> None:
    (sentence,) = refused("a: \x00")
    assert sentence.startswith("pd.yaml: is not YAML: ")


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(f"{tmp_path}/absent.yaml", {})
    assert caught.value.problems == [f"{tmp_path}/absent.yaml: cannot be read: No such file or directory"]
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(str(tmp_path), {})


SERVER = [
    ("listen_addr: 8080", "listen_addr: 8080 is not an address to listen on, write ':8080' in quotes"),
    ("listen_addr: localhost", "listen_addr: 'localhost' names no port, write 'localhost:8080'"),
    ("read_timeout: 30", "read_timeout: 30 has no unit, write 30s"),
    ("read_timeout: 1:30", "read_timeout: '1:30' is not a duration, write it as 500ms, 30s, 2m or 1h30m"),
    ("read_timeout: 2001-01-01", "read_timeout: '2001-01-01' is not a duration, write it as 500ms, 30s, 2m or 1h30m"),
    ("write_timeout: -1s", "write_timeout: -1s is negative, write a duration such as 30s"),
    ("readiness_interval: 0", "readiness_interval: 0 is not possible here, write a duration such as 5s"),
    ("max_request_body_size: 0", "max_request_body_size: 0 is too small, write at least 1 (megabyte)"),
    (
        "max_request_body_size: 64MB",
        "max_request_body_size: '64MB' is not a whole number of megabytes, write a number such as 64",
    ),
    ("max_header_size: x", "max_header_size: 'x' is not a whole number, write one"),
    ("max_header_size: 1.5", "max_header_size: 1.5 is not a whole number, write one"),
    ("max_header_size: true", "max_header_size: true is not a whole number, write a number such as 1"),
    ("metrics_port: true", "metrics_port: true is not a whole number, write a number such as 1"),
    ("metrics_port: 8080", "metrics_port: 8080 is listen_addr's port too, take the key out to have /metrics there"),
    ("metrics_port: 99999", "metrics_port: 99999 is too large, write at most 65535"),
    ("max_concurrency: -1", "max_concurrency: -1 is too small, write at least 0"),
    ("queue_timeout: 5", "queue_timeout: 5 has no unit, write 5s"),
    (
        "secure_serving: true",
        "cert_path: missing: write the folder that holds tls.crt and tls.key, or secure_serving: false",
    ),
    (
        "cert_path: /certs",  # llm-d would serve TLS with it
        "cert_path: means nothing without TLS, which is off by default here: write secure_serving: true too",
    ),
    (
        "tls_min_version: VersionTLS11",
        "tls_min_version: 'VersionTLS11' is not a version that is safe to serve, write VersionTLS12 or VersionTLS13",
    ),
    (
        "tls_cipher_suites: [ECDHE-ECDSA-AES256-GCM-SHA384]",
        "tls_cipher_suites[0]: 'ECDHE-ECDSA-AES256-GCM-SHA384' is not the name in Go of a suite with ECDHE, "
        "write TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384 for one",
    ),
    (
        "tls_cipher_suites: [TLS_RSA_WITH_RC4_128_SHA]",
        "tls_cipher_suites[0]: 'TLS_RSA_WITH_RC4_128_SHA' is not the name in Go of a suite with ECDHE, "
        "write TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256 for one",
    ),
    (
        "tls_cipher_suites: [TLS_AES_128_GCM_SHA256]",
        "tls_cipher_suites[0]: TLS_AES_128_GCM_SHA256 is of TLS 1.3, whose suites are always all on: take it out",
    ),
    (
        "secure_serving: true, cert_path: /c, tls_min_version: VersionTLS13, "
        "tls_cipher_suites: [TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256]",
        "tls_cipher_suites: are of TLS 1.2, which VersionTLS13 does not serve: take one of the two out",
    ),
    (
        "metrics_cert_dir: /certs",
        "metrics_cert_dir: there is no metrics port of its own, write metrics_port or take this out",
    ),
    ("api_keys: {a: SECRET}", "api_keys: the keys are not a list, write one '- key' per line"),
    ("api_keys: [12345]", "api_keys: this key is not a text, put it in quotes"),
    (
        "api_keys: ['SECRET two']",
        "api_keys: this key has a blank or a character that no header can carry, write a key without it",
    ),
    ("api_keys: ['']", "api_keys: this key is empty or not set, and a key should be there"),
    (
        "api_keys: ['env:SECRET-1']",
        "api_keys: env: is followed by the name of an environment variable, such as env:DECODE_API_KEY",
    ),
    ("readtimeout: 3s", "readtimeout: unknown key, did you mean read_timeout?"),
    ("listen-addr: ':1'", "listen-addr: unknown key, did you mean listen_addr?"),
    ("kv_connector: kv-nixl", "kv_connector: unknown key here, did you mean pipeline.kv_connector?"),
]


@pytest.mark.parametrize(("line", "sentence"), SERVER)
def test_what_is_wrong_with_the_server_section(refused, line: str, sentence: str) -> None:
    assert refused(f"server: {{{line}}}\n" + STEPS) == [f"pd.yaml: server.{sentence}"]


POOL = [
    ("{}", ": the pool names no workers, write endpoints: [http://host:8000], dns:, kubernetes:, or header: with allow:"),
    ("{endpoints: []}", ".endpoints: the list is empty, write at least one worker such as http://10.0.0.1:8000"),
    ("{endpoints: ['http://a', 'http://a:80/']}", ".endpoints: http://a:80 stands twice, take one out"),
    ("{endpoints: ['http://a/v1']}", ".endpoints[0]: 'http://a/v1' has more than host and port, write http://a: a leg brings its path"),
    ("{endpoints: ['http://a'], allow: [b]}", ".allow: belongs to header, and the workers are known here: take the key out"),
    ("{endpoints: ['https://a'], ca_file: /x, insecure_skip_verify: true}", ": with insecure_skip_verify nothing is verified by ca_file: take one of the two out"),
    ("{endpoints: ['http://a'], api_key: 12345}", ".api_key: this key is not a text, put it in quotes"),
    ("{endpoints: ['http://a'], max_inflight: -1}", ".max_inflight: -1 is too small, write at least 0"),
    ("{endpoints: {a: b}}", ".endpoints: {'a': 'b'} is not a list, write [a, b] or one '- item' per line"),
    ("{endpoints: ['http://a'], header: x-a, allow: [b]}", ".header: a pool names its workers in one way, take out endpoints or header"),
    ("{endpoints: ['http://a'], policy: leastinflight}", ".policy: 'leastinflight' is not one of round_robin, random, power_of_two, least_inflight, prefix_affinity, load_aware, did you mean least_inflight?"),
    ("{endpoints: ['http://a'], policy_params: {max_load: 2}}", ".policy_params: max_load means nothing to round_robin: take it out, or write policy: prefix_affinity"),
    ("{endpoints: ['http://a'], policy: prefix_affinity, policy_params: {stale_after: 2s}}", ".policy_params: stale_after means nothing to prefix_affinity: take it out, or write policy: load_aware"),
    ("{endpoints: ['http://a'], health: {ejection_time: 10m}}", ".health.max_ejection_time: is shorter than ejection_time, write the longer of both here"),
    ("{header: x-a, allow: [b], health: {failures: 1}}", ".health: the header names the worker, so there is none to pick: take the key out"),
    ("{header: x-a}", ".allow: missing: whoever can send a request names the worker, so write which may be called, such as ['10.0.0.0/8:8000']"),
    ("{header: x-a, allow: []}", ".allow: missing: whoever can send a request names the worker, so write which may be called, such as ['10.0.0.0/8:8000']"),
    ("{header: x-a, allow: ['10.0.0.1/8']}", ".allow[0]: '10.0.0.1/8' has bits set outside its mask, write 10.0.0.0/8"),
    ("{header: x-a, allow: [b], policy: round_robin}", ".policy: the header names the worker, so there is none to pick: take the key out"),
    ("{header: 'x a', allow: [b]}", ".header: 'x a' is not a header name, write one such as x-prefiller-host-port"),
    ("{header: Authorization, allow: [b]}", ".header: 'Authorization' belongs to one connection, one body or one leg, write another header"),
    ("{dns: 'a:80', endpoints: ['http://a']}", ".dns: a pool names its workers in one way, take out endpoints or dns"),
    ("{kubernetes: {service: a}, header: x-a, dns: 'a:80'}", ".header: a pool names its workers in one way, take out dns or kubernetes or header"),
    ("{dns: 'a:80', allow: [b]}", ".allow: belongs to header, and the workers are known here: take the key out"),
    ("{dns: a}", ".dns.port: missing: write the workers' port, such as 8000, or records: srv"),
    ("{dns: {port: 80}}", ".dns.name: missing, and has no default: write the name, such as prefill.default.svc.cluster.local; without a dot at its end, the system's search list applies"),
    ("{dns: {name: a b, port: 80}}", ".dns.name: 'a b' is not a DNS name, write one such as prefill.default.svc.cluster.local"),
    ("{dns: '10.0.0.1:80'}", ".dns.name: '10.0.0.1' is not a DNS name, write one such as prefill.default.svc.cluster.local"),
    ("{dns: 'http://a:80'}", ".dns: 'http://a:80' is a URL, write only name and port, and scheme: https where it is needed"),
    ("{dns: {name: a, port: 0}}", ".dns.port: 0 is too small, write at least 1"),
    ("{dns: {name: _http._tcp.a, port: 80, records: srv}}", ".dns.port: SRV records bring the port of each worker, take the key out"),
    ("{dns: {name: a, port: 80, records: cname}}", ".dns.records: 'cname' is not one of address, a, aaaa, srv"),
    ("{dns: {name: a, port: 80, resolvers: [ns.local]}}", ".dns.resolvers[0]: 'ns.local' is not the IP address of a name server, write one such as 10.96.0.10"),
    ("{dns: {name: a, port: 80, resolvers: ['10.0.0.1:0']}}", ".dns.resolvers[0]: '0' is not a port, write a number from 1 to 65535"),
    ("{dns: {name: a, port: 80, min_interval: 40s}}", ".dns.max_interval: is less than min_interval, write a longer one"),
    ("{dns: {name: a, port: 80, keep: 3}}", ".dns.keep: 3 has no unit, write 3s"),
    ("{dns: {name: a, port: 80, ttl: 3}}", ".dns.ttl: unknown key, the keys here are scheme, keep, name, port, records, resolvers, timeout, min_interval, max_interval"),
    ("{kubernetes: {}}", ".kubernetes: names no workers, write service: NAME, or selector: llm-d.ai/role=prefill"),
    ("{kubernetes: {service: a, selector: b, port: 80}}", ".kubernetes.selector: the workers are found in one way, take out service or selector"),
    ("{kubernetes: {selector: llm-d.ai/role=decode}}", ".kubernetes.port: missing: write the pods' port, such as 8000 or the name of a container's port"),
    ("{kubernetes: {service: a.default.svc}}", ".kubernetes.service: 'a.default.svc' is not a name in Kubernetes, write lower-case letters, digits and dashes"),
    ("{kubernetes: {service: a, port: Http}}", ".kubernetes.port: 'Http' is no port, write its number, or the name that it has in Kubernetes"),
    ("{kubernetes: {service: a, port: 70000}}", ".kubernetes.port: '70000' is not a port, write a number from 1 to 65535"),
    ("{kubernetes: {service: a, scheme: tcp}}", ".kubernetes.scheme: 'tcp' is not one of http, https"),
    ("{endpoints: ['http://a'], bootstrap_port: 9000}", ": bootstrap_port is a port of prefill workers: write it in pools.prefill"),
    ("{endpoints: ['http://a'], bootstrap_port: 0}", ".bootstrap_port[0]: 0 is too small, write at least 1"),
    ("{endpoints: ['http://a'], bootstrap_port: [1, 2]}", ".bootstrap_port: a list has one port for each of endpoints, in their order; one number is for all"),
    ("{header: x-a, allow: [b], bootstrap_port: [1, 2]}", ".bootstrap_port: a list has one port for each of endpoints, in their order; one number is for all"),
    ("{endpoint: ['http://a'], endpoints: ['http://a']}", ".endpoint: unknown key, did you mean endpoints?"),
]  # fmt: skip


# (the section, what it is read as)
LOOKUPS = [
    ("dns: 'Prefill.Default.svc:8000'", {"name": "prefill.default.svc", "port": 8000, "records": "address", "keep": 600.0}),
    ("dns: {name: _http._tcp.a.b., records: srv}", {"name": "_http._tcp.a.b.", "port": None}),
    ("dns: {name: a, port: '80', resolvers: '10.0.0.1, ::1'}", {"port": 80, "resolvers": ("10.0.0.1:53", "[::1]:53")}),
    ("dns: {name: a, port: 80, resolvers: ['[::1]:5353']}", {"resolvers": ("[::1]:5353",), "min_interval": 5.0}),
    ("kubernetes: {service: prefill}", {"service": "prefill", "port": None, "namespace": None, "scheme": "http"}),
    ("kubernetes: {service: prefill, port: '8000'}", {"port": 8000}),
    ("kubernetes: {selector: 'llm-d.ai/role in (prefill,both)', port: http}", {"port": "http", "keep": 600.0}),
    ("kubernetes: {service: prefill, keep: 0, scheme: https}", {"keep": 0.0, "scheme": "https"}),
]  # fmt: skip


@pytest.mark.parametrize(("section", "expected"), LOOKUPS)
def test_where_workers_are_looked_up(read, section: str, expected: dict[str, Any]) -> None:
    lookup = read(f"pools: {{prefill: {{{section}}}}}\n" + STEPS).pools.prefill.lookup
    assert {name: getattr(lookup, name) for name in expected} == expected


@pytest.mark.parametrize(("pool", "sentence"), POOL)
def test_what_is_wrong_with_a_pool(refused, pool: str, sentence: str) -> None:
    assert refused(f"pools: {{decode: {pool}}}\n" + STEPS) == [f"pd.yaml: pools.decode{sentence}"]


PIPELINE = [
    ("kv_connector: kv-nixel", "kv_connector: 'kv-nixel' is not one of kv-shared-storage, kv-nixl, kv-nixl-push, kv-lmcache, kv-mooncake, kv-offloading, kv-sglang, did you mean kv-nixl?"),
    ("ec_connector: foo", "ec_connector: 'foo' is not one of ec-shared-storage, ec-nixl"),
    ("use_openai_format: maybe", "use_openai_format: 'maybe' is neither true nor false, write one of them"),
    ("use_openai_format: [true]", "use_openai_format: [True] is neither true nor false, write one of them"),
    ("on_missing_handover: decode-alone", "on_missing_handover: 'decode-alone' is not one of fail, decode_alone, did you mean decode_alone?"),
    ("forward_response_headers: [content-length]", "forward_response_headers[0]: 'content-length' belongs to one connection, one body or one leg, write another header"),
    ("forward_response_headers: ['a:b']", "forward_response_headers[0]: 'a:b' is not a header name, write one such as x-prefiller-host-port"),
    ("forward_response_headers: [3]", "forward_response_headers[0]: 3 is not a text, put it in quotes"),
    ("kv_conector: kv-nixl", "kv_conector: unknown key, did you mean kv_connector?"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "sentence"), PIPELINE)
def test_what_is_wrong_with_the_pipeline_section(refused, line: str, sentence: str) -> None:
    assert refused(f"pipeline: {{{line}, steps: [{{type: decode}}]}}") == [f"pd.yaml: pipeline.{sentence}"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("server: {}", "pipeline: missing, and has no default: write what happens to a request"),
        ("pipeline: {}", "pipeline.steps: missing, and has no default: write the steps, in the order in which they run"),
        ("pipeline: {steps: []}", "pipeline.steps: the list is empty, write at least 1"),
        ("pipeline: {steps: decode}", "pipeline.steps: 'decode' is not a list, write [a, b] or one '- item' per line"),
        ("pipeline: {steps: [decode]}", "pipeline.steps[0]: 'decode' is not a mapping, write 'key: value' lines under it"),
        ("pipeline: {steps: [{params: {}}]}", "pipeline.steps[0].type: missing, and has no default: write the step's type, such as decode"),
        ("pipeline: {steps: [{type: decode, param: {}}]}", "pipeline.steps[0].param: unknown key, did you mean params?"),
        ("pipeline: {steps: [{type: decode, params: []}]}", "pipeline.steps[0].params: [] is not a mapping, write 'key: value' lines under it"),
        ("log_level: verbse\n" + STEPS, "log_level: 'verbse' is not one of 1 (warning), 2 (info), 3 (verbose), 4 (debug), 5 (trace), did you mean 3 (verbose)?"),
        ("log_level: 9\n" + STEPS, "log_level: 9 is not one of 1 (warning), 2 (info), 3 (verbose), 4 (debug), 5 (trace)"),
        ("log_format: xml\n" + STEPS, "log_format: 'xml' is not one of json, human"),
        ("tracing: 3\n" + STEPS, "tracing: 3 is neither true nor false, write one of them"),
        ("server: 3\n" + STEPS, "server: 3 is not a mapping, write 'key: value' lines under it"),
        ("sever: {}\n" + STEPS, "sever: unknown key, did you mean server?"),
        ("zzz: {}\n" + STEPS, "zzz: unknown key, the keys here are log_level, log_format, tracing, config, server, gateway, pools, pipeline"),
        ("read_timeout: 3s\n" + STEPS, "read_timeout: unknown key here, did you mean server.read_timeout?"),
        ("1: a\n" + STEPS, "the key 1 is not a text, put it in quotes"),
        ("gateway: {timeout: 3s}\n" + STEPS, "gateway.address: missing, and has no default: write the base URL of the gateway, such as http://inference-gateway:80"),
        ("gateway: {address: 'g:80'}\n" + STEPS, "gateway.address: 'g:80' has no scheme, write http://g:80"),
        ("pools: {encode: {endpoints: ['http://a'], max_inflight: 3}}\n" + STEPS, "pools.encode: max_inflight counts requests, and one may make many encode legs: bound them by max_parallel"),
        ("pools: {render: {header: x-render, allow: [a]}}\n" + STEPS, "pools.render: no router in front names render servers, write endpoints, dns or kubernetes"),
    ],
)  # fmt: skip
def test_what_is_wrong_elsewhere(refused, text: str, sentence: str) -> None:
    assert refused(text) == [f"pd.yaml: {sentence}"]


def test_every_problem_is_told_at_once(refused) -> None:
    text = "log_levl: 2\nserver: {read_timeout: 30}\npools: {prefill: {}}\npipeline: {steps: [{typ: decode}]}\n"
    assert refused(text, {"COORDINATOR_SERVER_LISTEN_ADR": ":1"}) == [
        "environment variable COORDINATOR_SERVER_LISTEN_ADR: no such key in the configuration, "
        "did you mean COORDINATOR_SERVER_LISTEN_ADDR?",
        "pd.yaml: server.read_timeout: 30 has no unit, write 30s",
        "pd.yaml: pools.prefill: the pool names no workers, write endpoints: [http://host:8000], dns:, kubernetes:, or "
        "header: with allow:",
        "pd.yaml: pipeline.steps[0].type: missing, and has no default: write the step's type, such as decode",
        "pd.yaml: pipeline.steps[0].typ: unknown key, did you mean type?",
        "pd.yaml: log_levl: unknown key, did you mean log_level?",
    ]


def test_no_sentence_is_pydantic_s_own(refused) -> None:
    every = [f"server: {{{line}}}\n{STEPS}" for line, _ in SERVER] + [
        f"pools: {{decode: {p}}}\n{STEPS}" for p, _ in POOL
    ]
    for text in every:
        assert not [s for s in refused(text) if "Input should" in s or "pydantic" in s or "type=" in s]


def test_a_long_value_is_cut_short(refused) -> None:
    (sentence,) = refused(f"log_format: {'x' * 500}\n" + STEPS)
    assert len(sentence) < 120


@pytest.mark.parametrize(
    "header",
    [
        "connection",
        "Transfer-Encoding",
        "host",
        "content-type",
        "authorization",
        "Cookie",
        "x-request-id",
        "epp-profile",
    ],
)
def test_headers_that_are_not_a_leg_s_to_pass_on_are_refused(refused, header: str) -> None:
    text = f"pipeline: {{forward_response_headers: [{header}], steps: [{{type: decode}}]}}"
    assert "belongs to one connection" in refused(text)[0]


@pytest.mark.parametrize("header", sorted(headers.HOP_BY_HOP | headers.FRAMING))
def test_no_header_that_a_leg_drops_can_be_forwarded(refused, header: str) -> None:
    text = f"pipeline: {{forward_response_headers: [{header}], steps: [{{type: decode}}]}}"
    assert "belongs to one connection" in refused(text)[0]


def test_forwarded_headers_are_compared_without_case(read) -> None:
    text = "pipeline: {forward_response_headers: [X-Disagg-Slice], steps: [{type: decode}]}"
    assert read(text).pipeline.forward_response_headers == ("x-disagg-slice",)
