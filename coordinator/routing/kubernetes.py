"""Workers as Kubernetes knows them: all objects listed once, then watched from that version on.

Objects are read as the JSON that they come as. The client's models take a second of the event loop for some hundred
pods, and refuse what API servers do send, such as a slice whose endpoints are null.

Source: Kubernetes API concepts, "Efficient detection of changes"; its RBAC reference for what an account needs.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
from kubernetes_asyncio import client, config, watch

from coordinator.routing.discovery import LookupFailed
from coordinator.routing.kubernetes_objects import PortUnknown, of_pods, of_slices

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from coordinator.settings.lookup import Kubernetes

# How long the server keeps a watch open. The answer's age is never more than this, and a connection that has died
# unnoticed is noticed soon after.
_WATCH_S = 60
_CONNECT_S = 5.0
_SILENT_S = 75.0
# Least time between two lists or watches, should a server end each at once.
_LEAST_S = 1.0

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class _Kind(NamedTuple):
    """What is listed and watched.

    Attributes:
        group: API group, as a Role names it.
        call: the client's method, bound.
        selector: label selector.
    """

    resource: str
    group: str
    call: Any
    selector: str


class KubernetesSource:
    """Implements ``coordinator.routing.discovery.Source``."""

    def __init__(self, settings: Kubernetes) -> None:
        self._settings = settings

    async def found(self) -> AsyncGenerator[list[str], None]:
        # The client is made anew after each failure: the kubeconfig or its credentials may be what was wrong.
        api, namespace = await self._connect()
        async with api:
            kind = self._kind(api)
            try:
                async with aclosing(_objects(kind, namespace)) as states:
                    async for objects in states:
                        yield self._workers(objects)
            except client.ApiException as error:
                raise LookupFailed(_told(error, kind, namespace)) from error
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise LookupFailed(f"the API server {api.configuration.host} cannot be reached: {error!r}") from error

    async def _connect(self) -> tuple[client.ApiClient, str]:
        """Return the way to the API server, and the namespace that is meant."""
        settings, configuration = self._settings, client.Configuration()
        own = settings.kubeconfig or settings.context
        try:
            namespace = None if own else _in_pod(configuration)
            if namespace is None:
                namespace = await _by_kubeconfig(configuration, settings.kubeconfig, settings.context)
        except (config.ConfigException, OSError) as error:
            raise LookupFailed(f"there is no way to an API server: {error}") from error
        return client.ApiClient(configuration), settings.namespace or namespace

    def _kind(self, api: client.ApiClient) -> _Kind:
        settings = self._settings
        if settings.service is not None:
            call = client.DiscoveryV1Api(api).list_namespaced_endpoint_slice
            return _Kind("endpointslices", "discovery.k8s.io", call, f"kubernetes.io/service-name={settings.service}")
        assert settings.selector is not None
        return _Kind("pods", "", client.CoreV1Api(api).list_namespaced_pod, settings.selector)

    def _workers(self, objects: dict[str, Any]) -> list[str]:
        settings = self._settings
        try:
            if settings.service is not None:
                found = of_slices(objects.values(), settings.port)
            else:
                assert settings.port is not None
                found = of_pods(objects.values(), settings.port)
        except PortUnknown as error:
            raise LookupFailed(str(error)) from error
        return sorted(f"{settings.scheme}://{netloc}" for netloc in found)


def _in_pod(configuration: client.Configuration) -> str | None:
    """Take the pod's service account, and return its namespace; None outside of a cluster."""
    if not os.environ.get("KUBERNETES_SERVICE_HOST"):
        return None
    # The client's own annotations leave this function out.
    config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    return _NAMESPACE_FILE.read_text().strip()


async def _by_kubeconfig(configuration: client.Configuration, file: str | None, context: str | None) -> str:
    """Take a kubeconfig's context, and return its namespace."""
    loader = await config.load_kube_config(file, context, configuration, persist_config=False)
    current: Any = loader.current_context
    return str(current["context"].get("namespace") or "default")


async def _objects(kind: _Kind, namespace: str) -> AsyncGenerator[dict[str, Any], None]:
    """Yield all objects by name, at once and after each change; the same mapping each time."""
    while True:
        objects, version = await _list(kind, namespace)
        yield objects
        try:
            async with aclosing(_watch(kind, namespace, objects, version)) as changes:
                async for _ in changes:
                    yield objects
        except client.ApiException as error:
            if error.status != 410:
                raise
            # The version is too old for the server to tell what has happened since: list again.
            await asyncio.sleep(_LEAST_S)


async def _list(kind: _Kind, namespace: str) -> tuple[dict[str, Any], str]:
    answer = await kind.call(
        namespace, label_selector=kind.selector, _preload_content=False, _request_timeout=(_CONNECT_S, _SILENT_S)
    )
    async with answer:
        if answer.status != 200:
            raise client.ApiException(answer.status, answer.reason)
        found = await answer.json()
    return {item["metadata"]["name"]: item for item in found.get("items") or ()}, found["metadata"]["resourceVersion"]


async def _watch(kind: _Kind, namespace: str, objects: dict[str, Any], version: str) -> AsyncGenerator[None, None]:
    """Bring the objects up to date for ever, and yield after each change, and whenever a watch has run its time."""
    while True:
        begun, watching = asyncio.get_running_loop().time(), watch.Watch(return_type="object")
        stream = watching.stream(
            kind.call,
            namespace,
            label_selector=kind.selector,
            resource_version=version,
            allow_watch_bookmarks=True,
            timeout_seconds=_WATCH_S,
            _request_timeout=(_CONNECT_S, _SILENT_S),
        )
        async with stream:
            async for event in stream:
                if not isinstance(event, dict):
                    raise LookupFailed("the API server's watch broke off, or is none")
                _apply(event, objects)
                yield
        version = watching.resource_version or version
        yield
        await asyncio.sleep(begun + _LEAST_S - asyncio.get_running_loop().time())


def _apply(event: dict[str, Any], objects: dict[str, Any]) -> None:
    name = event["raw_object"]["metadata"].get("name")
    if event["type"] == "DELETED":
        objects.pop(name, None)
    elif event["type"] in ("ADDED", "MODIFIED"):
        objects[name] = event["raw_object"]


def _told(error: client.ApiException, kind: _Kind, namespace: str) -> str:
    if error.status == 403:
        group = f" ({kind.group})" if kind.group else ""
        return (
            f"the API server forbids to list and watch {kind.resource} in {namespace}: give the service account a Role "
            f"with the verbs get, list and watch on {kind.resource}{group}, as in deploy/kubernetes/discovery"
        )
    if error.status == 401:
        return "the API server does not know our credentials (401)"
    return f"the API server answers {error.status} ({error.reason}) when {kind.resource} in {namespace} are listed"
