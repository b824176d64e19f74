"""What an operator asks of the built-in engine: memory, pauses, the cache, profiles, with requests in flight."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from baton.errors import Cancelled, EngineDead, EngineFailed, InvalidRequest, Paused, Unsupported
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
QUIET: list[tuple[Command, Command]] = [
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


async def is_still(here: Session) -> None:
    """The engine makes no token for a while."""
    _, stream = here.start((5, 6, 7), 4)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stream.read(), 0.3)


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
            before = await here.say()
            await here.say(tuple(i % 250 for i in range(4000)), 1)  # half of the cache has been written to
            full = resident_bytes()
            outcome = await here.order(ReleaseMemory(tags=BOTH))
            assert outcome.released == BOTH
            assert full - resident_bytes() > 0.8 * (weights + cache / 2)
            await here.order(ResumeMemory(tags=("weights",)))
            assert resident_bytes() < full - 0.8 * cache / 2
            await here.order(ResumeMemory(tags=("kv_cache",)))
            assert await here.say() == before
            assert await here.cached() == 32

    run_bounded(body(), 100)


@pytest.mark.parametrize(("native", "quiet"), [(True, q) for q in QUIET] + [(False, QUIET[4])], ids=[*NAMES, "torch"])
def test_requests_go_on_as_if_nothing_had_happened(model: Path, native: bool, quiet: tuple[Command, Command]) -> None:
    async def body() -> None:
        async with session(model, native=native) as here:
            sampled = {"temperature": 1.0, "seed": 7}
            plain = [await read(here.start(PROMPT, LONG)[1]), await read(here.start(PROMPT, LONG, **sampled)[1])]
            streams = [here.start(PROMPT, LONG)[1], here.start(PROMPT, LONG, **sampled)[1]]
            starts = [await read(stream, at_least=3) for stream in streams]
            await here.order(quiet[0])
            await is_still(here)
            await here.order(quiet[1])
            ends = [await read(stream) for stream in streams]
            for (start, _), (end, finished), (whole, _) in zip(starts, ends, plain, strict=True):
                assert len(start) < LONG
                assert start + end == whole
                assert finished is not None

    run_bounded(body(), 60)


def test_memory_is_resumed_in_stages_and_requests_wait_for_the_last(model: Path) -> None:
    async def body() -> None:
        async with session(model) as here:
            before = await here.say()
            assert (await here.order(ReleaseMemory(tags=("weights",)))).released == ("weights",)
            assert (await here.order(ReleaseMemory(tags=("kv_cache",)))).released == BOTH
            _, waiting = here.start()
            assert (await here.order(ResumeMemory(tags=("weights",)))).released == ("kv_cache",)
            await is_still(here)
            assert (await here.order(ResumeMemory(tags=("kv_cache",)))).released == ()
            assert (await read(waiting))[0] == before

    run_bounded(body())


def test_memory_that_is_resumed_still_waits_for_the_end_of_a_pause(model: Path) -> None:
    async def body() -> None:
        async with session(model) as here:
            before = await here.say()
            await here.order(Pause())
            await here.order(ReleaseMemory(tags=BOTH))
            outcome = await here.order(ResumeMemory(tags=BOTH))
            assert (outcome.released, outcome.paused) == ((), True)
            await is_still(here)
            await here.order(Continue())
            assert await here.say() == before

    run_bounded(body())


def test_a_pause_that_ends_still_waits_for_released_memory(model: Path) -> None:
    async def body() -> None:
        async with session(model) as here:
            await here.order(Pause())
            await here.order(ReleaseMemory(tags=BOTH))
            outcome = await here.order(Continue())
            assert outcome.released == BOTH
            assert "wait for kv_cache and weights" in outcome.message
            await is_still(here)
            await here.order(ResumeMemory(tags=BOTH))
            assert len(await here.say()) == 16

    run_bounded(body())


def test_doing_it_twice_changes_nothing_and_says_so(model: Path) -> None:
    async def body() -> None:
        async with session(model) as here:
            before = await here.say()
            assert "nothing to do" in (await here.order(ResumeMemory(tags=BOTH))).message
            assert "nothing to do" in (await here.order(Continue())).message
            for _ in range(2):
                outcome = await here.order(ReleaseMemory(tags=BOTH))
            assert "nothing to do" in outcome.message
            for _ in range(2):
                outcome = await here.order(ResumeMemory(tags=BOTH))
            assert "nothing to do" in outcome.message
            for _ in range(2):
                outcome = await here.order(Pause())
            assert "already" in outcome.message
            await here.order(Continue())
            assert await here.say() == before

    run_bounded(body())


def test_a_cache_that_was_released_remembers_nothing_and_says_so(model: Path) -> None:
    async def body() -> None:
        async with session(model) as here:
            await here.say()
            assert await here.cached() == 32
            await here.order(ReleaseMemory(tags=("kv_cache",)))
            await eventually(lambda: here.clears() == 1)
            await here.order(ResumeMemory(tags=("kv_cache",)))
            assert await here.cached() == 0

    run_bounded(body())


def test_a_cleared_cache_remembers_nothing_and_running_requests_go_on(model: Path) -> None:
    async def body() -> None:
        async with session(model) as here:
            whole = (await read(here.start(PROMPT, LONG)[1]))[0]
            _, stream = here.start(PROMPT, LONG)
            start, _ = await read(stream, at_least=3)
            await here.order(ClearCache())
            await eventually(lambda: here.clears() == 1)
            assert start + (await read(stream))[0] == whole
            assert await here.cached() == 0

    run_bounded(body())


def test_a_pause_that_aborts_ends_every_request_so_that_it_moves(model: Path) -> None:
    async def body() -> None:
        async with session(model, max_running=1) as here:
            streams = [here.start(PROMPT, LONG)[1] for _ in range(3)]
            await read(streams[0], at_least=1)
            outcome = await here.order(Pause(mode="abort"))
            assert (outcome.requests, outcome.paused) == (3, True)
            for stream in streams:
                with pytest.raises(Paused):
                    await read(stream)
            await here.order(Continue())
            assert len(await here.say()) == 16

    run_bounded(body())


def test_a_second_pause_can_be_a_harder_one(model: Path) -> None:
    async def body() -> None:
        async with session(model) as here:
            _, stream = here.start(PROMPT, LONG)
            await read(stream, at_least=1)
            await here.order(Pause(mode="keep"))
            await here.order(Pause(mode="abort"))
            with pytest.raises(Paused):
                await read(stream)

    run_bounded(body())


@pytest.mark.parametrize("quiet", [pair[0] for pair in QUIET], ids=NAMES)
def test_a_request_that_leaves_meanwhile_frees_all_at_once(model: Path, quiet: Command) -> None:
    async def body() -> None:
        async with session(model) as here:
            request_id, stream = here.start(PROMPT, LONG)
            await read(stream, at_least=1)
            await here.order(quiet)
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


@pytest.mark.parametrize("quiet", [pair[0] for pair in QUIET], ids=NAMES)
def test_an_engine_stops_while_it_is_quiet(model: Path, quiet: Command) -> None:
    async def body() -> None:
        async with session(model) as here:
            _, stream = here.start(PROMPT, LONG)
            await here.order(quiet)
            async with asyncio.timeout(3):
                await here.engine.stop()
            with pytest.raises(EngineDead):
                await read(stream)
            with pytest.raises(EngineDead):
                await here.order(Continue())

    run_bounded(body())


def test_weights_that_cannot_be_kept_are_not_released(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()

    async def body() -> None:
        async with session(model, spill_dir=file / "spill") as here:
            before = await here.say()
            with pytest.raises(EngineFailed, match="kept on disk"):
                await here.order(ReleaseMemory(tags=BOTH))
            assert await here.say() == before

    run_bounded(body())


def test_tags_that_the_engine_does_not_have_are_refused(model: Path) -> None:
    async def body() -> None:
        async with session(model) as here:
            with pytest.raises(Unsupported, match="cuda_graph"):
                await here.order(ReleaseMemory(tags=("weights", "cuda_graph")))
            assert len(await here.say()) == 16

    run_bounded(body())


def test_a_profile_is_a_trace_that_viewers_can_load(model: Path, tmp_path: Path) -> None:
    async def body() -> None:
        async with session(model) as here:
            started = await here.order(StartProfile(directory=str(tmp_path / "new")))
            with pytest.raises(InvalidRequest, match="already"):
                await here.order(StartProfile(directory=str(tmp_path)))
            await here.say()
            written = await here.order(StopProfile())
            assert written.path == started.path
            names = trace_names(Path(str(written.path)))
            assert any(name.startswith("ProfilerStep") for name in names)
            assert "aten::argmax" in names
            assert (await here.order(StopProfile())).path == written.path

    run_bounded(body(), 60)


def test_a_profile_ends_by_itself_after_its_steps(model: Path, tmp_path: Path) -> None:
    async def body() -> None:
        async with session(model) as here:
            with pytest.raises(InvalidRequest, match="no profile"):
                await here.order(StopProfile())
            path = Path((await here.order(StartProfile(directory=str(tmp_path), steps=3))).path or "")
            assert len(await here.say(tokens=20)) == 20
            assert trace_names(path)
            again = Path((await here.order(StartProfile(directory=str(tmp_path), steps=1))).path or "")
            await here.say()
            assert again != path
            assert trace_names(again)

    run_bounded(body(), 60)


def test_a_profile_of_an_engine_that_stops_is_dropped(model: Path, tmp_path: Path) -> None:
    async def body() -> None:
        async with session(model) as here:
            await here.order(StartProfile(directory=str(tmp_path)))
        assert not os.listdir(tmp_path)
        async with session(model) as here:
            await here.order(StartProfile(directory=str(tmp_path)))
            await here.order(StopProfile())
        assert os.listdir(tmp_path)

    run_bounded(body(), 60)


def test_a_profile_that_cannot_be_written_is_refused_before_it_begins(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()

    async def body() -> None:
        async with session(model) as here:
            with pytest.raises(InvalidRequest, match="directory"):
                await here.order(StartProfile(directory=str(file)))

    run_bounded(body())


def test_a_profile_whose_directory_goes_harms_no_request(model: Path, tmp_path: Path) -> None:
    async def body() -> None:
        async with session(model) as here:
            path = Path((await here.order(StartProfile(directory=str(tmp_path / "gone"), steps=2))).path or "")
            shutil.rmtree(path.parent)
            assert len(await here.say()) == 16
            assert len(await here.say()) == 16

    run_bounded(body(), 60)
