"""The runtime contract over ai-dynamo-runtime: file discovery, requests over TCP, all in this process."""

import asyncio
import shutil
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from dynamo import _core

from baton.config.runtime import RuntimeOptions
from baton.errors import PeerLost
from baton.ports.runtime import Client, Context, Runtime, Service, Wire
from baton.protocol.events import KvCleared, KvStored
from baton.runtimes.dynamo.runtime import DynamoRuntime
from baton.testing import RuntimeContract, eventually, run_bounded
from baton.testing.runtime_contract import CARD, PATH


class TestDynamoRuntime(RuntimeContract):
    @pytest.fixture(autouse=True)
    def _fresh_discovery(self, tmp_path: Path) -> None:
        self._options = RuntimeOptions(directory=str(tmp_path / "discovery"))

    def make_runtime(self) -> Runtime:
        return DynamoRuntime(self._options, publishes_metrics=True)

    def test_the_runtimes_own_metrics_are_returned(self) -> None:
        async def body() -> None:
            async with self._served(_echo) as served:
                await served.call()
                text = await served.runtime.metrics()
                assert "dynamo_component_requests_total" in text

        run_bounded(body(), self.limit_s)

    def test_responses_go_over_tcp_whatever_the_environment_says(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DYN_RESPONSE_PLANE", "quic")  # which would end the call when its worker leaves discovery
        self.test_a_running_call_continues_after_deregister()

    def test_a_kv_router_chooses_the_rank_with_the_cached_prefix(self) -> None:
        tokens = list(range(64))

        async def body() -> None:
            runtime = DynamoRuntime(self._options, subscribes=True)
            await runtime.start()
            try:
                endpoint = await runtime.serve(PATH, Service(_echo, _as_it_is, _as_it_is))
                await endpoint.register_model(CARD)
                router = _core.KvRouter(runtime.raw.endpoint(PATH), CARD.block_size, _core.KvRouterConfig())
                # Again and again: an event is lost while the router's subscription is not connected.
                found = (0, 0)
                while found != (1, 3):
                    endpoint.publish(KvStored((1, 2, 3), tuple(tokens[:48]), CARD.block_size, dp_rank=1))
                    await asyncio.sleep(0.05)
                    found = (await router.best_worker(tokens))[1:]
                # Stored more than once: the runtime counts, and the cache is empty nevertheless.
                endpoint.publish(KvStored((1, 2, 3), tuple(tokens[:48]), CARD.block_size, dp_rank=1))
                while found[1]:
                    # A router that has missed an event reads the worker's blocks again when it gets a later one.
                    endpoint.publish(KvStored((4,), tuple(range(100, 116)), CARD.block_size, dp_rank=1))
                    endpoint.publish(KvCleared(dp_rank=1))
                    await asyncio.sleep(0.05)
                    found = (await router.best_worker(tokens))[1:]
            finally:
                await runtime.shutdown()

        run_bounded(body(), self.limit_s)

    def test_a_kv_router_selects_among_the_workers_with_the_required_taints(self) -> None:
        def requiring(taint: str) -> Wire:
            return {"token_ids": [1] * 40, "routing": {"routing_constraints": {"required_taints": [taint]}}}

        async def body() -> None:
            runtime = DynamoRuntime(self._options, subscribes=True)
            await runtime.start()
            try:
                endpoint = await runtime.serve(PATH, Service(_echo, _as_it_is, _as_it_is))
                await endpoint.register_model(msgspec.structs.replace(CARD, taints=frozenset({"silver"})))
                client = await runtime.client(PATH, CARD.block_size)
                await client.ready(self.limit_s)
                served: list[Wire] = []
                async with asyncio.timeout(self.limit_s):
                    while not served:  # the router has not found the worker yet
                        await asyncio.sleep(0.05)
                        served = await _replies(client, requiring("silver"))
                assert [reply["token_ids"] for reply in served] == [[1] * 40]
                with pytest.raises(PeerLost, match="no worker"):
                    _ = [reply async for reply in client.call(requiring("gold"))]
            finally:
                await runtime.shutdown()

        run_bounded(body(), self.limit_s)

    def test_an_endpoint_that_was_restored_in_part_is_restored_in_whole(self, tmp_path: Path) -> None:
        directory, moved, found = tmp_path / "model", tmp_path / "moved", tmp_path / "discovery"

        async def body() -> None:
            shutil.copytree(CARD.directory, directory)
            runtime = DynamoRuntime(self._options)
            await runtime.start()
            try:
                endpoint = await runtime.serve(PATH, Service(_echo, _as_it_is, _as_it_is))
                await endpoint.register_model(msgspec.structs.replace(CARD, directory=str(directory)))

                def lose() -> bool:
                    for entry in filter(Path.is_file, found.rglob("*")):
                        entry.unlink(missing_ok=True)  # the runtime may be renaming it
                    return not endpoint.is_registered

                await eventually(lose)
                directory.rename(moved)
                with pytest.raises(PeerLost, match="does not accept"):
                    await runtime.restore()
                await eventually(lambda: any(found.rglob("instances/*%2Fendpoint%2F*")))
                assert not endpoint.is_registered, "frontends do not know its model"
                moved.rename(directory)
                await runtime.restore()
                await eventually(lambda: endpoint.is_registered and any(found.rglob("mdc/*")))
            finally:
                await runtime.shutdown()

        run_bounded(body(), self.limit_s)


async def _replies(client: Client, request: Wire) -> list[Wire]:
    try:
        return [reply async for reply in client.call(request)]
    except PeerLost:
        return []


def _as_it_is(value: Any) -> Any:
    return value


async def _echo(request: Wire, context: Context) -> AsyncGenerator[Wire, None]:
    yield request
