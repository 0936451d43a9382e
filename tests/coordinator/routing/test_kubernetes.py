"""Workers by Kubernetes, over real sockets and through the real client: lists, watches, and what goes wrong."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from coordinator.routing import kubernetes
from coordinator.routing.discovery import LookupFailed
from coordinator.routing.kubernetes import KubernetesSource
from coordinator.settings.lookup import Kubernetes
from tests.bounds import HANG_S
from tests.kubernetes_api import KubernetesApi, endpoint_slice, pod

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

PAIR = Path(__file__).resolve().parents[2] / "data" / "tls" / "rsa"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/inference/endpointslices"


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "_LEAST_S", 0.01)


@pytest.fixture
async def api() -> AsyncIterator[KubernetesApi]:
    async with KubernetesApi() as api:
        yield api


def source(api: KubernetesApi, folder: Path, **settings: Any) -> KubernetesSource:
    given = {"service": "prefill", "kubeconfig": api.kubeconfig(folder), **settings}
    return KubernetesSource(Kubernetes.model_validate({key: value for key, value in given.items() if value}))


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(HANG_S):
        while not true():
            await asyncio.sleep(0.005)


async def watched(api: KubernetesApi) -> None:
    await until(lambda: len(api.watches) == 1)


async def test_a_service_s_endpoints_are_listed_then_watched(api: KubernetesApi, tmp_path: Path) -> None:
    api.put(endpoint_slice("s1", "10.0.0.1", "10.0.0.2"))
    async with asyncio.timeout(HANG_S), aclosing(source(api, tmp_path).found()) as found:
        assert await anext(found) == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
        following = asyncio.ensure_future(anext(found))
        await watched(api)
        api.put(endpoint_slice("s2", "10.0.0.3"))
        assert await following == [f"http://10.0.0.{number}:8000" for number in (1, 2, 3)]
        api.put(endpoint_slice("s1", "10.0.0.1", ("10.0.0.2", {"ready": False, "serving": True, "terminating": True})))
        assert await anext(found) == ["http://10.0.0.1:8000", "http://10.0.0.3:8000"]
        api.delete("s2")
        assert await anext(found) == ["http://10.0.0.1:8000"]
        api.delete("s1")
        assert await anext(found) == []
    (listed, first), (path, second) = api.requests
    assert (listed, path) == (SLICES, SLICES)
    assert first == {"labelSelector": "kubernetes.io/service-name=prefill"}
    assert second["resourceVersion"] == "101"
    assert second["allowWatchBookmarks"] == "True"
    assert int(second["timeoutSeconds"]) < kubernetes._SILENT_S
    assert api.authorizations == ["Bearer t0ken"] * 2


async def test_pods_are_found_by_their_labels(api: KubernetesApi, tmp_path: Path) -> None:
    api.put(pod("a", "10.0.0.1"))
    by_role = {"service": None, "selector": "llm-d.ai/role in (prefill,both)", "port": "http", "namespace": "other"}
    async with asyncio.timeout(HANG_S), aclosing(source(api, tmp_path, **by_role).found()) as found:
        assert await anext(found) == ["http://10.0.0.1:8000"]
        following = asyncio.ensure_future(anext(found))
        await watched(api)
        api.put(pod("b", "10.0.0.2"))
        assert await following == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
        api.put(pod("a", "10.0.0.1", ending=True))
        assert await anext(found) == ["http://10.0.0.2:8000"]
    assert api.requests[0] == ("/api/v1/namespaces/other/pods", {"labelSelector": "llm-d.ai/role in (prefill,both)"})


async def test_a_watch_that_has_run_its_time_goes_on_from_where_it_was(api: KubernetesApi, tmp_path: Path) -> None:
    """A bookmark moves the version on without a change, so that it does not grow too old."""
    api.put(endpoint_slice("s1", "10.0.0.1"))
    async with asyncio.timeout(HANG_S), aclosing(source(api, tmp_path).found()) as found:
        await anext(found)
        following = asyncio.ensure_future(anext(found))
        await watched(api)
        api.bookmark()
        assert await following == ["http://10.0.0.1:8000"]
        api.end_watches()
        assert await anext(found) == ["http://10.0.0.1:8000"]
        following = asyncio.ensure_future(anext(found))
        await until(lambda: len(api.requests) == 3 and api.watches)
        api.put(endpoint_slice("s1", "10.0.0.9"))
        assert await following == ["http://10.0.0.9:8000"]
    assert [query.get("resourceVersion") for _, query in api.requests] == [None, "101", "102"]


@pytest.mark.parametrize("in_stream", [True, False])
async def test_a_version_that_is_too_old_means_to_list_again(
    api: KubernetesApi, tmp_path: Path, in_stream: bool
) -> None:
    api.put(endpoint_slice("s1", "10.0.0.1"))
    api.gone, api.in_stream = 1, in_stream
    async with asyncio.timeout(HANG_S), aclosing(source(api, tmp_path).found()) as found:
        assert await anext(found) == ["http://10.0.0.1:8000"]
        api.objects = {"s2": endpoint_slice("s2", "10.0.0.2")}
        assert await anext(found) == ["http://10.0.0.2:8000"]
        following = asyncio.ensure_future(anext(found))
        await watched(api)
        api.put(endpoint_slice("s2", "10.0.0.3"))
        assert await following == ["http://10.0.0.3:8000"]
    assert ["watch" in query for _, query in api.requests] == [False, True, False, True]


# (status, namespace and what is looked for, the sentence)
REFUSALS: list[tuple[int, dict[str, Any], str]] = [
    (
        403,
        {},
        "the API server forbids to list and watch endpointslices in inference: give the service account a Role with "
        "the verbs get, list and watch on endpointslices (discovery.k8s.io), as in deploy/kubernetes/discovery",
    ),
    (
        403,
        {"service": None, "selector": "a=b", "port": 80, "namespace": "x"},
        "the API server forbids to list and watch pods in x: give the service account a Role with the verbs get, list "
        "and watch on pods, as in deploy/kubernetes/discovery",
    ),
    (401, {}, "the API server does not know our credentials (401)"),
    (500, {}, "the API server answers 500 (Internal Server Error) when endpointslices in inference are listed"),
]


@pytest.mark.parametrize(("status", "settings", "sentence"), REFUSALS)
async def test_a_refusal_is_a_sentence_that_says_what_to_grant(
    api: KubernetesApi, tmp_path: Path, status: int, settings: dict[str, Any], sentence: str
) -> None:
    api.refuse = status
    with pytest.raises(LookupFailed) as caught:
        await anext(source(api, tmp_path, **settings).found())
    assert str(caught.value) == sentence


async def test_a_refusal_of_the_watch_alone_is_told_too(api: KubernetesApi, tmp_path: Path) -> None:
    async with asyncio.timeout(HANG_S), aclosing(source(api, tmp_path).found()) as found:
        await anext(found)
        api.refuse = 403
        with pytest.raises(LookupFailed, match="forbids to list and watch endpointslices in inference"):
            await anext(found)


async def test_a_server_that_is_not_there_or_silent_is_told(
    api: KubernetesApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "_SILENT_S", 0.1)
    async with asyncio.timeout(HANG_S), aclosing(source(api, tmp_path).found()) as found:
        await anext(found)
        with pytest.raises(LookupFailed, match=f"^the API server {api.url} cannot be reached: "):
            await anext(found)  # the watch is open, and nothing comes: not even its end
    api.url = "http://127.0.0.1:9"
    with pytest.raises(LookupFailed, match=r"^the API server http://127\.0\.0\.1:9 cannot be reached: "):
        await anext(source(api, tmp_path).found())


async def test_a_watch_that_breaks_off_inside_a_line_is_told(api: KubernetesApi, tmp_path: Path) -> None:
    async with asyncio.timeout(HANG_S), aclosing(source(api, tmp_path).found()) as found:
        await anext(found)
        following = asyncio.ensure_future(anext(found))
        await watched(api)
        api.send(b'{"type": "ADDED", "obj')
        api.end_watches()
        with pytest.raises(LookupFailed, match="watch broke off"):
            await following


async def test_an_object_larger_than_a_read_buffer_is_read(api: KubernetesApi, tmp_path: Path) -> None:
    async with asyncio.timeout(HANG_S), aclosing(source(api, tmp_path).found()) as found:
        await anext(found)
        following = asyncio.ensure_future(anext(found))
        await watched(api)
        api.put(endpoint_slice("s1", *(f"10.0.{number // 250}.{number % 250}" for number in range(5000))))
        assert len(await following) == 5000


async def test_a_port_that_cannot_be_told_is_a_failure(api: KubernetesApi, tmp_path: Path) -> None:
    api.put(endpoint_slice("s1", "10.0.0.1", ports=((8000, "http"), (9090, "metrics"))))
    with pytest.raises(LookupFailed, match="write one of them as port"):
        await anext(source(api, tmp_path).found())


async def test_a_kubeconfig_that_is_not_there_is_a_failure(tmp_path: Path) -> None:
    gone = KubernetesSource(Kubernetes(service="a", kubeconfig=str(tmp_path / "none")))
    with pytest.raises(LookupFailed, match=r"^there is no way to an API server: "):
        await anext(gone.found())


async def test_a_context_without_a_namespace_means_the_default_one(api: KubernetesApi, tmp_path: Path) -> None:
    found = KubernetesSource(Kubernetes(service="a", kubeconfig=api.kubeconfig(tmp_path, namespace=None))).found()
    async with aclosing(found):
        await anext(found)
    assert api.requests[0][0] == SLICES.replace("inference", "default")


async def test_in_a_pod_the_service_account_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TLS, with the account's token, in the pod's own namespace."""
    from kubernetes_asyncio.config import incluster_config

    (tmp_path / "token").write_text("pod-t0ken")
    (tmp_path / "namespace").write_text("inference\n")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(PAIR / "tls.crt"))
    monkeypatch.setattr(kubernetes, "_NAMESPACE_FILE", tmp_path / "namespace")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(PAIR / "tls.crt", PAIR / "tls.key")
    async with KubernetesApi(tls=tls) as api:
        api.put(endpoint_slice("s1", "10.0.0.1"))
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", api.url.rpartition(":")[2])
        async with asyncio.timeout(HANG_S), aclosing(KubernetesSource(Kubernetes(service="prefill")).found()) as found:
            assert await anext(found) == ["http://10.0.0.1:8000"]
    assert api.requests[0][0] == SLICES
    assert api.authorizations[0] == "Bearer pod-t0ken"


async def test_in_a_pod_without_an_account_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kubernetes_asyncio.config import incluster_config

    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    with pytest.raises(LookupFailed, match=r"^there is no way to an API server: Service token file does not exist\."):
        await anext(KubernetesSource(Kubernetes(service="prefill")).found())
