"""KV handoffs of the built-in engine: how it describes its KV cache, and commands during a handoff."""

import asyncio
import gc
import mmap
import os
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from baton.errors import InvalidRequest, Paused
from baton.health.watchdog import StallClock
from baton.ports.engine import HandoffStyle, Stream
from baton.protocol.commands import (
    ClearCache,
    Command,
    Continue,
    FromDisk,
    Pause,
    ReleaseMemory,
    ResumeMemory,
    UpdateWeights,
)
from baton.protocol.handoff import Produce
from baton.protocol.ids import RequestId
from baton.protocol.outputs import KvComputed, KvWanted
from baton.protocol.requests import GuidedDecoding
from baton.testing import eventually, run_bounded
from baton.testing.handoff_session import CONSUME, read_block, wanted_by, write_block
from tests.doubles.tiny_models import make_tiny_model
from tests.torch.torch_sessions import LONG, PROMPT, Session, read, session


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


async def produce(here: Session, prompt: tuple[int, ...] = PROMPT) -> tuple[RequestId, list[int]]:
    """Produce the KV of a prompt; return its blocks."""
    request_id, stream = here.start(prompt, 1, Produce())
    blocks: list[int] = []
    while outputs := await stream.read():
        blocks += [block for output in outputs if isinstance(output, KvComputed) for block in output.blocks]
    return request_id, blocks


async def receive(here: Session, prompt: tuple[int, ...] = PROMPT) -> tuple[RequestId, Stream, KvWanted]:
    """Submit a request that waits for KV."""
    request_id, stream = here.start(prompt, 16, CONSUME)
    return request_id, stream, await wanted_by(stream)


async def frees_every_block(here: Session) -> None:
    await eventually(lambda: (load := here.load()) is not None and load.used_blocks == 0)


# The KV cache as peers see it


def test_the_kv_cache_is_described_and_shared_only_when_exported(model: Path) -> None:
    async def body() -> None:
        async with (
            session(model, exports_kv=True, block_size=8, blocks=40, device="cpu") as producer,
            session(model, block_size=8, device="cpu") as consumer,
        ):
            assert producer.engine.capabilities.handoff is HandoffStyle.EARLY
            kv, other = producer.info.kv, consumer.info.kv
            assert kv is not None
            assert other is not None
            assert other.shape == kv.shape
            assert other.descriptor is None
            assert (kv.device, kv.planes, kv.blocks) == ("cpu", 6, 40)
            assert kv.block_bytes == 8 * 2 * 16 * 4
            assert kv.plane_bytes == 40 * kv.block_bytes
            _, blocks = await produce(producer)
            assert kv.descriptor is not None
            with mmap.mmap(kv.descriptor, kv.nbytes, prot=mmap.PROT_READ) as mapped:
                for plane in range(kv.planes):
                    start = plane * kv.plane_bytes + blocks[1] * kv.block_bytes
                    assert mapped[start : start + kv.block_bytes] == read_block(kv, blocks[1])[plane]
                    assert any(mapped[start : start + kv.block_bytes])

    run_bounded(body(), 60)  # the step for a CPU is compiled first, if it is not yet


def test_stop_closes_the_file_of_the_kv_cache(model: Path) -> None:
    def shared() -> int:
        links = [link for name in os.listdir("/proc/self/fd") if os.path.lexists(link := f"/proc/self/fd/{name}")]
        return sum("baton-kv" in os.readlink(link) for link in links)

    async def body() -> None:
        async with session(model, exports_kv=True, device="cpu") as here:
            assert shared() > 0
            del here
        await eventually(lambda: gc.collect() >= 0 and shared() == 0)

    run_bounded(body())


def test_equal_models_have_equal_identities_and_different_ones_differ(model: Path, tmp_path: Path) -> None:
    async def name(directory: Path, **options: object) -> str:
        async with session(directory, **options) as here:
            assert here.info.kv is not None
            return here.info.kv.shape.model

    async def body() -> None:
        copy = make_tiny_model(tmp_path / "copy")
        retrained = make_tiny_model(tmp_path / "retrained", seed=1)
        turned = make_tiny_model(tmp_path / "turned", rope_theta=5000.0)
        ours = await name(model, native=False)
        assert ours.startswith("llama-")
        assert await name(copy, block_size=32, context=512, exports_kv=True) == ours
        assert len({ours, await name(retrained), await name(turned)}) == 3

    run_bounded(body(), 60)


def test_a_released_and_resumed_kv_cache_has_the_same_address(model: Path) -> None:
    async def body() -> None:
        async with session(model, exports_kv=True) as producer, session(model) as consumer:
            for here in (producer, consumer):
                before = await here.generate()
                await here.execute(ReleaseMemory(tags=("kv_cache",)))
                await here.execute(ResumeMemory(tags=("kv_cache",)))
                assert await here.generate() == before
                await here.execute(ClearCache())
            request_id, blocks = await produce(producer)
            request, stream, wanted = await receive(consumer)
            assert producer.info.kv is not None
            assert consumer.info.kv is not None
            for theirs, mine in zip(blocks, wanted.blocks, strict=True):
                write_block(consumer.info.kv, mine, read_block(producer.info.kv, theirs))
            consumer.engine.received(request)
            assert (await read(stream))[0] == before
            await producer.engine.abort(request_id)
            await frees_every_block(producer)

    run_bounded(body())


def test_releasing_an_exported_kv_cache_frees_its_memory(model: Path) -> None:
    async def body() -> None:
        async with session(model, exports_kv=True, device="cpu") as here:
            kv = here.info.kv
            assert kv is not None
            assert kv.descriptor is not None
            await here.generate(tuple(i % 250 for i in range(900)), 1)
            assert os.fstat(kv.descriptor).st_blocks > 0
            await here.execute(ReleaseMemory(tags=("kv_cache",)))
            assert os.fstat(kv.descriptor).st_blocks == 0

    run_bounded(body())


# Commands during a handoff


@pytest.mark.parametrize("side", ["offered", "receiving"])
@pytest.mark.parametrize("command", ["kv_cache", "both", "update"])
def test_a_command_that_would_change_kv_in_a_handoff_is_refused(model: Path, side: str, command: str) -> None:
    commands: dict[str, Command] = {
        "kv_cache": ReleaseMemory(tags=("kv_cache",)),
        "both": ReleaseMemory(tags=("kv_cache", "weights")),
        "update": UpdateWeights(source=FromDisk(path=str(model)), version="2"),
    }

    async def body() -> None:
        async with session(model, exports_kv=True) as here:
            before = await here.generate()
            await here.execute(ClearCache())
            request_ids = [
                (await produce(here, prompt))[0] if side == "offered" else (await receive(here, prompt))[0]
                for prompt in (PROMPT, PROMPT[1:])
            ]
            with pytest.raises(InvalidRequest, match="the KV of 2 requests is in a handoff"):
                await here.execute(commands[command])
            assert await here.generate() == before
            for request_id in request_ids:
                await here.engine.abort(request_id)
            await here.execute(commands[command])
            await here.execute(ResumeMemory(tags=("kv_cache", "weights")))
            assert await here.generate() == before
            await frees_every_block(here)

    run_bounded(body())


def test_a_prompt_with_some_offered_blocks_is_in_a_handoff(model: Path) -> None:
    async def body() -> None:
        async with session(model, exports_kv=True, batch_tokens=16, max_running=1) as here:
            request_id, stream = here.start(tuple(i % 250 for i in range(900)), 1, Produce())
            (first,) = await stream.read()
            assert isinstance(first, KvComputed)
            assert not first.complete
            outcome = await here.execute(Pause(mode="retract"))
            assert outcome.requests == 0
            with pytest.raises(InvalidRequest, match="the KV of 1 requests"):
                await here.execute(ReleaseMemory(tags=("kv_cache",)))
            await here.execute(Continue())
            blocks = list(first.blocks)
            while outputs := await stream.read():
                blocks += [block for output in outputs if isinstance(output, KvComputed) for block in output.blocks]
            assert len(blocks) == len(set(blocks)) == -(-900 // 16)
            await here.engine.abort(request_id)
            await frees_every_block(here)

    run_bounded(body())


def test_handoffs_survive_a_cleared_cache_a_pause_and_released_weights(model: Path) -> None:
    async def body() -> None:
        async with session(model, exports_kv=True) as producer, session(model) as consumer:
            kv, own = producer.info.kv, consumer.info.kv
            assert kv is not None
            assert own is not None
            alone = await producer.generate()
            request_id, blocks = await produce(producer)
            request, stream, wanted = await receive(consumer)
            content = [read_block(kv, block) for block in blocks]
            for here in (producer, consumer):
                await here.execute(ClearCache())
                await here.execute(Pause(mode="retract"))
                await here.execute(ReleaseMemory(tags=("weights",)))
            for part, mine in zip(content, wanted.blocks, strict=True):
                write_block(own, mine, part)
            consumer.engine.received(request)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stream.read(), 0.2)
            for here in (producer, consumer):
                await here.execute(ResumeMemory(tags=("weights",)))
                await here.execute(Continue())
            assert (await read(stream))[0] == alone
            assert await consumer.cached() == 0, "KV received before the cache was cleared is not cached"
            await producer.generate(tuple(range(200, 250)) * 4)
            assert [read_block(kv, block) for block in blocks] == content
            await producer.engine.abort(request_id)
            await frees_every_block(producer)
            await frees_every_block(consumer)

    run_bounded(body())


def test_a_pause_with_abort_ends_a_receiving_request_but_keeps_its_blocks_for_the_transfer(model: Path) -> None:
    async def body() -> None:
        async with session(model) as here:
            kv = here.info.kv
            assert kv is not None
            request_id, stream, wanted = await receive(here)
            for block in wanted.blocks:
                write_block(kv, block, [b"\x07" * kv.block_bytes] * kv.planes)
            outcome = await here.execute(Pause(mode="abort"))
            assert outcome.requests == 1
            with pytest.raises(Paused):
                await stream.read()
            with pytest.raises(InvalidRequest, match="the KV of 1 requests is in a handoff"):
                await here.execute(ReleaseMemory(tags=("kv_cache",)))
            await here.execute(Continue())
            await here.generate(tuple(i % 250 for i in range(900)))
            assert all(read_block(kv, block) == (b"\x07" * kv.block_bytes,) * kv.planes for block in wanted.blocks)
            here.engine.received(request_id)
            await here.engine.abort(request_id)
            await frees_every_block(here)
            await here.execute(ReleaseMemory(tags=("kv_cache",)))

    run_bounded(body())


def test_a_pause_with_abort_keeps_offered_blocks(model: Path) -> None:
    async def body() -> None:
        async with session(model, exports_kv=True) as here:
            kv = here.info.kv
            assert kv is not None
            request_id, blocks = await produce(here)
            content = [read_block(kv, block) for block in blocks]
            assert (await here.execute(Pause(mode="abort"))).requests == 0
            await here.execute(Continue())
            await here.generate(tuple(i % 250 for i in range(900)))
            assert [read_block(kv, block) for block in blocks] == content
            await here.engine.abort(request_id)
            await frees_every_block(here)

    run_bounded(body())


# Beside other requests


def test_a_request_with_received_kv_can_be_preempted_and_computed_again(model: Path) -> None:
    async def body() -> None:
        async with session(model, exports_kv=True) as producer, session(model, prefix_cache=False) as consumer:
            assert producer.info.kv is not None
            assert consumer.info.kv is not None
            alone = await producer.generate(tokens=LONG)
            _, blocks = await produce(producer)
            request_id, stream = consumer.start(PROMPT, LONG, CONSUME)
            wanted = await wanted_by(stream)
            for theirs, mine in zip(blocks, wanted.blocks, strict=True):
                write_block(consumer.info.kv, mine, read_block(producer.info.kv, theirs))
            consumer.engine.received(request_id)
            start, _ = await read(stream, at_least=3)
            await consumer.execute(Pause(mode="retract"))
            await consumer.execute(Continue())
            assert start + (await read(stream))[0] == alone

    run_bounded(body())


def test_an_engine_that_waits_for_peers_is_idle_and_not_stalled(model: Path) -> None:
    async def body() -> None:
        async with session(model, exports_kv=True, blocks=8, context=128) as here:
            offered = [(await produce(here, tuple(range(first, first + 48))))[0] for first in (1, 51)]
            _, _, wanted = await receive(here, (5, 6, 7))
            _, waiting = here.start(tuple(range(101, 140)), 4)
            await asyncio.sleep(0.1)
            before = here.engine.progress()
            assert (before.running, before.waiting, len(wanted.blocks)) == (0, 2, 1)
            clock = StallClock(2.0)
            for moment in range(10):
                await asyncio.sleep(0.25)
                assert clock.stalled_for(here.engine.progress(), moment * 0.25) is None
            assert here.engine.progress().steps - before.steps <= 5
            await here.engine.abort(offered[0])
            assert len((await read(waiting))[0]) == 4
            assert (here.engine.progress().running, here.engine.progress().waiting) == (0, 1)

    run_bounded(body())


def test_a_guided_consumer_wants_its_kv_after_its_grammar_is_compiled(model: Path) -> None:
    async def body() -> None:
        async with session(model, exports_kv=True) as producer, session(model) as consumer:
            assert producer.info.kv is not None
            assert consumer.info.kv is not None
            guided = {"guided_decoding": GuidedDecoding(regex="[a-c]{5}"), "temperature": 0.0}
            alone, _ = await read(producer.start(PROMPT, 16, None, **guided)[1])
            _, blocks = await produce(producer)
            request_id, stream = consumer.start(PROMPT, 16, CONSUME, **guided)
            wanted = await wanted_by(stream)
            for theirs, mine in zip(blocks, wanted.blocks, strict=True):
                write_block(consumer.info.kv, mine, read_block(producer.info.kv, theirs))
            consumer.engine.received(request_id)
            assert (await read(stream))[0] == alone

    run_bounded(body())
