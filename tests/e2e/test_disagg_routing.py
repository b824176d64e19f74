"""Prefill and decode workers with routers of their own, which keep KV transfers within one place."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.doubles.tiny_models import make_tiny_model
from tests.e2e.harness import Cluster, Process

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

WORKERS = (("prefill", "a"), ("decode", "a"), ("decode", "b"))
REQUESTS = 6


class Zones(Cluster):
    """Workers in two zones, behind a frontend that would select them in turn."""

    def start_worker(self, number: int, *more: str) -> Process:
        role, zone = WORKERS[number]
        routers = ("--router-prefill", "kv", "--router-decode", "kv")
        return super().start_worker(number, "--role", role, "--kv-locality", f"zone={zone}", *routers, *more)


@pytest.fixture
def zones(start: Callable[..., Zones], tmp_path: Path) -> Iterator[Zones]:
    model = make_tiny_model(tmp_path / "tiny")
    cluster = start(Zones, "--model", str(model), "--name", "tiny", engine="torch", workers=len(WORKERS))
    yield cluster
    cluster.stop()


@pytest.mark.slow
def test_kv_stays_in_its_zone(zones: Zones) -> None:
    for number in range(REQUESTS):
        zones.client(strict=False).completions.create(model="tiny", prompt=f"{number} " * 40, max_tokens=2)
    completed = [zones.ended("completed", worker, role) for worker, (role, _) in enumerate(WORKERS)]
    assert completed[1:] == [REQUESTS, 0]
