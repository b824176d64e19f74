"""Operators' commands to the built-in engine with requests in flight: memory, pauses, the prefix cache, profiles."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from baton.errors import Cancelled, EngineDead, EngineFailed, InvalidRequest, Paused
from baton.protocol.commands import (
    ClearCache,
    Command,
    Continue,
    Pause,
    ReleaseMemory,
    ResumeMemory,
    StartProfile,
    StopProfile,
)
from baton.testing import eventually, run_bounded
from tests.doubles.tiny_models import make_tiny_model
from tests.torch.torch_sessions import LONG, PROMPT, Session, read, session, trace_names

BOTH = ("kv_cache", "weights")
HALTING: list[tuple[Command, Command]] = [
    (Pause(mode="keep"), Continue()),
    (Pause(mode="retract"), Continue()),
    (ReleaseMemory(tags=("kv_cache",)), ResumeMemory(tags=("kv_cache",))),
    (ReleaseMemory(tags=("weights",)), ResumeMemory(tags=("weights",))),
    (ReleaseMemory(tags=BOTH), ResumeMemory(tags=BOTH)),
]
NAMES = ["keep", "retract", "kv_cache", "weights", "both"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def resident_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


async def stays_halted(here: Session) -> None:
    """No token is generated for a while."""
    _, stream = here.start((5, 6, 7), 4)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stream.read(), 0.3)


@pytest.mark.slow
def test_released_memory_leaves_the_process_and_answers_stay_the_same(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    big = make_tiny_model(
        tmp_path_factory.mktemp("big"), hidden_size=1024, intermediate_size=2816, num_attention_heads=16,
        num_key_value_heads=16, head_dim=64, num_hidden_layers=4,
    )  # fmt: skip
    cache = 4 * 2 * 16 * 1024 * 4 * 512  # layers, keys and values, tokens a block, width, float32, blocks

    async def body() -> None:
        async with session(big, device="cpu", blocks=512, context=4096, batch_tokens=4096) as here:
            weights = 200e6
            before = await here.generate()
            await here.generate(tuple(i % 250 for i in range(4000)), 1)  # half of the cache has been written to
            full = resident_bytes()
            await here.execute(ReleaseMemory(tags=BOTH))
            assert full - resident_bytes() > 0.8 * (weights + cache / 2)
            await here.execute(ResumeMemory(tags=("weights",)))
            assert resident_bytes() < full - 0.8 * cache / 2
            await here.execute(ResumeMemory(tags=("kv_cache",)))
            assert await here.generate() == before
            assert await here.cached() == 32

    run_bounded(body(), 100)


@pytest.mark.parametrize(
    ("native", "halting"), [(True, q) for q in HALTING] + [(False, HALTING[4])], ids=[*NAMES, "torch"]
)
def test_requests_continue_unchanged_after_a_pause_or_release(
    model: Path, native: bool, halting: tuple[Command, Command]
) -> None:
    async def body() -> None:
        async with session(model, native=native) as here:
            sampled = {"temperature": 1.0, "seed": 7}
            plain = [await read(here.start(PROMPT, LONG)[1]), await read(here.start(PROMPT, LONG, **sampled)[1])]
            streams = [here.start(PROMPT, LONG)[1], here.start(PROMPT, LONG, **sampled)[1]]
            starts = [await read(stream, at_least=3) for stream in streams]
            await here.execute(halting[0])
            await stays_halted(here)
            await here.execute(halting[1])
            ends = [await read(stream) for stream in streams]
            for (start, _), (end, finished), (whole, _) in zip(starts, ends, plain, strict=True):
                assert len(start) < LONG
                assert start + end == whole
                assert finished is not None

    run_bounded(body(), 60)


def test_memory_is_resumed_in_stages_and_requests_wait_for_the_last_one(model: Path) -> None:
    async def body() -> None:
        async with session(model) as here:
            before = await here.generate()
            await here.execute(ReleaseMemory(tags=("weights",)))
            await here.execute(ReleaseMemory(tags=("kv_cache",)))
            _, waiting = here.start()
            await here.execute(ResumeMemory(tags=("weights",)))
            await stays_halted(here)
            await here.execute(ResumeMemory(tags=("kv_cache",)))
            assert (await read(waiting))[0] == before

    run_bounded(body())


def test_after_resume_a_pause_still_holds(model: Path) -> None:
    async def body() -> None:
        async with session(model) as here:
            before = await here.generate()
            await here.execute(Pause())
            await here.execute(ReleaseMemory(tags=BOTH))
            await here.execute(ResumeMemory(tags=BOTH))
            await stays_halted(here)
            await here.execute(Continue())
            assert await here.generate() == before

    run_bounded(body())


def test_after_continue_requests_still_wait_for_released_memory(model: Path) -> None:
    async def body() -> None:
        async with session(model) as here:
            await here.execute(Pause())
            await here.execute(ReleaseMemory(tags=BOTH))
            await here.execute(Continue())
            await stays_halted(here)
            await here.execute(ResumeMemory(tags=BOTH))
            assert len(await here.generate()) == 16

    run_bounded(body())


def test_a_command_executed_twice_has_the_effect_of_one(model: Path) -> None:
    async def body() -> None:
        async with session(model) as here:
            before = await here.generate()
            assert "nothing to do" in (await here.execute(ResumeMemory(tags=BOTH))).message
            await here.execute(Continue())
            for _ in range(2):
                outcome = await here.execute(ReleaseMemory(tags=BOTH))
            assert "nothing to do" in outcome.message
            for _ in range(2):
                outcome = await here.execute(ResumeMemory(tags=BOTH))
            assert "nothing to do" in outcome.message
            for _ in range(2):
                await here.execute(Pause())
            await stays_halted(here)
            for _ in range(2):
                await here.execute(Continue())
            assert await here.generate() == before

    run_bounded(body())


def test_releasing_the_kv_cache_empties_the_prefix_cache(model: Path) -> None:
    async def body() -> None:
        async with session(model) as here:
            await here.generate()
            assert await here.cached() == 32
            await here.execute(ReleaseMemory(tags=("kv_cache",)))
            await eventually(lambda: here.clears() == 1)
            await here.execute(ResumeMemory(tags=("kv_cache",)))
            assert await here.cached() == 0

    run_bounded(body())


def test_clearing_the_prefix_cache_leaves_running_requests_alone(model: Path) -> None:
    async def body() -> None:
        async with session(model) as here:
            whole = (await read(here.start(PROMPT, LONG)[1]))[0]
            _, stream = here.start(PROMPT, LONG)
            start, _ = await read(stream, at_least=3)
            await here.execute(ClearCache())
            await eventually(lambda: here.clears() == 1)
            assert start + (await read(stream))[0] == whole
            assert await here.cached() == 0

    run_bounded(body())


def test_a_pause_with_abort_ends_every_request_with_a_retryable_error(model: Path) -> None:
    async def body() -> None:
        async with session(model, max_running=1) as here:
            streams = [here.start(PROMPT, LONG)[1] for _ in range(3)]
            await read(streams[0], at_least=1)
            outcome = await here.execute(Pause(mode="abort"))
            assert outcome.requests == 3
            for stream in streams:
                with pytest.raises(Paused):
                    await read(stream)
            await here.execute(Continue())
            assert len(await here.generate()) == 16

    run_bounded(body())


def test_a_second_pause_can_abort_what_the_first_kept(model: Path) -> None:
    async def body() -> None:
        async with session(model) as here:
            _, stream = here.start(PROMPT, LONG)
            await read(stream, at_least=1)
            await here.execute(Pause(mode="keep"))
            await here.execute(Pause(mode="abort"))
            with pytest.raises(Paused):
                await read(stream)

    run_bounded(body())


@pytest.mark.parametrize("halting", [pair[0] for pair in HALTING], ids=NAMES)
def test_abort_while_halted_frees_everything_at_once(model: Path, halting: Command) -> None:
    async def body() -> None:
        async with session(model) as here:
            request_id, stream = here.start(PROMPT, LONG)
            await read(stream, at_least=1)
            await here.execute(halting)
            waiting_id, waiting = here.start((9, 9), 4)
            async with asyncio.timeout(1):
                for one in (request_id, waiting_id):
                    await here.engine.abort(one)
            for one in (stream, waiting):
                with pytest.raises(Cancelled):
                    await read(one)
            progress = here.engine.progress()
            assert (progress.running, progress.waiting) == (0, 0)
            await eventually(lambda: getattr(here.readings[-1], "used_blocks", None) == 0)

    run_bounded(body())


@pytest.mark.parametrize("halting", [pair[0] for pair in HALTING], ids=NAMES)
def test_stop_while_halted_ends_streams(model: Path, halting: Command) -> None:
    async def body() -> None:
        async with session(model) as here:
            _, stream = here.start(PROMPT, LONG)
            await here.execute(halting)
            async with asyncio.timeout(3):
                await here.engine.stop()
            with pytest.raises(EngineDead):
                await read(stream)
            with pytest.raises(EngineDead):
                await here.execute(Continue())

    run_bounded(body())


def test_weights_that_cannot_be_kept_are_not_released(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()

    async def body() -> None:
        async with session(model, spill_dir=file / "spill") as here:
            before = await here.generate()
            with pytest.raises(EngineFailed, match="kept on disk"):
                await here.execute(ReleaseMemory(tags=BOTH))
            assert await here.generate() == before

    run_bounded(body())


def test_a_profile_is_a_chrome_trace(model: Path, tmp_path: Path) -> None:
    async def body() -> None:
        async with session(model) as here:
            started = await here.execute(StartProfile(directory=str(tmp_path / "new")))
            with pytest.raises(InvalidRequest, match="already"):
                await here.execute(StartProfile(directory=str(tmp_path)))
            await here.generate()
            written = await here.execute(StopProfile())
            assert written.path == started.path
            names = trace_names(Path(str(written.path)))
            assert any(name.startswith("ProfilerStep") for name in names)
            assert "aten::argmax" in names
            assert (await here.execute(StopProfile())).path == written.path

    run_bounded(body(), 60)


def test_a_profile_ends_by_itself_after_its_steps(model: Path, tmp_path: Path) -> None:
    async def body() -> None:
        async with session(model) as here:
            with pytest.raises(InvalidRequest, match="no profile"):
                await here.execute(StopProfile())
            path = Path((await here.execute(StartProfile(directory=str(tmp_path), steps=3))).path or "")
            assert len(await here.generate(tokens=20)) == 20
            assert trace_names(path)
            again = Path((await here.execute(StartProfile(directory=str(tmp_path), steps=1))).path or "")
            await here.generate()
            assert again != path
            assert trace_names(again)

    run_bounded(body(), 60)


def test_stop_discards_a_running_profile(model: Path, tmp_path: Path) -> None:
    async def body() -> None:
        async with session(model) as here:
            await here.execute(StartProfile(directory=str(tmp_path)))
        assert not os.listdir(tmp_path)
        async with session(model) as here:
            await here.execute(StartProfile(directory=str(tmp_path)))
            await here.execute(StopProfile())
        assert os.listdir(tmp_path)

    run_bounded(body(), 60)


def test_a_profile_directory_that_cannot_be_written_is_refused_at_start(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()

    async def body() -> None:
        async with session(model) as here:
            with pytest.raises(InvalidRequest, match="directory"):
                await here.execute(StartProfile(directory=str(file)))

    run_bounded(body())


def test_requests_survive_the_loss_of_the_profile_directory(model: Path, tmp_path: Path) -> None:
    async def body() -> None:
        async with session(model) as here:
            path = Path((await here.execute(StartProfile(directory=str(tmp_path / "gone"), steps=2))).path or "")
            shutil.rmtree(path.parent)
            assert len(await here.generate()) == 16
            assert len(await here.generate()) == 16

    run_bounded(body(), 60)
