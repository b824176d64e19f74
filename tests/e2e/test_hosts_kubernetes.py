"""Discovery by the Kubernetes API, on a double of it: three hosts find each other with the rights of their role."""

import json
from pathlib import Path

import pytest
import yaml

from tests.e2e.harness import echoed
from tests.e2e.hosts import starting
from tests.e2e.network import network

pytestmark = [pytest.mark.e2e, pytest.mark.cluster, pytest.mark.faults, pytest.mark.timeout(600)]

PROMPT = "Where are you?"


def test_discovery_by_kubernetes_needs_only_what_its_role_allows(
    tmp_path: Path,
) -> None:
    with network() as joined, starting(tmp_path, joined, "--engine", "echo") as start:
        hosts = start(kubernetes=True)
        status, body = hosts.post("/v1/completions", {"model": "echo", "prompt": PROMPT, "max_tokens": 40})
        assert status == 200, body
        assert json.loads(body)["choices"][0]["text"] == echoed(PROMPT, 40)
        hosts.stop()
    used = [json.loads(line) for line in hosts.api_record.read_text().splitlines()]
    assert not [each for each in used if "unknown" in each]
    directory = Path(__file__).parents[2] / "deploy" / "kubernetes" / "components" / "kubernetes-discovery"
    role = next(yaml.safe_load_all((directory / "access.yaml").read_text()))
    allowed = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    needed = {(each["group"], each["resource"], each["verb"]) for each in used}
    assert needed <= allowed
    service = yaml.safe_load((directory / "pods.yaml").read_text())
    assert service["spec"]["publishNotReadyAddresses"]  # a process is ready when it finds itself
    assert service["spec"]["selector"] == {"app.kubernetes.io/name": "baton"}  # workers and frontends
    labels = service["metadata"]["labels"]
    wanted = {pair for each in used for pair in each["selector"].split(",") if pair}
    assert wanted
    assert wanted <= {f"{name}={value}" for name, value in labels.items()}
