"""Files of Dynamo's global router in front of real workers, and in front of pools that have a router of their own."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.engines.echo.engine import MODEL_DIR
from tests.e2e.harness import LOAD_S, Process, eventually, fetch, free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

# As Dynamo's own examples have it: the pool by TTFT target, without a unit in the names of the older version.
POOLS = {
    "mode": "agg",
    "num_agg_pools": 2,
    "agg_pool_dynamo_namespaces": ["gp-fast", "gp-slow"],
    "agg_pool_selection_strategy": {
        "ttft_min": 0,
        "ttft_max": 1000,
        "ttft_resolution": 2,
        "itl_min": 0,
        "itl_max": 100,
        "itl_resolution": 1,
        "agg_pool_mapping": [[0], [1]],
    },
}
# One pool, whose requests go to its own router: here that of the file above.
OF_ROUTERS = {
    **POOLS,
    "num_agg_pools": 1,
    "agg_pool_dynamo_namespaces": ["baton"],
    "agg_pool_selection_strategy": {**POOLS["agg_pool_selection_strategy"], "agg_pool_mapping": [[0], [0]]},
}


class RoutedPools:
    """Two workers in pools, a router before them, and another router before that one; a frontend for each router."""

    def __init__(self, directory: Path) -> None:
        self.port = free_ports(4)  # two frontends, two routers
        self._directory = directory
        self._started: list[Process] = []
        for name in ("gp-fast", "gp-slow"):
            self._start(f"worker-{name}", "worker", "--namespace", name)
        defaults = ("--default-ttft-ms", "100", "--default-itl-ms", "50")
        self._start_router("baton", POOLS, 0, *defaults)
        self._start_router("top", OF_ROUTERS, 1, "--pool-endpoint", "router.generate")
        for number, namespace in enumerate(("baton", "top")):
            self._start(
                f"frontend-{namespace}", "frontend", "--namespace", namespace, "--port", str(self.port + number)
            )

    def _start_router(self, namespace: str, content: dict[str, Any], number: int, *flags: str) -> None:
        file = self._directory / f"{namespace}.json"
        file.write_text(json.dumps(content))
        system_port = ("--system-port", str(self.port + 2 + number))
        flags = ("--namespace", namespace, "--topology", str(file), *system_port, *flags)
        self._start(f"router-{namespace}", "router", "run", "--model", str(MODEL_DIR), "--name", "echo", *flags)

    def _start(self, name: str, *arguments: str) -> None:
        settings = {"BATON_RUNTIME_DIRECTORY": str(self._directory / "discovery"), "BATON_ENGINE": "echo"}
        self._started.append(Process(arguments, self._directory / f"{name}.log", settings))

    def wait_ready(self) -> None:
        """Wait until both frontends list the model."""
        for number in range(2):
            url = f"http://127.0.0.1:{self.port + number}/v1/models"
            eventually(lambda at=url: json.loads(fetch(at)[1])["data"], LOAD_S, f"{url} lists the model")

    def chat(self, frontend: int, **more: Any) -> str:
        """Return the answer to one request."""
        body = {"model": "echo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, **more}
        status, text = fetch(f"http://127.0.0.1:{self.port + frontend}/v1/chat/completions", json.dumps(body).encode())
        assert status == 200, text
        content: str = json.loads(text)["choices"][0]["message"]["content"]
        return content

    def decisions(self, router: int) -> dict[str, int]:
        """Return how many requests a router has sent to each pool."""
        _, text = fetch(f"http://127.0.0.1:{self.port + 2 + router}/metrics")
        return {
            sample.labels["pool"]: int(sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "baton_router_decisions_total"
        }

    def logs(self) -> str:
        """Return the end of every log."""
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in self._directory.glob("*.log"))

    def close(self) -> None:
        """End every process."""
        for process in self._started:
            process.kill()


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoutedPools]:
    pools = RoutedPools(tmp_path_factory.mktemp("pools"))
    try:
        pools.wait_ready()
        yield pools
    except AssertionError as error:
        raise AssertionError(f"{error}\n{pools.logs()}") from None
    finally:
        pools.close()


def test_a_file_of_dynamo_routes_by_targets_and_by_the_defaults_of_the_flags(pools: RoutedPools) -> None:
    assert pools.chat(0) == "hello"
    assert pools.decisions(0) == {"gp-fast": 1}  # without the flag it is the middle of the axis, which is gp-slow's
    assert pools.chat(0, nvext={"router": {"ttft_target": 900}}) == "hello"
    assert pools.decisions(0) == {"gp-fast": 1, "gp-slow": 1}


def test_a_pool_with_a_router_of_its_own_is_called_at_its_endpoint(pools: RoutedPools) -> None:
    before = sum(pools.decisions(0).values())
    assert pools.chat(1, nvext={"router": {"ttft_target": 900}}) == "hello"
    assert pools.decisions(1) == {"baton": 1}
    assert sum(pools.decisions(0).values()) == before + 1
