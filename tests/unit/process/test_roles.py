"""Prefill and decode workers in one process: what they serve, how they are announced, and how they stop."""

import asyncio
import ctypes
import socket
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, Literal

import msgspec
import pytest

from baton.config.settings import Settings
from baton.config.transfer import KvTransferOptions
from baton.errors import BatonError, ConfigError
from baton.ports.engine import Capabilities, EngineInfo, HandoffStyle
from baton.ports.runtime import Locality, ModelCard
from baton.ports.transfer import BlockMemory, KvShape
from baton.process.roles import role_of
from baton.process.worker import Worker
from baton.protocol.events import LoadSnapshot
from baton.protocol.handoff import LocalProbe
from baton.protocol.outputs import Finished, FinishReason, KvComputed, TokenDelta
from baton.testing import Script, ScriptedEngine, eventually, run_bounded
from baton.testing.fakes import SCRIPTED_INFO
from baton.testing.memory_runtime import MemoryRuntime

SHAPE = KvShape(model="tiny", dtype="float32", layers=1, kv_heads=1, head_dim=4, block_size=16)
COMPUTED: Script = [KvComputed((0,), complete=True), TokenDelta([1]), Finished(FinishReason.LENGTH)]
WELL: Script = [TokenDelta([1]), Finished(FinishReason.LENGTH)]
EARLY = Capabilities(handoff=HandoffStyle.EARLY)
Role = Literal["prefill", "decode"]


class WorkerHarness:
    """A worker of one role that runs, on a runtime that may be shared."""

    def __init__(self, role: Role, runtime: MemoryRuntime, shape: KvShape = SHAPE, **settings: Any) -> None:
        self._bytes = ctypes.create_string_buffer(2 * 8 * 256)
        memory = BlockMemory(
            shape=shape,
            address=ctypes.addressof(self._bytes),
            planes=2,
            plane_bytes=8 * 256,
            block_bytes=256,
            blocks=8,
        )
        info: EngineInfo = msgspec.structs.replace(SCRIPTED_INFO, kv=memory)
        self.engine = ScriptedEngine(COMPUTED if role == "prefill" else WELL, capabilities=EARLY, info=info)
        self.runtime = runtime
        self.role = role
        self.stop = asyncio.Event()
        self.ready = asyncio.Event()
        self.worker = Worker(msgspec.structs.replace(Settings(role=role), **settings), self.engine, runtime)

    async def run(self) -> None:
        await self.worker.run(self.stop, self.ready.set)

    @property
    def card(self) -> ModelCard:
        [endpoint] = self.runtime.endpoints[f"baton.{self.role}.generate"]
        assert endpoint.card is not None
        return endpoint.card

    async def call(self, **request: Any) -> list[dict[str, Any]]:
        client = await self.runtime.client(f"baton.{self.role}.generate")
        async with aclosing(client.call({"token_ids": [1, 2, 3], **request})) as replies:
            return [reply async for reply in replies]

    def metric(self, start: str) -> float:
        lines = self.worker.observed.render().splitlines()
        [line] = [line for line in lines if line.startswith(start)]
        return float(line.split()[-1])


@asynccontextmanager
async def running_worker(
    role: Role, runtime: MemoryRuntime | None = None, **settings: Any
) -> AsyncIterator[WorkerHarness]:
    harness = WorkerHarness(role, runtime or MemoryRuntime(), **settings)
    running = asyncio.create_task(harness.run())
    ready = asyncio.create_task(harness.ready.wait())
    await asyncio.wait([running, ready], return_when=asyncio.FIRST_COMPLETED)
    try:
        yield harness
    finally:
        harness.stop.set()
        await running


def listens(address: tuple[str | None, int | None]) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((str(address[0]), int(address[1] or 0))) == 0


def test_a_prefill_worker_registers_its_type_and_address() -> None:
    async def body() -> None:
        async with running_worker("prefill") as harness:
            card = harness.card
            assert (card.worker_type, card.surfaces, card.needs) == ("prefill", {"prefill"}, (("decode",),))
            assert card.kv_events
            assert listens((card.handoff_host, card.handoff_port))
            assert harness.engine.submitted[0].handoff is not None
        assert not listens((card.handoff_host, card.handoff_port)), "its rooms are closed"

    run_bounded(body())


def test_a_decode_worker_registers_its_type_without_address() -> None:
    async def body() -> None:
        async with running_worker("decode") as harness:
            card = harness.card
            assert (card.worker_type, card.surfaces) == ("decode", {"chat", "completions"})
            assert (card.needs, card.handoff_port, card.kv_events) == ((("prefill",),), None, False)
            assert [reply["token_ids"] for reply in await harness.call()] == [[1]], (
                "without a handoff it computes itself"
            )

    run_bounded(body())


@pytest.mark.parametrize(("style", "registered"), [("auto", True), ("early", True), ("late", False)])
def test_the_address_is_registered_only_for_early_handoff(style: Any, registered: bool) -> None:
    async def body() -> None:
        async with running_worker("prefill", kv=KvTransferOptions(handoff=style)) as harness:
            assert (harness.card.handoff_host is not None) is registered
            assert (harness.card.handoff_port is not None) is registered

    run_bounded(body())


def test_workers_with_different_kv_shapes_do_not_start() -> None:
    async def body() -> None:
        runtime = MemoryRuntime()
        other = msgspec.structs.replace(SHAPE, block_size=32)
        async with running_worker("prefill", runtime):
            late = WorkerHarness("decode", runtime, other)
            with pytest.raises(ConfigError, match="32 tokens, those of the prefill workers 16"):
                await late.run()
            assert "baton.decode.generate" not in runtime.endpoints, "it has never been found"

    run_bounded(body())


def test_a_draining_prefill_worker_waits_for_its_open_rooms() -> None:
    async def body() -> None:
        async with running_worker("prefill", drain_timeout_s=1.0, kv=KvTransferOptions(handoff="late")) as harness:
            await harness.call()
            assert harness.metric('baton_rooms_open{state="offered"}') == 1
            assert harness.worker.gate.in_flight == 0
            harness.stop.set()
            stopped_at = time.monotonic()
        assert 0.9 < time.monotonic() - stopped_at < 5, "it waited for drain_s, and not for longer"
        assert harness.metric('baton_rooms_ended_total{outcome="failed"}') == 1
        await eventually(lambda: harness.engine.submitted[-1].request_id in harness.engine.aborted)

    run_bounded(body())


def test_load_is_published_for_every_role() -> None:
    async def body() -> None:
        harness = WorkerHarness("decode", MemoryRuntime())
        load = LoadSnapshot(running=1, waiting=0, used_blocks=3, total_blocks=8)
        harness.engine.readings_to_give.append(load)
        running = asyncio.create_task(harness.run())
        await harness.ready.wait()
        [endpoint] = harness.runtime.endpoints["baton.decode.generate"]
        await eventually(lambda: endpoint.published == [load])
        harness.stop.set()
        await running

    run_bounded(body())


@pytest.mark.parametrize(
    ("role", "can", "named"),
    [
        ("prefill", Capabilities(), "does not support KV handoff"),
        ("decode", Capabilities(), "does not support KV handoff"),
        ("prefill", Capabilities(diffusion=True, handoff=HandoffStyle.EARLY), "diffusion language model"),
        ("decode", Capabilities(diffusion=True), "diffusion language model"),
        ("decode", Capabilities(generate=False, embeddings=True), "cannot serve the role decode"),
        ("embed", Capabilities(), "cannot serve the role embed"),
    ],
)
def test_an_engine_that_cannot_serve_the_role_is_refused(role: Any, can: Capabilities, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        role_of(Settings(role=role), can)


def moves_kv_itself(role: Role, engine: ScriptedEngine, handoff: str = "auto") -> WorkerHarness:
    """Return a worker whose engine moves KV by itself."""
    harness = WorkerHarness(role, MemoryRuntime())
    harness.engine = engine
    settings = Settings(role=role, kv=KvTransferOptions(handoff=handoff))  # type: ignore[arg-type]
    harness.worker = Worker(settings, engine, harness.runtime)
    return harness


@pytest.mark.parametrize(("style", "registered"), [(HandoffStyle.EARLY, True), (HandoffStyle.LATE, False)])
def test_an_engine_that_moves_kv_itself_has_rooms_too(style: HandoffStyle, registered: bool) -> None:
    async def body() -> None:
        info = msgspec.structs.replace(SCRIPTED_INFO, handoff_host="10.0.0.9", handoff_port=8998)
        engine = ScriptedEngine(WELL, capabilities=Capabilities(handoff=style), info=info)
        harness = moves_kv_itself("prefill", engine)
        running = asyncio.create_task(harness.run())
        await harness.ready.wait()
        assert isinstance(engine.submitted[0].handoff, LocalProbe)
        assert harness.card.handoff_port != 8998, "decode workers connect to the room, which has the engine's address"
        assert (harness.card.handoff_port is not None) is registered
        harness.stop.set()
        await running

    run_bounded(body())


@pytest.mark.parametrize(("style", "setting"), [(HandoffStyle.EARLY, "late"), (HandoffStyle.LATE, "early")])
def test_an_engine_that_moves_kv_itself_has_one_handoff_style(style: HandoffStyle, setting: str) -> None:
    async def body() -> BatonError:
        harness = moves_kv_itself("prefill", ScriptedEngine(WELL, capabilities=Capabilities(handoff=style)), setting)
        with pytest.raises(ConfigError) as refused:
            await harness.run()
        return refused.value

    assert f"drop --kv-handoff {setting}" in run_bounded(body()).message


@pytest.mark.parametrize(("role", "router"), [("prefill", "kv"), ("decode", None)])
def test_a_worker_is_registered_with_what_routers_select_it_by(role: Role, router: str | None) -> None:
    async def body() -> None:
        kv = KvTransferOptions(locality="zone=a", locality_enforcement="preferred")
        async with running_worker(role, taints="h200, rack-3", router_prefill="kv", kv=kv) as harness:
            card = harness.card
            assert (card.router, card.taints) == (router, {"h200", "rack-3"})
            assert card.locality == Locality(domain="zone", value="a", enforcement="preferred")

    run_bounded(body())
