"""What is under deploy/ fits Kubernetes, itself, and the coordinator that it starts; all offline.

The overlays are put together by ``kubectl kustomize``, which asks no cluster. Where it is missing these tests are
skipped.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest
import yaml
from prometheus_client import CollectorRegistry

from coordinator import config, metrics, registry

if TYPE_CHECKING:
    from coordinator.settings.lookup import Kubernetes

ROOT = Path(__file__).resolve().parents[1]
KUBERNETES = ROOT / "deploy" / "kubernetes"
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

EXAMPLES = ("discovery", "gateway", "pools", "sidecar")
WITH_WORKERS = ("discovery", "pools", "sidecar")
# 1.29 is the first with native sidecars on by default, which the sidecar example needs.
VERSIONS = ("1.29", kubernetes_validate.latest_version())

NOT_MANIFESTS = ("kustomization.yaml", "coordinator.yaml")
FILES = sorted(path for path in KUBERNETES.rglob("*.yaml") if path.name not in NOT_MANIFESTS)
FOLDERS = sorted(path.parent for path in KUBERNETES.rglob("kustomization.yaml"))


def name_of(path: Path) -> str:
    return str(path.relative_to(KUBERNETES))


@cache
def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def kustomization(folder: Path) -> dict[str, Any]:
    (document,) = documents(folder / "kustomization.yaml")
    return document


@dataclass(frozen=True)
class Container:
    """A container with what stands around it."""

    spec: dict[str, Any]
    pod: dict[str, Any]
    workload: dict[str, Any]

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.spec["ports"]}

    @property
    def is_coordinator(self) -> bool:
        return image_name(self.spec["image"]) == "pd-coordinator"

    @property
    def pre_stop_s(self) -> int:
        if "lifecycle" not in self.spec:
            return 0
        command, seconds = self.spec["lifecycle"]["preStop"]["exec"]["command"]
        assert command == "sleep"
        return int(seconds)

    def flag(self, name: str) -> str | None:
        """Return the value of a worker's ``--name=value``."""
        values = [arg.removeprefix(f"--{name}=") for arg in self.spec["args"] if arg.startswith(f"--{name}=")]
        return values[0] if values else None


def image_name(image: str) -> str:
    return image.rpartition(":")[0].rpartition("/")[2]


@cache
def built(folder: str) -> list[dict[str, Any]]:
    """Return all objects that ``kubectl apply -k`` of a folder would make."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is needed, to put the overlays together")
    command = ["kubectl", "kustomize", str(KUBERNETES / folder)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return list(yaml.safe_load_all(ended.stdout))


class Example:
    """The objects of one overlay."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.objects = built(name)

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        return [each for each in self.objects if each["kind"] in kinds]

    def get(self, kind: str, name: str) -> dict[str, Any]:
        found = [each for each in self.of(kind) if each["metadata"]["name"] == name]
        assert len(found) == 1, f"there are {len(found)} of {kind} {name}"
        return found[0]

    @property
    def workloads(self) -> list[dict[str, Any]]:
        return self.of("Deployment", "StatefulSet")

    @property
    def containers(self) -> list[Container]:
        found = []
        for workload in self.workloads:
            pod = workload["spec"]["template"]["spec"]
            specs = (*pod.get("initContainers", []), *pod["containers"])
            found += [Container(spec, pod, workload) for spec in specs]
        return found

    @property
    def coordinator(self) -> Container:
        (found,) = (container for container in self.containers if container.is_coordinator)
        return found

    def selected(self, selector: dict[str, str]) -> list[dict[str, Any]]:
        labels = [(each, each["spec"]["template"]["metadata"]["labels"]) for each in self.workloads]
        return [each for each, own in labels if selector.items() <= own.items()]

    def config_text(self) -> str:
        """Return the file that the coordinator is started with, found the way the pod finds it."""
        container = self.coordinator
        path = Path(container.spec["args"][container.spec["args"].index("--config") + 1])
        (mount,) = (m for m in container.spec["volumeMounts"] if m["mountPath"] == str(path.parent))
        (volume,) = (v for v in container.pod["volumes"] if v["name"] == mount["name"])
        return str(self.get("ConfigMap", volume["configMap"]["name"])["data"][path.name])


@pytest.fixture(params=EXAMPLES)
def example(request: pytest.FixtureRequest) -> Example:
    return Example(request.param)


def with_workers(test: Any) -> Any:
    """Run a test on the overlays that make workers, too."""
    return pytest.mark.parametrize("example", WITH_WORKERS, indirect=True)(test)


@pytest.fixture
def loaded(example: Example, tmp_path: Path) -> config.Config:
    file = tmp_path / "coordinator.yaml"
    file.write_text(example.config_text())
    return config.load(str(file), {})


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_each_manifest_is_valid_and_has_no_unknown_key(path: Path, version: str) -> None:
    for document in documents(path):
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_what_an_overlay_makes_is_valid(example: Example, version: str) -> None:
    for document in example.objects:
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_a_kustomization_names_every_file_of_its_folder(folder: Path) -> None:
    content = kustomization(folder)
    generated = [file for each in content.get("configMapGenerator", []) for file in each["files"]]
    assert sorted(generated + [name for name in content["resources"] if name.endswith(".yaml")]) == sorted(
        path.name for path in folder.glob("*.yaml") if path.name != "kustomization.yaml"
    )


def test_no_object_stands_twice_or_in_a_namespace(example: Example) -> None:
    """Where it runs is the choice of ``kubectl -n``, so a name may stand once."""
    keys = [(each["kind"], each["metadata"]["name"]) for each in example.objects]
    assert len(keys) == len(set(keys))
    assert not [each for each in example.objects if "namespace" in each["metadata"]]


def test_each_image_has_a_pinned_tag(example: Example) -> None:
    for container in example.containers:
        image = container.spec["image"]
        assert re.fullmatch(r"[^:]+:v?\d+\.\d+\.\d+", image), f"{image} may change under a running fleet"


def test_the_coordinators_image_is_this_version(example: Example) -> None:
    assert example.coordinator.spec["image"] == f"pd-coordinator:{PROJECT['project']['version']}"
    assert f"ARG VERSION={PROJECT['project']['version']}\n" in DOCKERFILE


@with_workers
def test_all_workers_run_one_vllm_and_one_model(example: Example) -> None:
    """Prefill and decode must agree on layout and model, render on the template and the parsers."""
    workers = [container for container in example.containers if not container.is_coordinator]
    assert len({container.spec["image"].rpartition(":")[2] for container in workers}) == 1
    assert len({container.spec["args"][0] for container in workers}) == 1
    for flag in ("reasoning-parser", "tool-call-parser"):
        assert len({container.flag(flag) for container in workers}) == 1


def test_selectors_find_their_pods(example: Example) -> None:
    for workload in example.workloads:
        selector = workload["spec"]["selector"]["matchLabels"]
        assert example.selected(selector) == [workload], "two workloads would fight over each other's pods"
    for service in example.of("Service"):
        (workload,) = example.selected(service["spec"]["selector"])
        pod = [container for container in example.containers if container.workload is workload]
        named = {name for container in pod for name in container.ports}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= named
    for budget in example.of("PodDisruptionBudget"):
        assert len(example.selected(budget["spec"]["selector"]["matchLabels"])) == 1
    for workload in example.workloads:
        for spread in workload["spec"]["template"]["spec"].get("topologySpreadConstraints", []):
            assert example.selected(spread["labelSelector"]["matchLabels"]) == [workload]


def test_a_stateful_set_has_its_headless_service(example: Example) -> None:
    for workload in example.of("StatefulSet"):
        service = example.get("Service", workload["spec"]["serviceName"])
        assert service["spec"]["clusterIP"] == "None"
        assert example.selected(service["spec"]["selector"]) == [workload]


# No resourceNames: what comes and goes has no names to write down.
RULE_KEYS = {"apiGroups", "resources", "verbs"}


def lookups(loaded: config.Config) -> list[Kubernetes]:
    pools = (loaded.pools.encode, loaded.pools.prefill, loaded.pools.decode, loaded.pools.render)
    return [pool.kubernetes for pool in pools if pool is not None and pool.kubernetes is not None]


def test_accounts_exist_and_no_pod_gets_a_token_that_asks_nothing(example: Example, loaded: config.Config) -> None:
    for workload in example.workloads:
        pod = workload["spec"]["template"]["spec"]
        asks = workload is example.coordinator.workload and bool(lookups(loaded))
        assert pod["automountServiceAccountToken"] is asks
        if "serviceAccountName" in pod:
            account = example.get("ServiceAccount", pod["serviceAccountName"])
            assert account["automountServiceAccountToken"] is False


def test_the_account_may_look_workers_up_and_nothing_else(example: Example, loaded: config.Config) -> None:
    needed = {("discovery.k8s.io", "endpointslices") if each.service else ("", "pods") for each in lookups(loaded)}
    rules = [rule for role in example.of("Role") for rule in role["rules"]]
    granted = {(group, kind) for rule in rules for group in rule["apiGroups"] for kind in rule["resources"]}
    assert granted == needed
    assert all(rule["verbs"] == ["get", "list", "watch"] and rule.keys() <= RULE_KEYS for rule in rules)
    assert not example.of("ClusterRole", "ClusterRoleBinding")
    for binding in example.of("RoleBinding"):
        assert binding["roleRef"]["name"] == example.get("Role", binding["roleRef"]["name"])["metadata"]["name"]
        (subject,) = binding["subjects"]
        account = example.coordinator.workload["spec"]["template"]["spec"]["serviceAccountName"]
        assert (subject["kind"], subject["name"]) == ("ServiceAccount", account)
    assert bool(example.of("RoleBinding")) is bool(needed)


@with_workers
def test_a_look_up_finds_the_workers_of_its_role(example: Example, loaded: config.Config) -> None:
    for role in ("prefill", "decode"):
        lookup = getattr(loaded.pools, role).kubernetes
        if lookup is None:
            continue
        if lookup.service is not None:
            selector = example.get("Service", lookup.service)["spec"]["selector"]
        else:
            selector = dict(term.split("=") for term in lookup.selector.split(","))
        (workload,) = example.selected(selector)
        assert workload["metadata"]["name"] == role
        (worker,) = (each for each in example.containers if each.workload is workload)
        assert lookup.port in worker.ports


def test_volumes_that_are_mounted_exist(example: Example) -> None:
    for container in example.containers:
        mounted = {mount["name"] for mount in container.spec.get("volumeMounts", [])}
        assert mounted <= {volume["name"] for volume in container.pod.get("volumes", [])}


def test_the_coordinator_runs_without_rights(example: Example) -> None:
    container = example.coordinator
    security = container.pod["securityContext"] | container.spec["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}


def test_every_container_asks_for_cpu_and_has_a_limit_of_memory(example: Example) -> None:
    for container in example.containers:
        resources = container.spec["resources"]
        assert {"cpu", "memory"} <= resources["requests"].keys()
        assert "memory" in resources["limits"]
        assert "cpu" not in resources["limits"], "a CPU limit throttles, which shows as gaps between tokens"


def test_probes_ask_paths_that_are_there(example: Example) -> None:
    for container in example.containers:
        probes = {kind: container.spec[kind]["httpGet"] for kind in container.spec if kind.endswith("Probe")}
        assert {probe["port"] for probe in probes.values()} <= container.ports.keys()
        paths = {kind: probe["path"] for kind, probe in probes.items()}
        if container.is_coordinator:
            # The start asks /healthz: a sidecar's worker starts after it, and /readyz waits for the worker.
            assert paths == {
                "startupProbe": "/healthz",
                "readinessProbe": "/readyz",
                "livenessProbe": "/healthz",
            }
        else:
            assert set(paths.values()) == {"/health"}
            assert {"startupProbe", "livenessProbe"} <= paths.keys()


class NoEvents:
    def handover_sent(self, age_s: float) -> None:
        raise AssertionError("no request was made")

    def handover_missing(self, reason: str, policy: str) -> None:
        raise AssertionError("no request was made")

    def prefill_skipped(self, reason: str) -> None:
        raise AssertionError("no request was made")


def test_the_configuration_loads_and_its_steps_can_be_built(loaded: config.Config) -> None:
    steps = registry.build(loaded, NoEvents())
    assert [step.type for step in steps][-2:] == ["prefill", "decode"]


def test_the_coordinator_listens_where_kubernetes_looks(example: Example, loaded: config.Config) -> None:
    container = example.coordinator
    port = loaded.server.listen_addr.port
    assert container.ports == {"http": port}
    annotations = container.workload["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(loaded.server.metrics_port or port)
    services = example.of("Service")
    (ports,) = (
        service["spec"]["ports"]
        for service in services
        if container.workload in example.selected(service["spec"]["selector"])
    )
    assert [each["port"] for each in ports] == [port]


def test_a_changed_configuration_rolls_the_pods_or_is_watched(example: Example, loaded: config.Config) -> None:
    """A name with a digest changes with the content; one without is read again by the coordinator."""
    mounted = [volume["configMap"]["name"] for volume in example.coordinator.pod["volumes"] if "configMap" in volume]
    (name,) = mounted
    rolls = re.search(r"-[a-z0-9]{10}$", name) is not None
    assert rolls is not loaded.config.watch
    # A file that is mounted by subPath is never renewed.
    assert not [mount for mount in example.coordinator.spec["volumeMounts"] if "subPath" in mount]


def test_the_grace_period_outlasts_what_ends_within_it(example: Example, loaded: config.Config) -> None:
    """A native sidecar is told to stop only when the worker has ended, so their times add up."""
    margin_s = 10
    for workload in example.workloads:
        needed_s = margin_s
        for container in example.containers:
            if container.workload is workload:
                ends_s = loaded.server.shutdown_timeout if container.is_coordinator else 0
                needed_s += container.pre_stop_s + ends_s + int(container.flag("shutdown-timeout") or 0)
        pod = workload["spec"]["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] >= needed_s, workload["metadata"]["name"]


@with_workers
def test_each_worker_of_a_pool_is_one_pod(example: Example, loaded: config.Config) -> None:
    """A worker that the pool misses idles; one too many is a name that never resolves."""
    for role in ("prefill", "decode"):
        pool = getattr(loaded.pools, role)
        if pool.endpoints is None:
            continue
        pod = [each for each in example.containers if each.workload is example.coordinator.workload]
        beside = [each for each in pod if not each.is_coordinator]
        if beside:
            expected = [f"http://127.0.0.1:{worker.flag('port')}" for worker in beside]
        else:
            workload, service = example.get("StatefulSet", role), example.get("Service", role)
            (port,) = service["spec"]["ports"]
            expected = [
                f"http://{role}-{ordinal}.{service['metadata']['name']}:{port['port']}"
                for ordinal in range(workload["spec"]["replicas"])
            ]
        assert sorted(pool.endpoints) == sorted(expected)


def test_render_is_a_service_where_a_step_asks_it(example: Example, loaded: config.Config) -> None:
    services = [each for each in example.of("Service") if each["metadata"]["name"] == "render"]
    addresses = [step.params["address"] for step in loaded.pipeline.steps if step.type == "render"]
    assert addresses == [f"http://render:{service['spec']['ports'][0]['port']}" for service in services]


def test_workers_listen_on_the_port_that_they_declare(example: Example) -> None:
    for container in example.containers:
        if not container.is_coordinator:
            assert int(container.flag("port") or 0) in container.ports.values()


@with_workers
def test_prefill_produces_what_decode_consumes(example: Example, loaded: config.Config) -> None:
    roles = {}
    for container in example.containers:
        if transfer := container.flag("kv-transfer-config"):
            settings = json.loads(transfer)
            assert settings["kv_connector"] == "NixlConnector"
            assert "--enable-scale-out" in container.spec["args"]
            roles[container.workload["metadata"]["name"]] = settings["kv_role"]
    assert roles == {"prefill": "kv_producer", "decode": "kv_consumer"}
    assert loaded.pipeline.kv_connector == "kv-nixl"


def admitted(example: Example, caller: dict[str, str], called: dict[str, Any]) -> set[str]:
    """Return the named ports of a workload's pods that policies open to a pod with the caller's labels."""
    own = called["spec"]["template"]["metadata"]["labels"]
    ports = {name for each in example.containers if each.workload is called for name in each.ports}
    policies = [each["spec"] for each in example.of("NetworkPolicy") if selects(each["spec"]["podSelector"], own)]
    open_to: set[str] = set() if policies else set(ports)
    for rule in (rule for policy in policies for rule in policy["ingress"]):
        if "from" not in rule or any(selects(peer.get("podSelector"), caller) for peer in rule["from"]):
            open_to |= {port["port"] for port in rule["ports"]} if "ports" in rule else ports
    return open_to


def selects(selector: dict[str, Any] | None, labels: dict[str, str]) -> bool:
    return selector is not None and selector["matchLabels"].items() <= labels.items()


def test_a_stranger_reaches_the_api_alone(example: Example) -> None:
    for workload in example.workloads:
        fronted = workload is example.coordinator.workload
        assert admitted(example, {"app": "stranger"}, workload) == ({"http"} if fronted else set())


@with_workers
def test_policies_let_through_what_legs_and_the_transfer_need(example: Example) -> None:
    labels = {each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"] for each in example.workloads}
    front = example.coordinator.workload
    for workload in example.workloads:
        if workload is not front:
            assert "http" in admitted(example, labels[front["metadata"]["name"]], workload)
    named = {each["metadata"]["name"]: each for each in example.workloads}
    assert "nixl" in admitted(example, labels["decode"], named["prefill"])
    assert "nixl" in admitted(example, labels["prefill"], named["decode"])


def test_the_autoscaler_counts_what_the_coordinator_counts() -> None:
    """The name is the metric's own, the adapter's rule makes it, and no manifest sets the number that it chooses."""
    instruments = CollectorRegistry()
    metrics.Metrics(instruments)
    gauges = {each.name for each in instruments.collect() if each.type == "gauge"}
    (rule,) = yaml.safe_load((ROOT / "deploy" / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    for name in ("gateway", "pools"):
        example = Example(name)
        (scaler,) = example.of("HorizontalPodAutoscaler")
        (metric,) = (each["pods"]["metric"]["name"] for each in scaler["spec"]["metrics"])
        assert metric in gauges
        assert rule["name"]["as"] == metric
        assert rule["seriesQuery"].startswith(f"{metric}{{")
        target = scaler["spec"]["scaleTargetRef"]
        assert "replicas" not in example.get(target["kind"], target["name"])["spec"]


def copied() -> list[str]:
    """Return what the Dockerfile copies out of the tree."""
    lines = re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
    return [source.rstrip("/") for line in lines for source in line.split()[:-1]]


def test_the_dockerfile_copies_what_the_wheel_is_built_from() -> None:
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    read = [PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]]
    assert sorted(copied()) == sorted(["pyproject.toml", "requirements", *read, *packages])
    for source in copied():
        assert (ROOT / source).exists(), source


def test_the_dockerignore_lets_through_what_the_dockerfile_copies() -> None:
    kept: dict[str, bool] = {}
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern = line.removeprefix("!").removeprefix("**/")
            kept |= {source: line.startswith("!") for source in copied() if fnmatch(source, pattern)}
    assert kept == dict.fromkeys(copied(), True)


def test_the_image_listens_on_the_default_port_and_is_probed_there() -> None:
    port = config.Server().listen_addr.port
    assert f"\nEXPOSE {port}\n" in DOCKERFILE
    assert f"http://127.0.0.1:{port}/healthz" in DOCKERFILE


def test_the_image_starts_the_command_that_pyproject_installs() -> None:
    assert 'ENTRYPOINT ["coordinator"]' in DOCKERFILE
    assert "coordinator" in PROJECT["project"]["scripts"]
    assert re.search(r"^USER \d+:\d+$", DOCKERFILE, re.MULTILINE), "runAsNonRoot needs a number"


def test_the_benchmark_has_the_environment_of_the_image() -> None:
    exported = re.findall(r"^bench: export (\w+) := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert exported
    assert f"\nENV {' '.join(f'{name}={value}' for name, value in exported)}\n" in DOCKERFILE


def test_manifests_and_image_start_the_same_way(example: Example) -> None:
    command = re.search(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert command
    assert example.coordinator.spec["args"] == json.loads(command[1])
