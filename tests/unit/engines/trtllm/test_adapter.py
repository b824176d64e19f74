"""The TensorRT-LLM adapter around its requests: what fails one, what fails all, and what it tells and takes."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY, CollectorRegistry

from baton.config.engines import TrtllmOptions
from baton.engines.echo.engine import MODEL_DIR
from baton.engines.trtllm import adapter, lifecycle
from baton.engines.trtllm.adapter import TrtllmEngine
from baton.errors import Cancelled, ConfigError, EngineDead, EngineFailed, InvalidRequest, Unsupported
from baton.ports.engine import Work
from baton.protocol.commands import ListLoras, LoadLora, Pause, UnloadLora
from baton.protocol.events import KvStored, LoadSnapshot
from baton.protocol.ids import new_request_id
from baton.protocol.outputs import Finished, FinishReason
from baton.protocol.requests import OutputOptions, Sampling, StopConditions
from baton.testing import eventually, run_bounded, running
from baton.testing.engine_session import Session, read_to_the_end
from tests.doubles.trtllm import World, make_library

VERSIONS = ["1.2.1", "1.3.0rc22"]
ARGUMENTS = (
    "--max_batch_size=4",
    "--max_seq_len=2048",
    "--kv_cache_config.tokens_per_block=16",
    "--kv_cache_config.max_tokens=4096",
)
both = pytest.mark.parametrize("version", VERSIONS)


def make(version: str, world: World, *more: str, library: Any = None, **options: Any) -> TrtllmEngine:
    library = library or make_library(version, world, CollectorRegistry())
    return TrtllmEngine(
        TrtllmOptions(poll_ms=20, **options), (*ARGUMENTS, *more), MODEL_DIR, "double", "whole", library
    )


@asynccontextmanager
async def started(engine: TrtllmEngine) -> AsyncIterator[Session]:
    async with running(engine) as info:
        session = Session(engine, info)
        listening = asyncio.create_task(session.listen())
        await eventually(lambda: session.used_blocks() is not None)
        yield session
    await listening


def work(*prompt: int, tokens: int = 8, **changes: Any) -> Work:
    fields: dict[str, Any] = {
        "request_id": new_request_id("t"),
        "token_ids": prompt or (1, 2, 3),
        "max_tokens": tokens,
        "stop": StopConditions(ignore_eos=True),
        "sampling": Sampling(temperature=0.0),
    }
    return Work(**(fields | changes))


@both
@pytest.mark.parametrize("fault", ["request", "garbage", "timeout"])
def test_d12_a_bad_request_ends_nothing_else(version: str, fault: str) -> None:
    async def body() -> None:
        world = World()
        world.fail_prompts[7] = fault
        async with started(make(version, world)) as session:
            other = session.engine.submit(work(1, tokens=300))
            with pytest.raises(EngineFailed):
                await read_to_the_end(session.engine.submit(work(7, tokens=300, output=OutputOptions(logprobs=1))))
            assert len((await read_to_the_end(other)).tokens[0]) == 300
            assert world.cancelled == (fault == "garbage"), "the engine does not go on with what nobody reads"
            await session.as_at_the_start(5)
            assert len((await read_to_the_end(session.engine.submit(work(2)))).tokens[0]) == 8

    run_bounded(body())


@both
def test_d12_only_a_dead_engine_ends_all_and_says_so_to_each(version: str) -> None:
    async def body() -> None:
        world = World()
        world.fail_prompts[7] = "die"
        async with started(make(version, world)) as session:
            streams = [session.engine.submit(work(first, tokens=1000)) for first in (1, 2, 7, 3, 4, 5)]
            for stream in streams:
                with pytest.raises(EngineDead, match="died"):
                    await read_to_the_end(stream)
            with pytest.raises(EngineDead):
                session.engine.submit(work(1))
            with pytest.raises(EngineDead):
                await session.engine.execute(ListLoras())
            assert session.busy() == 0

    run_bounded(body())


class Spied:
    """A library whose engine can be reached, so that a test can do to it what the world does."""

    def __init__(self, version: str, world: World) -> None:
        self.made: list[Any] = []
        real = make_library(version, world, CollectorRegistry())

        def llm(**given: Any) -> Any:
            self.made.append(real.llm(**given))
            return self.made[-1]

        self.library = msgspec.structs.replace(real, llm=llm)


@both
def test_an_engine_that_dies_while_nothing_runs_is_noticed(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        world = World()
        spied = Spied(version, world)
        engine = make(version, world, library=spied.library)
        async with started(engine):
            spied.made[0].shutdown()
            await eventually(lambda: not model_input(engine))

    monkeypatch.setattr(lifecycle, "HEALTH_EVERY_S", 0.05)
    run_bounded(body())


def model_input(engine: TrtllmEngine) -> bool:
    try:
        engine.submit(work(1, tokens=1))
    except EngineDead:
        return False
    return True


def test_a_health_check_that_never_answers_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        world, over = World(), threading.Event()
        engine = make("1.3.0rc22", world, library=with_llm(world, _check_health=lambda: over.wait(20)))
        async with started(engine) as session:
            stream = session.engine.submit(work(1, tokens=2000))
            with pytest.raises(EngineDead, match="does not answer"):
                await read_to_the_end(stream)
        over.set()

    monkeypatch.setattr(lifecycle, "HEALTH_EVERY_S", 0.05)
    monkeypatch.setattr(lifecycle, "HEALTH_LIMIT_S", 0.2)
    run_bounded(body())


def with_llm(world: World, version: str = "1.3.0rc22", **changed: Any) -> Any:
    """Return a library whose engine has some methods changed."""
    real = make_library(version, world, CollectorRegistry())

    class Changed:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return changed.get(name) or getattr(self._inner, name)

    return msgspec.structs.replace(real, llm=lambda **given: Changed(real.llm(**given)))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("top_k is odd"), InvalidRequest),
        (TypeError("no such input"), InvalidRequest),
        (RuntimeError("something broke"), EngineFailed),
    ],
)
def test_what_a_call_raises_is_translated(error: Exception, told: type[Exception]) -> None:
    async def body() -> None:
        world, broken = World(), list[Exception]()
        library = make_library("1.3.0rc22", world, CollectorRegistry())

        class Changed:
            def __init__(self, inner: Any) -> None:
                self._inner = inner

            def __getattr__(self, name: str) -> Any:
                return getattr(self._inner, name)

            def generate_async(self, **asked: Any) -> Any:
                if broken:
                    raise broken[0]
                return self._inner.generate_async(**asked)

        spied = msgspec.structs.replace(library, llm=lambda **given: Changed(library.llm(**given)))
        async with started(make("1.3.0rc22", world, library=spied)) as session:
            broken.append(error)
            with pytest.raises(told):
                session.engine.submit(work(1))
            assert session.busy() == 0
            broken.clear()
            assert await read_to_the_end(session.engine.submit(work(1)))

    run_bounded(body())


@both
def test_a_prompt_that_the_engine_refuses_is_the_requests_fault(version: str) -> None:
    async def body() -> None:
        async with started(make(version, World(), "--max_num_tokens=100")) as session:
            with pytest.raises(InvalidRequest, match="max_num_tokens"):
                session.engine.submit(work(*range(1, 150)))
            for wrong in (work(258), work(-1), work(1, tokens=3000)):
                with pytest.raises(InvalidRequest):
                    session.engine.submit(wrong)
            assert session.busy() == 0

    run_bounded(body())


@both
def test_an_id_is_in_use_until_its_request_has_ended(version: str) -> None:
    async def body() -> None:
        async with started(make(version, World())) as session:
            asked = work(1, tokens=500)
            session.engine.submit(asked)
            with pytest.raises(InvalidRequest, match="in use"):
                session.engine.submit(asked)
            await session.engine.abort(asked.request_id)
            assert await session.engine.submit(asked).read()

    run_bounded(body())


def test_an_abort_that_the_engine_does_not_answer_returns_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        world = World()
        async with started(make("1.3.0rc22", world)) as session:
            world.step_s = 3.0
            await asyncio.sleep(0.02)
            asked = work(1, tokens=500)
            stream = session.engine.submit(asked)
            await asyncio.wait_for(session.engine.abort(asked.request_id), 1)
            with pytest.raises(Cancelled):
                await stream.read()
            world.step_s = 0.001

    monkeypatch.setattr(adapter, "ABORT_S", 0.1)
    run_bounded(body())


@both
def test_d19_readings_begin_at_once_and_survive_an_error(version: str) -> None:
    async def body() -> None:
        world = World()
        async with started(make(version, world)) as session:
            await eventually(lambda: session.used_blocks() == 0)
            world.poll_errors = 4
            await asyncio.sleep(0.1)
            prompt = tuple(range(1, 101))
            stream = session.engine.submit(work(*prompt, tokens=1900))
            await eventually(lambda: (session.used_blocks() or 0) > 0)
            await eventually(lambda: any(isinstance(told, KvStored) for told in session.readings), 15)
            assert len((await read_to_the_end(stream)).tokens[0]) == 1900
            await session.as_at_the_start(5)
            loads = [told for told in session.readings if isinstance(told, LoadSnapshot)]
            assert max(load.running for load in loads) == 1
            assert loads[-1] == LoadSnapshot(0, 0, 0, 256)
            (stored,) = [told for told in session.readings if isinstance(told, KvStored)]
            assert stored.token_ids == prompt[:96]
            assert stored.block_size == session.info.block_size == 16

    run_bounded(body(), 40)


@both
def test_d20_a_model_with_two_kinds_of_attention_tells_each_block_once(version: str) -> None:
    async def body() -> None:
        world = World()
        world.windows = (64,)
        async with started(make(version, world)) as session:
            await read_to_the_end(session.engine.submit(work(*range(1, 101))))
            await eventually(lambda: any(isinstance(told, KvStored) for told in session.readings))
            await asyncio.sleep(0.2)
            assert len([told for told in session.readings if isinstance(told, KvStored)]) == 1

    run_bounded(body())


def test_no_events_are_asked_for_when_the_user_wants_none() -> None:
    async def body() -> None:
        asked: list[float] = []
        library = with_llm(World(), get_kv_cache_events=lambda timeout: asked.append(timeout) or [])
        for more in (("--kv_cache_config.event_buffer_max_size=0",), ("--kv_cache_config.enable_block_reuse=false",)):
            async with started(make("1.3.0rc22", World(), *more, library=library)):
                await asyncio.sleep(0.1)
        assert asked == []

    run_bounded(body())


@both
def test_the_engines_own_metrics_keep_their_names(version: str) -> None:
    async def body() -> None:
        registered = set(REGISTRY._collector_to_names)
        library = make_library(version, World())
        try:
            engine = make(version, World(), library=library)
            assert engine.metrics() == ""
            async with started(engine) as session:
                await read_to_the_end(session.engine.submit(work(1)))
                await eventually(lambda: not session.busy())
                text = engine.metrics()
                assert 'trtllm_request_success_total{engine_type="trtllm",model_name="double"} 1.0' in text
                assert "python_info" not in text
                second = make(version, World(), library=library)
                async with started(second):
                    assert "trtllm_" in second.metrics()
        finally:
            for collector in set(REGISTRY._collector_to_names) - registered:
                REGISTRY.unregister(collector)

    run_bounded(body())


@both
def test_log_probabilities_of_the_prompt_and_of_the_answer_come_from_the_engine(version: str) -> None:
    async def body() -> None:
        async with started(make(version, World())) as session:
            asked = work(1, 2, 3, tokens=2, output=OutputOptions(logprobs=2, prompt_logprobs=0))
            outputs: list[Any] = []
            stream = session.engine.submit(asked)
            while read := await stream.read():
                outputs += read
            end = outputs[-1]
            assert isinstance(end, Finished)
            assert end.reason is FinishReason.LENGTH
            assert end.prompt_logprobs is not None
            assert len(end.prompt_logprobs.chosen) == 2
            assert end.prompt_logprobs.top == ()
            best = [[place.rank for place in position] for delta in outputs[:-1] for position in delta.logprobs.top]
            assert best == [[1, 2], [1, 2]]

    run_bounded(body())


@both
def test_several_choices_by_chance_each_end_for_a_legal_reason(version: str) -> None:
    async def body() -> None:
        async with started(make(version, World())) as session:
            asked = work(
                1, tokens=40, sampling=Sampling(n=3, seed=5), stop=StopConditions(stop_token_ids=tuple(range(60)))
            )
            answer = await read_to_the_end(session.engine.submit(asked), 3)
            for tokens, end in zip(answer.tokens, answer.ends, strict=True):
                assert end is not None
                if end.reason is FinishReason.STOP:
                    assert tokens[-1] == end.stop_reason
                else:
                    assert (end.reason, len(tokens)) == (FinishReason.LENGTH, 40)
            again = await read_to_the_end(
                session.engine.submit(msgspec.structs.replace(asked, request_id=new_request_id("t"))), 3
            )
            assert again.tokens == answer.tokens, "chance follows its seed"

    run_bounded(body())


def test_adapters_are_loaded_used_and_unloaded_by_name(tmp_path: Path) -> None:
    async def body() -> None:
        (tmp_path / "given").mkdir()
        (tmp_path / "mine").mkdir()
        lora = f"--lora_config={{lora_dir: [{tmp_path}/given]}}"
        async with started(make("1.3.0rc22", World(), lora)) as session:
            engine = session.engine
            assert engine.capabilities.lora
            assert (await engine.execute(ListLoras())).adapters == ("given",)
            loaded = await engine.execute(LoadLora(name="mine", path=str(tmp_path / "mine")))
            assert loaded.adapters == ("given", "mine")
            for wrong in (LoadLora(name="mine", path=str(tmp_path)), LoadLora(name="x", path="no/such")):
                with pytest.raises(InvalidRequest):
                    await engine.execute(wrong)
            stream = engine.submit(work(1, tokens=200, lora_name="mine"))
            assert (await engine.execute(UnloadLora(name="mine"))).adapters == ("given",)
            assert session.busy() == 0, "it waits for those who use it"
            assert len((await read_to_the_end(stream)).tokens[0]) == 200
            for refused in (engine.execute(UnloadLora(name="mine")),):
                with pytest.raises(InvalidRequest):
                    await refused
            with pytest.raises(InvalidRequest, match="lora_name"):
                engine.submit(work(1, lora_name="mine"))
            with pytest.raises(Unsupported):
                await engine.execute(Pause())

    run_bounded(body())


def test_without_adapters_there_are_none_to_order() -> None:
    async def body() -> None:
        async with started(make("1.3.0rc22", World())) as session:
            assert not session.engine.capabilities.lora
            with pytest.raises(Unsupported):
                await session.engine.execute(ListLoras())

    run_bounded(body())


def test_guidance_is_promised_when_something_can_guide() -> None:
    assert make("1.3.0rc22", World()).capabilities.guided == frozenset()
    by_option = make("1.3.0rc22", World(), guided="xgrammar")
    by_argument = make("1.3.0rc22", World(), "--guided_decoding_backend=llguidance")
    for engine in (by_option, by_argument):
        assert engine.capabilities.guided == {"json", "regex", "choice", "grammar", "structural_tag"}


@pytest.mark.parametrize(
    ("changed", "told", "names"),
    [
        ({"get_kv_cache_capacity": dict}, EngineDead, "KV cache"),
        ({"generate_async": None}, EngineDead, "first request"),
    ],
)
def test_an_engine_that_does_not_work_does_not_start(changed: Any, told: Any, names: str) -> None:
    def broken(**asked: Any) -> Any:
        raise RuntimeError("CUDA error")

    async def body() -> None:
        library = with_llm(World(), **{name: value or broken for name, value in changed.items()})
        engine = make("1.3.0rc22", World(), library=library)
        with pytest.raises(told, match=names):
            await engine.start()
        await engine.stop()

    run_bounded(body())


@pytest.mark.parametrize(
    ("error", "told"), [(ValueError("dtype: bad"), ConfigError), (RuntimeError("out of memory"), EngineDead)]
)
def test_a_library_that_cannot_start_says_whose_fault_it_is(error: Exception, told: type[Exception]) -> None:
    def broken(**given: Any) -> Any:
        raise error

    async def body() -> None:
        library = msgspec.structs.replace(make_library("1.3.0rc22", World(), CollectorRegistry()), llm=broken)
        with pytest.raises(told, match=str(error)):
            await make("1.3.0rc22", World(), library=library).start()

    run_bounded(body())


def test_a_start_that_nobody_waits_for_any_more_leaves_no_engine() -> None:
    async def body() -> None:
        go, made = threading.Event(), list[Any]()
        real = make_library("1.3.0rc22", World(), CollectorRegistry())

        def slow(**given: Any) -> Any:
            go.wait(5)
            made.append(real.llm(**given))
            return made[0]

        engine = make("1.3.0rc22", World(), library=msgspec.structs.replace(real, llm=slow))
        starting = asyncio.create_task(engine.start())
        await asyncio.sleep(0.05)
        starting.cancel()
        await engine.stop()
        go.set()
        await eventually(lambda: bool(made) and made[0]._executor is None)

    run_bounded(body())


def test_a_priority_that_the_version_has_not_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with started(make("1.2.1", World())) as session:
            for _ in range(3):
                await read_to_the_end(session.engine.submit(work(1, priority=3)))

    with caplog.at_level(logging.WARNING):
        run_bounded(body())
    assert len([record for record in caplog.records if "priorities" in record.getMessage()]) == 1
