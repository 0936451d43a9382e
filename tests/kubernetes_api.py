"""An API server of Kubernetes on 127.0.0.1: lists and watches of EndpointSlices and Pods, with its failures."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml
from aiohttp import web

if TYPE_CHECKING:
    import ssl
    from pathlib import Path
    from types import TracebackType
    from typing import Self

SLICES = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
PODS = "/api/v1/namespaces/{namespace}/pods"


def endpoint_slice(name: str, *endpoints: Any, ports: Any = ((8000, "http"),), family: str = "IPv4") -> dict[str, Any]:
    """Return a slice; an endpoint is an address, or an address and its conditions."""
    named = [(endpoint, {"ready": True}) if isinstance(endpoint, str) else endpoint for endpoint in endpoints]
    return {
        "metadata": {"name": name},
        "addressType": family,
        "endpoints": [{"addresses": [address], "conditions": conditions} for address, conditions in named] or None,
        "ports": [{"port": number, "name": called, "protocol": "TCP"} for number, called in ports],
    }


def pod(name: str, ip: str | None, *, ready: bool = True, ending: bool = False, **container: Any) -> dict[str, Any]:
    metadata = {"name": name, **({"deletionTimestamp": "2026-01-01T00:00:00Z"} if ending else {})}
    conditions = [{"type": "Initialized", "status": "True"}, {"type": "Ready", "status": "True" if ready else "False"}]
    containers = [{"name": "vllm", "ports": [{"containerPort": 8000, "name": "http"}], **container}]
    return {
        "metadata": metadata,
        "spec": {"containers": containers},
        "status": {"phase": "Running", "conditions": conditions, **({"podIP": ip} if ip else {})},
    }


@dataclass
class KubernetesApi:
    """
    Attributes:
        objects: by name; changed by ``put`` and ``delete``, which tell those who watch.
        refuse: answer every request with this status.
        gone: how many watches are told that their version is too old.
        in_stream: tell that inside the stream, as servers do for a version that was known at the start.
        requests: path and query of each request.
        watches: those that are open, each with its label selector.
    """

    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    refuse: int | None = None
    gone: int = 0
    in_stream: bool = False
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    watches: list[tuple[str, asyncio.Queue[bytes | None]]] = field(default_factory=list)
    version: int = 100
    url: str = ""
    tls: ssl.SSLContext | None = None
    _history: list[tuple[int, dict[str, Any], bytes]] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.add_routes([web.get(path, self._answer) for path in (SLICES, PODS)])
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self.tls).start()
        self.url = f"http{'s' if self.tls else ''}://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_watches()
        await self._runner.cleanup()

    def kubeconfig(self, folder: Path, namespace: str | None = "inference") -> str:
        """Write a kubeconfig for this server and return its path."""
        context = {"cluster": "test", "user": "test", **({"namespace": namespace} if namespace else {})}
        tree = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": context}],
            "clusters": [{"name": "test", "cluster": {"server": self.url}}],
            "users": [{"name": "test", "user": {"token": "t0ken"}}],
        }
        file = folder / "kubeconfig"
        file.write_text(yaml.safe_dump(tree))
        return str(file)

    def put(self, each: dict[str, Any]) -> None:
        name = each["metadata"]["name"]
        self._tell("MODIFIED" if name in self.objects else "ADDED", each)
        self.objects[name] = each

    def delete(self, name: str) -> None:
        self._tell("DELETED", self.objects.pop(name))

    def bookmark(self) -> None:
        self._tell("BOOKMARK", {"metadata": {}})

    def send(self, line: bytes) -> None:
        """Write something of one's own to all who watch."""
        for _, queue in self.watches:
            queue.put_nowait(line)

    def end_watches(self) -> None:
        for _, queue in self.watches:
            queue.put_nowait(None)

    def _tell(self, kind: str, each: dict[str, Any]) -> None:
        self.version += 1
        each["metadata"]["resourceVersion"] = str(self.version)
        line = json.dumps({"type": kind, "object": each}).encode() + b"\n"
        self._history.append((self.version, each, line))
        for selector, queue in self.watches:
            if _selected(each, selector):
                queue.put_nowait(line)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.path, dict(request.query)))
        self.authorizations.append(request.headers.get("Authorization"))
        if self.refuse is not None:
            return _status(self.refuse)
        if request.query.get("watch") != "True":
            metadata = {"resourceVersion": str(self.version)}
            items = [each for each in self.objects.values() if _selected(each, request.query["labelSelector"])]
            return web.json_response({"metadata": metadata, "items": items})
        if self.gone:
            self.gone -= 1
            if not self.in_stream:
                return _status(410)
            return await self._stream(request, [json.dumps({"type": "ERROR", "object": _gone()}).encode() + b"\n"])
        return await self._stream(request, [])

    async def _stream(self, request: web.Request, lines: list[bytes]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        for line in lines:
            await response.write(line)
        if lines:
            return response
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        selector, since = request.query["labelSelector"], int(request.query["resourceVersion"])
        for version, each, line in self._history:
            if version > since and _selected(each, selector):
                queue.put_nowait(line)
        watching = selector, queue
        self.watches.append(watching)
        try:
            while (line := await queue.get()) is not None:
                await response.write(line)
        finally:
            self.watches.remove(watching)
        return response


def _selected(each: dict[str, Any], selector: str) -> bool:
    """Say whether an object is meant, as far as it has labels: by ``name=value``, and nothing cleverer."""
    labels = each["metadata"].get("labels")
    return labels is None or selector in {f"{name}={value}" for name, value in labels.items()}


def _gone() -> dict[str, Any]:
    return {"kind": "Status", "status": "Failure", "reason": "Expired", "message": "too old", "code": 410}


def _status(code: int) -> web.Response:
    body = {**_gone(), "reason": "Forbidden" if code == 403 else "Expired", "code": code}
    return web.json_response(body, status=code)
