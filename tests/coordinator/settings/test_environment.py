"""``COORDINATOR_<SECTION>_<KEY>`` wins over the file, and a slip in a name is not silently nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from coordinator.config import Config, ConfigError, load
from coordinator.settings.environment import settable, variable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TEXT = """
server: {read_timeout: 10s}
pools: {decode: &pool {endpoints: ['http://a']}, prefill: *pool}
pipeline: {steps: [{type: decode}]}
"""


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Config]:
    file = tmp_path / "pd.yaml"
    file.write_text(TEXT)
    return lambda **environ: load(str(file), {f"COORDINATOR_{name}": value for name, value in environ.items()})


@pytest.mark.parametrize(
    ("name", "value", "path", "read_as"),
    [
        ("LOG_LEVEL", "4", "log_level", "debug"),
        ("SERVER_READ_TIMEOUT", "2m", "server.read_timeout", 120.0),
        ("SERVER_LISTEN_ADDR", "[::1]:80", "server.listen_addr", "[::1]:80"),
        ("SERVER_METRICS_PORT", "-1", "server.metrics_port", -1),
        ("SERVER_SECURE_SERVING", "false", "server.secure_serving", False),
        ("GATEWAY_ADDRESS", "http://g:80/", "gateway.address", "http://g:80"),
        ("POOLS_DECODE_POLICY", "least_inflight", "pools.decode.policy", "least_inflight"),
        ("POOLS_DECODE_ENDPOINTS", "http://b, http://c", "pools.decode.endpoints", ("http://b", "http://c")),
        ("PIPELINE_USE_OPENAI_FORMAT", "false", "pipeline.use_openai_format", False),
        ("PIPELINE_FORWARD_RESPONSE_HEADERS", "x-a,x-b", "pipeline.forward_response_headers", ("x-a", "x-b")),
        ("PIPELINE_FORWARD_RESPONSE_HEADERS", "[]", "pipeline.forward_response_headers", ()),
    ],
)
def test_a_variable_wins_over_the_file(read, name: str, value: str, path: str, read_as: object) -> None:
    found = read(**{name: value})
    for key in path.split("."):
        found = getattr(found, key)
    assert (str(found) if path == "server.listen_addr" else found) == read_as


def test_an_empty_variable_is_unset(read) -> None:
    assert read(SERVER_READ_TIMEOUT="").server.read_timeout == 10.0


def test_a_variable_for_one_of_two_aliased_pools_leaves_the_other(read) -> None:
    config = read(POOLS_DECODE_POLICY="least_inflight")
    assert config.pools.prefill.policy == "round_robin"


def test_every_key_outside_the_steps_has_a_variable_of_its_own() -> None:
    names = [variable(path) for path in settable(Config)]
    assert len(names) == len(set(names))
    assert {"COORDINATOR_TRACING", "COORDINATOR_POOLS_PREFILL_ALLOW"} <= set(names)
    assert not [name for name in names if "STEPS" in name]


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("SERVER_READ_TIMEOUT", "30", "SERVER_READ_TIMEOUT: server.read_timeout: 30 has no unit, write 30s"),
        (
            "POOLS_DECODE_ENDPOINTS",
            "http://a,b",
            "POOLS_DECODE_ENDPOINTS: pools.decode.endpoints[1]: 'b' has no scheme, write http://b",
        ),
        (
            "SERVER_REAT_TIMEOUT",
            "3s",
            "SERVER_REAT_TIMEOUT: no such key in the configuration, did you mean COORDINATOR_SERVER_READ_TIMEOUT?",
        ),
        ("LOGLEVEL", "3", "LOGLEVEL: no such key in the configuration, did you mean COORDINATOR_LOG_LEVEL?"),
        (
            "SERVERS_LISTEN_ADDR",
            ":1",
            "SERVERS_LISTEN_ADDR: no such key in the configuration, did you mean COORDINATOR_SERVER_LISTEN_ADDR?",
        ),
        ("GATEWAY_XYZ", "1", "GATEWAY_XYZ: no such key in the configuration, unset it"),
        ("PIPELINE_STEPS_0_TYPE", "x", "PIPELINE_STEPS_0_TYPE: steps can only be written in the file, unset it"),
    ],
)
def test_a_variable_s_fault_is_told_with_its_name(read, name: str, value: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(**{name: value})
    assert caught.value.problems == [f"environment variable COORDINATOR_{sentence}"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SERVICE_HOST", "10.0.0.1"),
        ("SERVICE_PORT_HTTP", "80"),
        ("PORT", "tcp://10.0.0.1:80"),
        ("PORT_8080_TCP_ADDR", "10.0.0.1"),
        ("SERVER_SERVICE_HOST", "10.0.0.1"),
        ("SERVER_METRICS_PORT", "tcp://10.0.0.1:80"),
        ("GATEWAY_PORT_80_TCP", "tcp://10.0.0.1:80"),
        ("IMAGE", "x"),
    ],
)
def test_what_kubernetes_sets_for_a_service_called_coordinator_is_left_alone(read, name: str, value: str) -> None:
    assert read(**{name: value}) == read()


def test_a_variable_for_a_section_that_is_no_mapping_leaves_the_fault_to_be_told(tmp_path: Path) -> None:
    file = tmp_path / "pd.yaml"
    file.write_text("server: 3\npipeline: {steps: [{type: decode}]}\n")
    with pytest.raises(ConfigError, match="server: 3 is not a mapping"):
        load(str(file), {"COORDINATOR_SERVER_READ_TIMEOUT": "3s"})
