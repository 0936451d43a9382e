"""Workers out of Kubernetes' objects: EndpointSlices and Pods, as the API server writes them; pure.

Source: Kubernetes API reference, ``discovery.k8s.io/v1`` EndpointSlice and ``v1`` Pod.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    Object = Mapping[str, Any]

# A Service of both families has a slice of each kind for the same pods: one of them must do.
_FAMILIES = ("IPv4", "IPv6", "FQDN")


class PortUnknown(ValueError):
    """The port cannot be told; the text says what to write."""


def of_slices(slices: Iterable[Object], port: int | str | None) -> set[str]:
    """Return ``host:port`` of the endpoints that serve and do not end.

    Args:
        port: the configured one; None where a Service has only one.

    Raises:
        PortUnknown
    """
    by_family: dict[str, list[Object]] = {family: [] for family in _FAMILIES}
    for each in slices:
        by_family.get(each.get("addressType", "IPv4"), []).append(each)
    chosen = next((found for found in by_family.values() if any(map(_usable, found))), [])
    return {netloc(address, _slice_port(each, port)) for each in chosen for address in _usable(each)}


def of_pods(pods: Iterable[Object], port: int | str) -> set[str]:
    """Return ``host:port`` of the pods that are ready and do not end.

    Raises:
        PortUnknown
    """
    ready = [pod for pod in pods if _is_ready(pod)]
    return {netloc(pod["status"]["podIP"], _pod_port(pod, port)) for pod in ready}


def netloc(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _usable(each: Object) -> list[str]:
    """Return the first address of each endpoint that may be used; the others are of the same pod."""
    endpoints = each.get("endpoints") or ()
    return [endpoint["addresses"][0] for endpoint in endpoints if _serves(endpoint.get("conditions") or {})]


def _serves(conditions: Object) -> bool:
    """Say whether an endpoint serves and does not end.

    ``ready`` alone is not enough: a Service that publishes addresses that are not ready calls each of them ready.
    """
    ready = conditions.get("ready") is not False
    serving = conditions.get("serving")
    return (ready if serving is None else bool(serving)) and not conditions.get("terminating")


def _slice_port(each: Object, port: int | str | None) -> int:
    ports = {named["port"]: named.get("name") or "" for named in each.get("ports") or () if named.get("port")}
    if isinstance(port, int) and (port in ports or not ports):
        return port
    fitting = [number for number, name in ports.items() if port is None or name == port]
    if len(fitting) == 1:
        return int(fitting[0])
    has = ", ".join(f"{number} ({name})" if name else str(number) for number, name in ports.items()) or "none"
    if port is None:
        raise PortUnknown(f"the Service's ports are {has}: write one of them as port")
    raise PortUnknown(f"{port} is none of the Service's ports, which are {has}")


def _is_ready(pod: Object) -> bool:
    status = pod.get("status") or {}
    conditions = status.get("conditions") or ()
    ready = any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
    return ready and bool(status.get("podIP")) and not pod["metadata"].get("deletionTimestamp")


def _pod_port(pod: Object, port: int | str) -> int:
    if isinstance(port, int):
        return port
    for number, name in _container_ports(pod):
        if name == port:
            return number
    raise PortUnknown(f"no container of the pod {pod['metadata']['name']} has a port that is called {port}")


def _container_ports(pod: Object) -> Iterator[tuple[int, str | None]]:
    spec = pod["spec"]
    # Init containers too: a native sidecar is one of them.
    for container in (*(spec.get("containers") or ()), *(spec.get("initContainers") or ())):
        for port in container.get("ports") or ():
            yield port["containerPort"], port.get("name")
