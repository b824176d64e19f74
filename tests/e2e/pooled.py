"""A `baton serve --topology`: a router, and workers in pools behind it."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from e2e.harness import LOAD_S, Process, Serve, System, eventually, fetch, running

ROUTER = 0


class Pooled(Serve):
    """Started from a topology. The router has the first system port, then come the workers in the order of the file."""

    def __init__(
        self, directory: Path, topology: Mapping[str, Any], workers: int, arguments: Iterable[str] = ()
    ) -> None:
        System.__init__(self, directory, workers + 1, "torch")
        self.start_s = LOAD_S
        self.file = directory / "pools.yaml"
        self.write(topology)
        ports = ["--port", str(self.port), "--system-port", str(self.system_ports[0])]
        flags = ["serve", "--topology", str(self.file), *ports, "--log-dir", str(directory), *arguments]
        self.process = Process(flags, directory / "serve.log")
        running.append(self)

    def write(self, topology: Mapping[str, Any]) -> None:
        """Put another topology in force, as an editor does: by replacing the file."""
        fresh = self.file.with_suffix(".new")
        fresh.write_text(yaml.safe_dump(dict(topology), sort_keys=False))
        fresh.replace(self.file)

    def wait_ready(self) -> None:
        """See `System.wait_ready`."""
        eventually(self._announced, self.start_s, "the ready line")
        for number in range(self.workers):
            eventually(lambda n=number: self.health(n) == 200, self.start_s, f"process {number} is ready")

    def decisions(self, part: str) -> dict[str, int]:
        """Return how many requests have been sent to each pool of a part."""
        counts: dict[str, int] = {}
        _, text = self.system("/metrics", ROUTER)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "baton_router_decisions_total" and sample.labels["part"] == part:
                    counts[sample.labels["pool"]] = counts.get(sample.labels["pool"], 0) + int(sample.value)
        return counts

    def models(self) -> list[str]:
        """Return the models that clients see."""
        return [entry["id"] for entry in json.loads(fetch(f"{self.url}/v1/models")[1])["data"]]
