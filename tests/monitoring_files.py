"""The files of deploy/monitoring, and promtool, which checks them."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

MONITORING = Path(__file__).parents[1] / "deploy" / "monitoring"
ALERTS = MONITORING / "alerts.yaml"
ALERT_TESTS = MONITORING / "alerts_test.yaml"
DASHBOARD = MONITORING / "grafana-dashboard.json"
CONFIGURATION = MONITORING / "prometheus.yaml"
METRIC = re.compile(r"\b(?:baton|dynamo|process|sglang|trtllm)_\w+")

needs_prometheus = pytest.mark.skipif(
    shutil.which("promtool") is None or shutil.which("prometheus") is None,
    reason="no promtool: install Debian's package prometheus (`make machine` does, as root)",
)


def promtool(*arguments: str, text: str = "") -> str:
    """Run promtool; return what it says. It must find no fault."""
    done = subprocess.run(["promtool", *arguments], input=text, capture_output=True, text=True, timeout=60, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


def alert_rules() -> list[dict[str, Any]]:
    """Return the rules of all groups."""
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    """Return the panels of the dashboard that show something."""
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def dashboard_queries(**variables: str) -> Iterator[tuple[str, str]]:
    """Yield the title and the query of each target of the dashboard, with its variables replaced."""
    values = {"job": ".*", "process": ".*", "__rate_interval": "1m", **variables}
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], re.sub(r"\$(\w+)", lambda found: values[found[1]], target["expr"])
