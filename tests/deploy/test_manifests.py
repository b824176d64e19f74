"""Manifests of Kustomize and of the chart: valid by their schemas, and true of the processes that they start."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.config.peer_tls import is_encrypted
from baton.metrics.worker import WorkerMetrics
from tests.deploy.processes import Process, processes
from tests.deploy.rendering import (
    DEPLOY,
    OVERLAYS,
    VALUES,
    VERSIONS,
    Manifest,
    kustomized,
    problems,
    run,
    templated,
    tool,
)

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(300)]

SETS = [*(f"kustomize {name}" for name in OVERLAYS), *(f"helm {name}" for name in VALUES)]
TLS_KEYS = {"ca.crt", "tls.crt", "tls.key"}
SECRET_KEYS = {"control-token", "api-keys", "scrape-key", "hf-token"}
# What a process needs besides its time to drain: the frontend 10 s for clients, a worker its time for aborts.
MARGIN_S = 10
PROBES = {"startupProbe": "/live", "livenessProbe": "/live", "readinessProbe": "/health"}


@pytest.fixture(params=SETS)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    """The objects of one overlay, or of one file of values."""
    kind, _, name = request.param.partition(" ")
    return kustomized(name) if kind == "kustomize" else templated(name)


@pytest.fixture
def started(manifests: list[Manifest], tmp_path: Path) -> list[Process]:
    """The processes that they start."""
    return list(processes(manifests, tmp_path))


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [each for each in manifests if each["kind"] in kinds]


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    wanted = selector.get("matchLabels", selector)
    return wanted.items() <= labels.items()


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid_by_its_schema(manifests: list[Manifest], version: str) -> None:
    assert [problem for manifest in manifests for problem in problems(manifest, version)] == []


def test_a_field_that_does_not_exist_is_found(manifests: list[Manifest]) -> None:
    for manifest in of_kind(manifests, "Deployment", "PodMonitor"):
        assert problems({**manifest, "spec": {**manifest["spec"], "replica": 1}}, VERSIONS[0])


def test_settings_exist_and_are_accepted(started: list[Process]) -> None:
    assert {process.command for process in started} >= {"frontend", "worker"}
    for process in started:
        settings = process.settings()
        assert settings.runtime.discovery in ("etcd", "kubernetes")


def test_probes_and_ports_are_those_of_the_settings(started: list[Process]) -> None:
    for process in started:
        settings = process.settings()
        name, port = ("http", settings.port) if process.command == "frontend" else ("system", settings.system_port)
        assert process.port(name) == port
        for probe, path in PROBES.items():
            assert process.container[probe]["httpGet"] == {"path": path, "port": name}
        if process.command == "worker":
            assert process.port("kv") == settings.kv.port
        assert settings.host == settings.system_host == "0.0.0.0"


def test_a_pod_has_time_to_drain(started: list[Process]) -> None:
    assert_time_to_drain(started)


def test_a_longer_drain_gets_more_time(tmp_path: Path) -> None:
    changes = ("frontend.settings.drain_timeout_s=300", "workers.worker.settings.drain_timeout_s=200")
    found = list(processes(templated("aggregated", "--set", ",".join(changes)), tmp_path))
    assert {each.settings().drain_timeout_s for each in found} == {300, 200}
    assert_time_to_drain(found)


def assert_time_to_drain(started: list[Process]) -> None:
    for process in started:
        settings = process.settings()
        (command, wait_s) = process.container["lifecycle"]["preStop"]["exec"]["command"]
        assert command == "sleep"
        last_s = (
            10.0 if process.command == "frontend" else settings.abort_timeout_s if process.command == "worker" else 0
        )
        needed_s = float(wait_s) + settings.drain_timeout_s + last_s
        assert process.pod["terminationGracePeriodSeconds"] >= needed_s + 5, process.name


def test_containers_have_no_rights_that_they_do_not_need(manifests: list[Manifest]) -> None:
    for manifest in of_kind(manifests, "Deployment", "StatefulSet"):
        pod = manifest["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["requests"]
            assert container["resources"]["limits"]["memory"]


def test_what_a_process_writes_is_on_a_volume(started: list[Process]) -> None:
    for process in started:
        settings = process.settings()
        assert settings.cache_dir in process.mounts
        assert {"/tmp", "/home/baton"} <= set(process.mounts)  # HOME of the image
        if process.command == "worker":
            assert process.volume("/dev/shm")["emptyDir"]["medium"] == "Memory"


def test_secrets_are_files_and_their_keys_are_documented(started: list[Process]) -> None:
    for process in started:
        settings = process.settings()
        for path in filter(None, (settings.control_token_file, settings.api_key_file)):
            assert Path(path).name in SECRET_KEYS
            assert process.volume(str(Path(path).parent))["secret"]["secretName"] == "baton-secrets"
        assert not settings.control_token
        assert not settings.api_key
        for variable in process.container.get("env", []):
            key = variable.get("valueFrom", {}).get("secretKeyRef", {}).get("key")
            assert key is None or key in SECRET_KEYS


def test_selectors_select_what_they_are_meant_for(manifests: list[Manifest]) -> None:
    pods = {
        each["metadata"]["name"]: each["spec"]["template"] for each in of_kind(manifests, "Deployment", "StatefulSet")
    }
    for manifest in of_kind(manifests, "PodDisruptionBudget"):
        matched = [
            name for name, pod in pods.items() if selects(manifest["spec"]["selector"], pod["metadata"]["labels"])
        ]
        assert len(matched) == 1, manifest["metadata"]["name"]
    for manifest in of_kind(manifests, "Service"):
        chosen = [pod for pod in pods.values() if selects(manifest["spec"]["selector"], pod["metadata"]["labels"])]
        assert chosen, manifest["metadata"]["name"]
        for pod in chosen:
            names = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
            assert {port["targetPort"] for port in manifest["spec"].get("ports", [])} <= names


def test_monitors_scrape_ports_that_exist(manifests: list[Manifest]) -> None:
    pods = [each["spec"]["template"] for each in of_kind(manifests, "Deployment")]
    for manifest in of_kind(manifests, "PodMonitor"):
        chosen = [pod for pod in pods if selects(manifest["spec"]["selector"], pod["metadata"]["labels"])]
        assert chosen
        for endpoint in manifest["spec"]["podMetricsEndpoints"]:
            assert endpoint["path"] == "/metrics"
            assert all(
                endpoint["port"] in {port["name"] for port in pod["spec"]["containers"][0]["ports"]} for pod in chosen
            )
    for manifest in of_kind(manifests, "ServiceMonitor"):
        services = of_kind(manifests, "Service")
        (service,) = (each for each in services if selects(manifest["spec"]["selector"], each["metadata"]["labels"]))
        (endpoint,) = manifest["spec"]["endpoints"]
        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
        assert endpoint["authorization"]["credentials"]["key"] in SECRET_KEYS


def test_autoscalers_scale_by_a_metric_that_workers_have(manifests: list[Manifest]) -> None:
    exposed = {family.name for family in WorkerMetrics("decode").registry.collect()}
    deployments = {each["metadata"]["name"]: each for each in of_kind(manifests, "Deployment")}
    for manifest in of_kind(manifests, "HorizontalPodAutoscaler"):
        scaled = deployments[manifest["spec"]["scaleTargetRef"]["name"]]
        assert "replicas" not in scaled["spec"], "to apply the manifests again would undo the scaling"
        assert {metric["pods"]["metric"]["name"] for metric in manifest["spec"]["metrics"]} <= exposed


def test_planes_without_keys_are_closed_to_other_pods(manifests: list[Manifest]) -> None:
    """Of all ports, only that of the API is open to everybody; monitoring may read metrics."""
    policies = of_kind(manifests, "NetworkPolicy")
    for pod in (each["spec"]["template"] for each in of_kind(manifests, "Deployment", "StatefulSet")):
        applied = [each for each in policies if selects(each["spec"]["podSelector"], pod["metadata"]["labels"])]
        rules = [rule for each in applied for rule in each["spec"].get("ingress", [])]
        assert any("Ingress" in each["spec"]["policyTypes"] for each in applied)
        to_all = [port["port"] for rule in rules if "from" not in rule for port in rule.get("ports", [{"port": "any"}])]
        assert to_all == ([8000] if pod["metadata"]["labels"]["app.kubernetes.io/component"] == "frontend" else [])


@pytest.mark.parametrize("engine", ["sglang", "trtllm"])
@pytest.mark.parametrize("render", [kustomized, templated])
def test_workers_of_gpu_engines_get_gpus(render: Callable[[str], list[Manifest]], engine: str, tmp_path: Path) -> None:
    found = [each for each in processes(render(engine), tmp_path) if each.command == "worker"]
    assert {each.settings().role for each in found} == {"prefill", "decode"}
    for process in found:
        assert process.settings().engine == engine
        assert process.container["resources"]["limits"]["nvidia.com/gpu"] == 1
        assert process.container["image"].endswith(f":{engine}")


def test_values_that_do_not_exist_are_refused() -> None:
    with pytest.raises(AssertionError, match="replica"):
        templated("aggregated", "--set", "workers.worker.replica=3")


def test_names_of_workers_that_other_objects_have_are_refused() -> None:
    with pytest.raises(AssertionError, match="router"):
        templated("aggregated", "--set", "workers.router.model=smollm2")


def test_workers_can_be_scaled_to_none() -> None:
    scaled = templated("disaggregated", "--set", "workers.prefill.replicas=0")
    found = {each["metadata"]["name"]: each for each in of_kind(scaled, "Deployment")}
    assert found["baton-prefill"]["spec"]["replicas"] == 0


def test_a_changed_topology_replaces_the_router() -> None:
    changed = templated("pools", "--set", "router.topology.retry.others=false")
    first, second = (
        next(each for each in of_kind(found, "Deployment") if each["metadata"]["name"] == "baton-router")
        for found in (templated("pools"), changed)
    )
    assert first["spec"]["template"] != second["spec"]["template"]


@pytest.mark.parametrize("render", [kustomized, templated])
def test_with_tls_every_process_has_the_certificates(render: Callable[[str], list[Manifest]], tmp_path: Path) -> None:
    found = list(processes(render("tls"), tmp_path))
    assert {each.command for each in found} == {"frontend", "worker"}
    for process in found:
        runtime = process.settings().runtime
        assert is_encrypted(runtime)
        for path in (runtime.tls_ca, runtime.tls_certificate, runtime.tls_key):
            assert process.volume(str(Path(path).parent))["secret"]["secretName"] == "baton-tls"
            assert Path(path).name in TLS_KEYS


def test_the_chart_passes_lint() -> None:
    run(tool("helm"), "lint", "--strict", str(DEPLOY / "helm" / "baton"))


def test_kustomize_and_chart_agree_on_the_settings(tmp_path: Path) -> None:
    """One deployment, written twice, starts the same processes."""
    by_source = []
    for number, found in enumerate((kustomized("disaggregated"), templated("disaggregated"))):
        (directory := tmp_path / str(number)).mkdir()
        each = {process.name: process.settings() for process in processes(found, directory)}
        by_source.append({name: (one.role, one.model, one.kv.port, one.drain_timeout_s) for name, one in each.items()})
    assert by_source[0] == by_source[1]
    assert yaml.safe_load((DEPLOY / "kubernetes" / "base" / "settings.yaml").read_text())["cache_dir"] == "/models"
