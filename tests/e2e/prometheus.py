"""A real Prometheus that scrapes a real deployment, with the alert rules of deploy/monitoring made impatient."""

import json
import re
import signal
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.harness import System, eventually, free_ports
from tests.monitoring_files import ALERTS, CONFIGURATION

START_S = 60.0
STOP_S = 30.0


class Prometheus:
    """Its HTTP API."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def get(self, path: str, **query: str) -> Any:
        """Return the data of a successful answer."""
        with urllib.request.urlopen(f"{self._url}/{path}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
            content = json.load(answer)
        assert content["status"] == "success", content
        return content["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the samples that an expression has now."""
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found

    def targets(self) -> dict[str, str]:
        """Return the health of each target by the name of its process."""
        return {
            each["labels"]["process"]: each["health"] for each in self.get("targets", state="active")["activeTargets"]
        }

    def firing(self, alert: str) -> list[dict[str, str]]:
        """Return the labels of each firing instance of an alert."""
        alerts = self.get("alerts")["alerts"]
        return [each["labels"] for each in alerts if each["labels"]["alertname"] == alert and each["state"] == "firing"]


def impatient_rules() -> dict[str, Any]:
    """Return the alert rules with times that a test can wait for; the conditions are the same."""
    rules: dict[str, Any] = yaml.safe_load(ALERTS.read_text())
    for group in rules["groups"]:
        group["interval"] = "1s"
        for rule in group["rules"]:
            rule.pop("for", None)
            rule["expr"] = re.sub(r"\[(1|5)m\]", "[5s]", rule["expr"])
    return rules


def configuration(system: System) -> dict[str, Any]:
    """Return the configuration for `system`, with short intervals."""
    content: dict[str, Any] = yaml.safe_load(CONFIGURATION.read_text())
    content["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    [discovery] = content["scrape_configs"][0]["http_sd_configs"]
    discovery |= {"url": f"{system.url}/metrics/targets", "refresh_interval": "1s"}
    return content


@contextmanager
def prometheus_for(system: System, directory: Path) -> Iterator[Prometheus]:
    """Run Prometheus within the block."""
    (directory / "alerts.yaml").write_text(yaml.safe_dump(impatient_rules()))
    file = directory / "prometheus.yaml"
    file.write_text(yaml.safe_dump(configuration(system)))
    port = free_ports(1)
    flags = [f"--config.file={file}", f"--storage.tsdb.path={directory / 'data'}", "--log.level=error"]
    process = subprocess.Popen(["prometheus", *flags, f"--web.listen-address=127.0.0.1:{port}"])
    try:
        prometheus = Prometheus(port)
        eventually(lambda: prometheus.query("up"), START_S, "Prometheus has scraped something")
        yield prometheus
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
