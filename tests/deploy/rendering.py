"""Renders the manifests as users do, and validates them by the schemas of Kubernetes and the Prometheus operator."""

import functools
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
OVERLAYS = sorted(path.name for path in (DEPLOY / "kubernetes" / "overlays").iterdir())
VALUES = sorted(path.stem for path in (DEPLOY / "helm" / "values").iterdir())
VERSIONS = ("1.28", "1.34")
VENV = Path(os.environ.get("BATON_DEPLOY_VENV", ROOT / ".venv-deploy"))
MONITORS = """
import json
from cloudcoil.models.prometheus_operator import v1
print(json.dumps({kind.__name__: kind.model_json_schema(by_alias=True) for kind in (v1.ServiceMonitor, v1.PodMonitor)}))
"""

Manifest = dict[str, Any]


def tool(name: str, where: str = "run scripts/deploy-venv.sh") -> str:
    """Return the path of a program; skip without it."""
    found = shutil.which(name, path=f"{VENV / 'bin'}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{name} is not installed: {where}")
    return found


def run(*command: str) -> str:
    """Return what a program writes; fail with its errors."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}{done.stdout}"
    return done.stdout


@functools.cache
def kustomized(overlay: str) -> list[Manifest]:
    """Return the objects of an overlay."""
    kubectl = tool("kubectl", "see the documentation of Kubernetes")
    return _documents(run(kubectl, "kustomize", str(DEPLOY / "kubernetes" / "overlays" / overlay)))


@functools.cache
def templated(values: str, *options: str) -> list[Manifest]:
    """Return the objects of the chart with one of the files of values."""
    file = str(DEPLOY / "helm" / "values" / f"{values}.yaml")
    return _documents(
        run(tool("helm"), "template", "baton", str(DEPLOY / "helm" / "baton"), "--values", file, *options)
    )


def _documents(text: str) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(text) if document]


def problems(manifest: Manifest, version: str) -> list[str]:
    """Return what is wrong with an object; fields that its schema does not have are wrong."""
    errors = _validator(manifest["apiVersion"], manifest["kind"], version).iter_errors(manifest)
    return [f"{manifest['kind']} {manifest['metadata']['name']}: {error.message}" for error in errors]


@functools.cache
def _validator(api_version: str, kind: str, version: str) -> jsonschema_rs.Draft202012Validator:
    if api_version.startswith("monitoring.coreos.com/"):
        return jsonschema_rs.Draft202012Validator(_closed(_monitors()[kind]))
    group, _, number = api_version.rpartition("/")
    name = "-".join(filter(None, (kind.lower(), group.partition(".")[0], number)))
    directory = _schemas() / f"v{version}.0-local-strict"
    schema, definitions = (_local(directory / f"{each}.json") for each in (name, "_definitions"))
    return jsonschema_rs.Draft202012Validator({**definitions, **schema})


def _local(file: Path) -> dict[str, Any]:
    """Return a schema whose references are to itself: definitions are in a file of their own."""
    schema: dict[str, Any] = json.loads(re.sub(r'"[^"]*_definitions\.json#', '"#', file.read_text()))
    schema.pop("$id", None)
    return schema


def _schemas() -> Path:
    found = sorted(VENV.glob("lib/*/site-packages/kubernetes_validate/kubernetes-json-schema"))
    if not found:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(
            "the schemas are not installed: run scripts/deploy-venv.sh"
        )
    return found[0]


@functools.cache
def _monitors() -> dict[str, Any]:
    schemas: dict[str, Any] = json.loads(run(str(VENV / "bin" / "python"), "-c", MONITORS))
    return schemas


def _closed(schema: Any) -> Any:
    """Return a schema that refuses fields which it does not name."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "type" in schema:
        closed.setdefault("additionalProperties", False)
    return closed
