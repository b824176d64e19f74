"""The router process on a runtime without sockets: when it is found, how it is, what it follows, how it leaves."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from baton.config.settings import Settings
from baton.engines.echo.engine import MODEL_DIR
from baton.errors import ConfigError, Draining, EngineDead, Unsupported
from baton.ports.runtime import Service, Wire
from baton.process.router import GlobalRouter
from baton.testing import eventually, run_bounded
from baton.testing.memory_runtime import MemoryEndpoint, MemoryRuntime
from tests.unit.router.router_pools import LAST, REQUEST, FakePool

PLAN: dict[str, Any] = {
    "mode": "disaggregated",
    "prefill": {"pools": [{"name": "one"}]},
    "decode": {"pools": [{"name": "one"}, {"name": "two"}], "mapping": "one"},
}


class Stage:
    """A router, its plan in a file, and pools that appear when told to."""

    def __init__(self, tmp_path: Path, **settings: Any) -> None:
        self.file = tmp_path / "pools.yaml"
        self.runtime = MemoryRuntime()
        self.pools: dict[str, FakePool] = {}
        self.write(PLAN)
        base = Settings(topology=str(self.file), model=str(MODEL_DIR), name="echo", drain_timeout_s=0.2)
        self.router = GlobalRouter(msgspec.structs.replace(base, **settings), self.runtime)
        self.stop = asyncio.Event()
        self.ready = asyncio.Event()

    def write(self, plan: dict[str, Any]) -> None:
        """Replace the file, as an editor does."""
        fresh = self.file.with_suffix(".new")
        fresh.write_text(yaml.safe_dump(plan))
        os.replace(fresh, self.file)

    async def add(self, path: str) -> FakePool:
        """A worker appears at `path`."""
        pool = self.pools[path] = FakePool(path)
        service: Service[Wire, Wire] = Service(pool.serve, lambda wire: wire, lambda wire: wire)  # type: ignore[arg-type, return-value]
        await self.runtime.serve(path, service)
        return pool

    def endpoint(self, name: str) -> MemoryEndpoint:
        """Return an endpoint of the router."""
        return self.runtime.endpoints[f"baton.router.{name}"][0]

    async def ask(self, endpoint: str) -> list[Wire]:
        """Call the router as a frontend does."""
        client = await self.runtime.client(f"baton.router.{endpoint}")
        return [reply async for reply in client.call(REQUEST)]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the router for the length of the block, with a worker for each part."""
        await self.add("baton-prefill-one.prefill.generate")
        await self.add("baton-decode-one.decode.generate")
        self.task = asyncio.create_task(self.router.run(self.stop, self.ready.set))
        try:
            await asyncio.wait_for(self.ready.wait(), 10)
            yield
        finally:
            self.stop.set()
            await self.task


def test_it_is_found_when_every_part_has_a_worker_and_not_before(tmp_path: Path) -> None:
    async def body() -> None:
        stage = Stage(tmp_path)
        task = asyncio.create_task(stage.router.run(stage.stop, stage.ready.set))
        await stage.add("baton-decode-two.decode.generate")
        await asyncio.sleep(0.1)
        assert stage.router.health().state == "starting"
        assert "baton.router.decode_generate" not in stage.runtime.endpoints
        await stage.add("baton-prefill-one.prefill.generate")
        await stage.ready.wait()
        assert stage.router.health().state == "serving"
        prefill, decode = stage.endpoint("prefill_generate").card, stage.endpoint("decode_generate").card
        assert prefill is not None
        assert decode is not None
        assert (prefill.name, prefill.worker_type, prefill.surfaces) == ("echo", "prefill", {"prefill"})
        assert (decode.worker_type, decode.surfaces) == ("decode", {"chat", "completions"})
        assert (prefill.handoff_host, decode.needs) == (None, (("prefill",),))
        stage.stop.set()
        await task

    run_bounded(body())


def test_without_workers_it_gives_up_in_time_and_says_where_it_looked(tmp_path: Path) -> None:
    async def body() -> None:
        stage = Stage(tmp_path, start_timeout_s=0.1)
        with pytest.raises(
            EngineDead, match=r"no worker for prefill and decode .* baton-prefill-one\.prefill\.generate"
        ):
            await stage.router.run(stage.stop, stage.ready.set)

    run_bounded(body())


def test_a_plan_that_is_wrong_at_the_start_is_refused(tmp_path: Path) -> None:
    async def body() -> None:
        stage = Stage(tmp_path)
        stage.write({**PLAN, "retri": {}})
        with pytest.raises(ConfigError, match="retri: unknown key"):
            await stage.router.run(stage.stop, stage.ready.set)

    run_bounded(body())


def test_a_stop_while_it_waits_for_workers_ends_it(tmp_path: Path) -> None:
    async def body() -> None:
        stage = Stage(tmp_path)
        task = asyncio.create_task(stage.router.run(stage.stop, stage.ready.set))
        await asyncio.sleep(0.05)
        stage.stop.set()
        await task
        assert not stage.ready.is_set()

    run_bounded(body())


def test_it_follows_its_file_and_refuses_a_wrong_one_as_a_whole(tmp_path: Path) -> None:
    async def body() -> None:
        stage = Stage(tmp_path)
        async with stage.running():
            two = await stage.add("baton-decode-two.decode.generate")
            assert await stage.ask("decode_generate") == [{"token_ids": [5], "index": 0}, LAST]
            assert two.requests == []
            stage.write({**PLAN, "decode": {**PLAN["decode"], "mapping": "two"}})
            await eventually(lambda: count(stage, "adopted") == 1)
            await stage.ask("decode_generate")
            assert len(two.requests) == 1
            stage.write({**PLAN, "decode": {**PLAN["decode"], "mapping": "three"}})
            await eventually(lambda: count(stage, "refused") == 1)
            stage.write({"mode": "aggregated", "aggregated": {"pools": [{"name": "one"}]}})
            await eventually(lambda: count(stage, "refused") == 2)
            await stage.ask("decode_generate")
            assert len(two.requests) == 2

    run_bounded(body())


def test_a_part_without_workers_is_an_illness_that_passes(tmp_path: Path) -> None:
    async def body() -> None:
        stage = Stage(tmp_path)
        async with stage.running():
            (worker,) = stage.runtime.endpoints["baton-decode-one.decode.generate"]
            await worker.deregister()
            assert stage.router.health().state == "unhealthy"
            await worker.register()
            assert stage.router.health().ready
            assert 'baton_router_pool_workers{pool="one",role="decode"} 1.0' in await stage.router.metrics()
            with pytest.raises(Unsupported, match="takes no commands"):
                stage.router.control()

    run_bounded(body())


def test_a_router_that_discovery_has_lost_registers_again(tmp_path: Path) -> None:
    async def body() -> None:
        stage = Stage(tmp_path)
        async with stage.running():
            stage.endpoint("decode_generate").registered = False
            await eventually(lambda: stage.endpoint("decode_generate").registered)
            assert stage.router.health().ready

    run_bounded(body())


def test_at_a_stop_requests_finish_or_are_told_to_go_elsewhere(tmp_path: Path) -> None:
    async def body() -> None:
        stage = Stage(tmp_path)
        async with stage.running():
            stage.pools["baton-prefill-one.prefill.generate"].replies = [lambda: asyncio.sleep(0.05), LAST]
            stage.pools["baton-decode-one.decode.generate"].replies = [asyncio.Event().wait]
            short = asyncio.create_task(stage.ask("prefill_generate"))
            endless = asyncio.create_task(stage.ask("decode_generate"))
            await eventually(lambda: stage.router.gate.in_flight == 2)
            stage.stop.set()
            assert await short == [LAST]
            with pytest.raises(Draining):
                await endless
        assert stage.router.gate.in_flight == 0

    run_bounded(body())


def count(stage: Stage, outcome: str) -> float:
    labels = {"outcome": outcome}
    return stage.router.observed.registry.get_sample_value("baton_router_reloads_total", labels) or 0.0
