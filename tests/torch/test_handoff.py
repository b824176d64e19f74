"""KV that goes to other workers or comes from them: what the engine says of its memory, and operators meanwhile."""

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


async def lend(here: Session, prompt: tuple[int, ...] = PROMPT) -> tuple[RequestId, list[int]]:
    """Compute a prompt for others; return its blocks."""
    request_id, stream = here.start(prompt, 1, Produce())
    blocks: list[int] = []
    while outputs := await stream.read():
        blocks += [block for output in outputs if isinstance(output, KvComputed) for block in output.blocks]
    return request_id, blocks


async def receive(here: Session, prompt: tuple[int, ...] = PROMPT) -> tuple[RequestId, Stream, KvWanted]:
    """Begin to wait for KV."""
    request_id, stream = here.start(prompt, 16, CONSUME)
    return request_id, stream, await wanted_by(stream)


async def stays_free(here: Session) -> None:
    await eventually(lambda: (load := here.load()) is not None and load.used_blocks == 0)


# What it says of its memory


def test_the_cache_is_described_and_only_a_lender_shares_it(model: Path) -> None:
    async def body() -> None:
        async with (
            session(model, exports_kv=True, block_size=8, blocks=40) as producer,
            session(model, block_size=8) as consumer,
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
            _, blocks = await lend(producer)
            assert kv.descriptor is not None
            with mmap.mmap(kv.descriptor, kv.nbytes, prot=mmap.PROT_READ) as mapped:
                for plane in range(kv.planes):
                    start = plane * kv.plane_bytes + blocks[1] * kv.block_bytes
                    assert mapped[start : start + kv.block_bytes] == read_block(kv, blocks[1])[plane]
                    assert any(mapped[start : start + kv.block_bytes])

    run_bounded(body())


def test_a_stopped_engine_has_closed_the_file_of_its_cache(model: Path) -> None:
    def shared() -> int:
        links = [link for name in os.listdir("/proc/self/fd") if os.path.lexists(link := f"/proc/self/fd/{name}")]
        return sum("baton-kv" in os.readlink(link) for link in links)

    async def body() -> None:
        async with session(model, exports_kv=True) as here:
            assert shared() > 0
            del here
        await eventually(lambda: gc.collect() >= 0 and shared() == 0)

    run_bounded(body())


def test_the_same_model_has_one_name_everywhere_and_another_has_another(model: Path, tmp_path: Path) -> None:
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


def test_the_cache_lies_where_it_did_after_it_was_released(model: Path) -> None:
    async def body() -> None:
        async with session(model, exports_kv=True) as producer, session(model) as consumer:
            for here in (producer, consumer):
                before = await here.say()
                await here.order(ReleaseMemory(tags=("kv_cache",)))
                await here.order(ResumeMemory(tags=("kv_cache",)))
                assert await here.say() == before
                await here.order(ClearCache())
            request_id, blocks = await lend(producer)
            consumer, stream, wanted = await receive(consumer)
            assert producer.info.kv is not None
            assert consumer.info.kv is not None
            for theirs, mine in zip(blocks, wanted.blocks, strict=True):
                write_block(consumer.info.kv, mine, read_block(producer.info.kv, theirs))
            consumer.engine.received(consumer)
            assert (await read(stream))[0] == before
            await producer.engine.abort(request_id)
            await stays_free(producer)

    run_bounded(body())


def test_a_lender_gives_its_memory_back(model: Path) -> None:
    async def body() -> None:
        async with session(model, exports_kv=True) as here:
            kv = here.info.kv
            assert kv is not None
            assert kv.descriptor is not None
            await here.say(tuple(i % 250 for i in range(900)), 1)
            assert os.fstat(kv.descriptor).st_blocks > 0
            await here.order(ReleaseMemory(tags=("kv_cache",)))
            assert os.fstat(kv.descriptor).st_blocks == 0

    run_bounded(body())


# What an operator may do meanwhile


@pytest.mark.parametrize("side", ["lent", "receiving"])
@pytest.mark.parametrize("command", ["kv_cache", "both", "update"])
def test_what_would_destroy_kv_of_others_is_refused_and_changes_nothing(model: Path, side: str, command: str) -> None:
    verbs: dict[str, Command] = {
        "kv_cache": ReleaseMemory(tags=("kv_cache",)),
        "both": ReleaseMemory(tags=("kv_cache", "weights")),
        "update": UpdateWeights(source=FromDisk(path=str(model)), version="2"),
    }

    async def body() -> None:
        async with session(model, exports_kv=True) as here:
            before = await here.say()
            await here.order(ClearCache())
            request_ids = [
                (await lend(here, prompt))[0] if side == "lent" else (await receive(here, prompt))[0]
                for prompt in (PROMPT, PROMPT[1:])
            ]
            with pytest.raises(InvalidRequest, match="2 requests are being handed over"):
                await here.order(verbs[command])
            assert await here.say() == before
            for request_id in request_ids:
                await here.engine.abort(request_id)
            await here.order(verbs[command])
            await here.order(ResumeMemory(tags=("kv_cache", "weights")))
            assert await here.say() == before
            await stays_free(here)

    run_bounded(body())


def test_a_prompt_that_is_half_told_is_being_handed_over_too(model: Path) -> None:
    async def body() -> None:
        async with session(model, exports_kv=True, batch_tokens=16, max_running=1) as here:
            request_id, stream = here.start(tuple(i % 250 for i in range(900)), 1, Produce())
            (first,) = await stream.read()
            assert isinstance(first, KvComputed)
            assert not first.complete
            outcome = await here.order(Pause(mode="retract"))
            assert outcome.requests == 0
            with pytest.raises(InvalidRequest, match="1 requests"):
                await here.order(ReleaseMemory(tags=("kv_cache",)))
            await here.order(Continue())
            told = list(first.blocks)
            while outputs := await stream.read():
                told += [block for output in outputs if isinstance(output, KvComputed) for block in output.blocks]
            assert len(told) == len(set(told)) == -(-900 // 16)
            await here.engine.abort(request_id)
            await stays_free(here)

    run_bounded(body())


def test_what_receives_and_what_is_lent_outlives_a_cleared_cache_and_a_pause(model: Path) -> None:
    async def body() -> None:
        async with session(model, exports_kv=True) as producer, session(model) as consumer:
            kv, own = producer.info.kv, consumer.info.kv
            assert kv is not None
            assert own is not None
            alone = await producer.say()
            request_id, blocks = await lend(producer)
            consumer, stream, wanted = await receive(consumer)
            content = [read_block(kv, block) for block in blocks]
            for here in (producer, consumer):
                await here.order(ClearCache())
                await here.order(Pause(mode="retract"))
                await here.order(ReleaseMemory(tags=("weights",)))
            for part, mine in zip(content, wanted.blocks, strict=True):
                write_block(own, mine, part)
            consumer.engine.received(consumer)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stream.read(), 0.2)
            for here in (producer, consumer):
                await here.order(ResumeMemory(tags=("weights",)))
                await here.order(Continue())
            assert (await read(stream))[0] == alone
            assert await consumer.cached() == 0, "what came before the cache was cleared is not found after it"
            await producer.say(tuple(range(200, 250)) * 4)
            assert [read_block(kv, block) for block in blocks] == content
            await producer.engine.abort(request_id)
            await stays_free(producer)
            await stays_free(consumer)

    run_bounded(body())


def test_a_pause_that_aborts_ends_who_receives_but_leaves_the_blocks_to_the_fetcher(model: Path) -> None:
    async def body() -> None:
        async with session(model) as here:
            kv = here.info.kv
            assert kv is not None
            request_id, stream, wanted = await receive(here)
            for block in wanted.blocks:
                write_block(kv, block, [b"\x07" * kv.block_bytes] * kv.planes)
            outcome = await here.order(Pause(mode="abort"))
            assert outcome.requests == 1
            with pytest.raises(Paused):
                await stream.read()
            with pytest.raises(InvalidRequest, match="1 requests are being handed over"):
                await here.order(ReleaseMemory(tags=("kv_cache",)))
            await here.order(Continue())
            await here.say(tuple(i % 250 for i in range(900)))
            assert all(read_block(kv, block) == (b"\x07" * kv.block_bytes,) * kv.planes for block in wanted.blocks)
            here.engine.received(request_id)
            await here.engine.abort(request_id)
            await stays_free(here)
            await here.order(ReleaseMemory(tags=("kv_cache",)))

    run_bounded(body())


def test_a_pause_that_aborts_leaves_what_is_lent(model: Path) -> None:
    async def body() -> None:
        async with session(model, exports_kv=True) as here:
            kv = here.info.kv
            assert kv is not None
            request_id, blocks = await lend(here)
            content = [read_block(kv, block) for block in blocks]
            assert (await here.order(Pause(mode="abort"))).requests == 0
            await here.order(Continue())
            await here.say(tuple(i % 250 for i in range(900)))
            assert [read_block(kv, block) for block in blocks] == content
            await here.engine.abort(request_id)
            await stays_free(here)

    run_bounded(body())


# With others, and alone


def test_who_has_received_is_preempted_and_computed_again_like_any_other(model: Path) -> None:
    async def body() -> None:
        async with session(model, exports_kv=True) as producer, session(model, prefix_cache=False) as consumer:
            assert producer.info.kv is not None
            assert consumer.info.kv is not None
            alone = await producer.say(tokens=LONG)
            _, blocks = await lend(producer)
            request_id, stream = consumer.start(PROMPT, LONG, CONSUME)
            wanted = await wanted_by(stream)
            for theirs, mine in zip(blocks, wanted.blocks, strict=True):
                write_block(consumer.info.kv, mine, read_block(producer.info.kv, theirs))
            consumer.engine.received(request_id)
            start, _ = await read(stream, at_least=3)
            await consumer.order(Pause(mode="retract"))
            await consumer.order(Continue())
            assert start + (await read(stream))[0] == alone

    run_bounded(body())


def test_an_engine_that_waits_for_others_is_quiet_and_not_stalled(model: Path) -> None:
    async def body() -> None:
        async with session(model, exports_kv=True, blocks=8, context=128) as here:
            lent = [(await lend(here, tuple(range(first, first + 48))))[0] for first in (1, 51)]
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
            await here.engine.abort(lent[0])
            assert len((await read(waiting))[0]) == 4
            assert (here.engine.progress().running, here.engine.progress().waiting) == (0, 1)

    run_bounded(body())


def test_a_guided_consumer_wants_its_kv_when_its_grammar_is_there(model: Path) -> None:
    async def body() -> None:
        async with session(model, exports_kv=True) as producer, session(model) as consumer:
            assert producer.info.kv is not None
            assert consumer.info.kv is not None
            guided = {"guided_decoding": GuidedDecoding(regex="[a-c]{5}"), "temperature": 0.0}
            alone, _ = await read(producer.start(PROMPT, 16, None, **guided)[1])
            _, blocks = await lend(producer)
            request_id, stream = consumer.start(PROMPT, 16, CONSUME, **guided)
            wanted = await wanted_by(stream)
            for theirs, mine in zip(blocks, wanted.blocks, strict=True):
                write_block(consumer.info.kv, mine, read_block(producer.info.kv, theirs))
            consumer.engine.received(request_id)
            assert (await read(stream))[0] == alone

    run_bounded(body())
