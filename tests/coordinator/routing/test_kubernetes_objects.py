"""Which endpoints and pods are workers, and under which port."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.routing.kubernetes_objects import PortUnknown, of_pods, of_slices
from tests.kubernetes_api import endpoint_slice, pod

# (conditions of an endpoint, whether it is used); what is not said is None
CONDITIONS: list[tuple[dict[str, Any] | None, bool]] = [
    (None, True),
    ({}, True),
    ({"ready": True}, True),
    ({"ready": True, "serving": True, "terminating": False}, True),
    ({"ready": False}, False),
    ({"ready": False, "serving": False, "terminating": False}, False),
    ({"ready": False, "serving": True, "terminating": True}, False),
    ({"ready": None, "serving": None, "terminating": None}, True),
    # A Service with publishNotReadyAddresses calls all of them ready.
    ({"ready": True, "serving": False, "terminating": False}, False),
    ({"ready": True, "serving": True, "terminating": True}, False),
]


@pytest.mark.parametrize(("conditions", "used"), CONDITIONS)
def test_an_endpoint_is_used_while_it_serves_and_does_not_end(conditions: dict[str, Any] | None, used: bool) -> None:
    assert of_slices([endpoint_slice("a", ("10.0.0.1", conditions))], None) == ({"10.0.0.1:8000"} if used else set())


def test_a_service_of_many_endpoints_has_many_slices() -> None:
    slices = [endpoint_slice("a", "10.0.0.1", "10.0.0.2"), endpoint_slice("b", "10.0.0.3", "10.0.0.2")]
    assert of_slices(slices, None) == {"10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"}


def test_a_slice_whose_endpoints_are_null_has_none() -> None:
    empty = endpoint_slice("a")
    assert empty["endpoints"] is None
    assert of_slices([empty], None) == set()
    assert of_slices([], None) == set()


def test_of_a_service_of_both_families_one_counts() -> None:
    both = [endpoint_slice("b", "2001:db8::1", family="IPv6"), endpoint_slice("a", "10.0.0.1")]
    assert of_slices(both, None) == {"10.0.0.1:8000"}
    assert of_slices(both[:1], None) == {"[2001:db8::1]:8000"}
    assert of_slices([both[0], endpoint_slice("a", ("10.0.0.1", {"ready": False}))], None) == {"[2001:db8::1]:8000"}


TWO = ((8000, "http"), (9090, "metrics"))
# (ports of the slice, the configured one, what it comes to)
PORTS: list[tuple[Any, int | str | None, int]] = [
    (((8000, "http"),), None, 8000),
    (((8000, None),), None, 8000),
    (TWO, "http", 8000),
    (TWO, "metrics", 9090),
    (TWO, 9090, 9090),
    ((), 8000, 8000),
]


@pytest.mark.parametrize(("ports", "port", "number"), PORTS)
def test_the_port_is_by_number_or_name_or_the_only_one(ports: Any, port: int | str | None, number: int) -> None:
    assert of_slices([endpoint_slice("a", "10.0.0.1", ports=ports)], port) == {f"10.0.0.1:{number}"}


# (ports of the slice, the configured one, the sentence)
NO_PORT: list[tuple[Any, int | str | None, str]] = [
    (TWO, None, "the Service's ports are 8000 (http), 9090 (metrics): write one of them as port"),
    (TWO, 8001, "8001 is none of the Service's ports, which are 8000 (http), 9090 (metrics)"),
    (TWO, "grpc", "grpc is none of the Service's ports, which are 8000 (http), 9090 (metrics)"),
    ((), "http", "http is none of the Service's ports, which are none"),
    ((), None, "the Service's ports are none: write one of them as port"),
]


@pytest.mark.parametrize(("ports", "port", "sentence"), NO_PORT)
def test_a_port_that_cannot_be_told_is_a_sentence(ports: Any, port: int | str | None, sentence: str) -> None:
    with pytest.raises(PortUnknown) as caught:
        of_slices([endpoint_slice("a", "10.0.0.1", ports=ports)], port)
    assert str(caught.value) == sentence


# (a pod, whether it is used)
PODS = [
    (pod("a", "10.0.0.1"), True),
    (pod("a", "10.0.0.1", ready=False), False),
    (pod("a", "10.0.0.1", ending=True), False),
    (pod("a", None), False),
    ({"metadata": {"name": "a"}, "spec": {"containers": []}, "status": {"phase": "Pending"}}, False),
]


@pytest.mark.parametrize(("each", "used"), PODS)
def test_a_pod_is_used_while_it_is_ready_and_does_not_end(each: dict[str, Any], used: bool) -> None:
    assert of_pods([each], 8000) == ({"10.0.0.1:8000"} if used else set())


def test_a_pod_s_port_may_be_a_name_also_of_a_native_sidecar() -> None:
    assert of_pods([pod("a", "2001:db8::1")], "http") == {"[2001:db8::1]:8000"}
    beside = pod("a", "10.0.0.1", ports=[{"containerPort": 8200}])
    beside["spec"]["initContainers"] = [{"name": "proxy", "ports": [{"containerPort": 8443, "name": "http"}]}]
    assert of_pods([beside], "http") == {"10.0.0.1:8443"}
    with pytest.raises(PortUnknown, match=r"^no container of the pod a has a port that is called grpc$"):
        of_pods([beside], "grpc")
