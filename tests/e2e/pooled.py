"""A `baton serve --topology`: a router, and workers in pools behind it."""

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.harness import LOAD_S, Process, Serve, System, eventually, fetch, running

ROUTER = 0


class Pooled(Serve):
    """Started from a topology. The router has the first system port, then come the workers in the order of the file."""

    def __init__(
        self,
        directory: Path,
        topology: Mapping[str, Any],
        workers: int,
        arguments: Iterable[str] = (),
        settings: Mapping[str, str] | None = None,
    ) -> None:
        System.__init__(self, directory, workers + 1, "torch")
        self.start_timeout_s = LOAD_S
        self.file = directory / "pools.yaml"
        self.write(topology)
        ports = ["--port", str(self.port), "--system-port", str(self.system_ports[0])]
        flags = ["serve", "--topology", str(self.file), *ports, "--log-dir", str(directory), *arguments]
        self.process = Process(flags, directory / "serve.log", settings)
        running.append(self)

    def write(self, topology: Mapping[str, Any]) -> None:
        """Put another topology in force, as an editor does: by replacing the file."""
        fresh = self.file.with_suffix(".new")
        fresh.write_text(yaml.safe_dump(dict(topology), sort_keys=False))
        fresh.replace(self.file)

    def wait_ready(self) -> None:
        """See `System.wait_ready`."""
        eventually(self._announced, self.start_timeout_s, "the ready line")
        for number in range(self.workers):
            eventually(lambda n=number: self.health(n) == 200, self.start_timeout_s, f"process {number} is ready")

    def answers(
        self, body: Mapping[str, Any], count: int, every_s: float, meanwhile: Mapping[float, Callable[[], object]]
    ) -> list[str]:
        """Send `count` requests one after the other; return what was said. `meanwhile` is done by its seconds."""

        async def run() -> list[str]:
            async with self.async_client() as client, asyncio.timeout(120):

                async def send(number: int) -> str:
                    await asyncio.sleep(number * every_s)
                    answer = await client.chat.completions.create(**body)
                    return answer.choices[0].message.content or ""

                async def act(after_s: float, what: Callable[[], object]) -> None:
                    await asyncio.sleep(after_s)
                    await asyncio.to_thread(what)

                sending = asyncio.gather(*(send(number) for number in range(count)))
                await asyncio.gather(*(act(after_s, what) for after_s, what in meanwhile.items()))
                return await sending

        return asyncio.run(run())

    def router(self) -> psutil.Process:
        """Return the process of the router."""
        return eventually(
            lambda: next((child for child in self.children() if "router" in child.cmdline()), None), what="the router"
        )

    def decisions(self, role: str) -> dict[str, int]:
        """Return how many requests have been sent to each pool of a role."""
        counts: dict[str, int] = {}
        _, text = self.system("/metrics", ROUTER)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "baton_router_decisions_total" and sample.labels["role"] == role:
                    counts[sample.labels["pool"]] = counts.get(sample.labels["pool"], 0) + int(sample.value)
        return counts

    def models(self) -> list[str]:
        """Return the models that clients see."""
        return [entry["id"] for entry in json.loads(fetch(f"{self.url}/v1/models")[1])["data"]]
