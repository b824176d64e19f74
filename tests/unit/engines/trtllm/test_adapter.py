"""The TensorRT-LLM adapter: which errors fail one request and which all, readings, metrics, LoRA and start-up."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY, CollectorRegistry

from baton.config.engines import TrtllmOptions
from baton.config.settings import Settings
from baton.engines.echo.engine import MODEL_DIR
from baton.engines.registry import build_engine
from baton.engines.trtllm.adapter import TrtllmEngine
from baton.engines.trtllm.lifecycle import Timeouts
from baton.errors import Cancelled, ConfigError, EngineDead, EngineFailed, InvalidRequest, Unsupported
from baton.ports.engine import HandoffStyle, Work
from baton.protocol.commands import ListLoras, LoadLora, Pause, UnloadLora
from baton.protocol.events import KvStored, LoadSnapshot
from baton.protocol.ids import new_request_id
from baton.protocol.outputs import Finished, FinishReason, PromptScored, TokenDelta
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


def make(
    version: str, world: World, *more: str, library: Any = None, timeouts: Timeouts | None = None, **options: Any
) -> TrtllmEngine:
    return TrtllmEngine(
        TrtllmOptions(poll_ms=20, **options),
        (*ARGUMENTS, *more),
        MODEL_DIR,
        "double",
        library=library or make_library(version, world, CollectorRegistry()),
        timeouts=timeouts or Timeouts(),
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
def test_d12_a_request_that_fails_leaves_the_others_running(version: str, fault: str) -> None:
    async def body() -> None:
        world = World()
        world.fail_prompts[7] = fault
        async with started(make(version, world)) as session:
            other = session.engine.submit(work(1, tokens=300))
            with pytest.raises(EngineFailed):
                await read_to_the_end(session.engine.submit(work(7, tokens=300, output=OutputOptions(logprobs=1))))
            assert len((await read_to_the_end(other)).tokens[0]) == 300
            assert world.cancelled == (fault == "garbage"), "a request that cannot be read is aborted"
            await session.as_at_the_start(5)
            assert len((await read_to_the_end(session.engine.submit(work(2)))).tokens[0]) == 8

    run_bounded(body())


@both
def test_d12_a_dead_engine_ends_every_stream_with_engine_dead(version: str) -> None:
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


class RecordingLibrary:
    """A double that keeps the engines it has built, for tests that shut one down from outside."""

    def __init__(self, version: str, world: World) -> None:
        self.engines: list[Any] = []
        real = make_library(version, world, CollectorRegistry())

        def llm(**arguments: Any) -> Any:
            self.engines.append(real.llm(**arguments))
            return self.engines[-1]

        self.library = msgspec.structs.replace(real, llm=llm)


@both
def test_an_idle_engine_that_dies_is_detected(version: str) -> None:
    async def body() -> None:
        world = World()
        recording = RecordingLibrary(version, world)
        engine = make(version, world, library=recording.library, timeouts=Timeouts(health_interval_s=0.05))
        async with started(engine):
            recording.engines[0].shutdown()
            await eventually(lambda: not accepts_requests(engine))

    run_bounded(body())


def accepts_requests(engine: TrtllmEngine) -> bool:
    try:
        engine.submit(work(1, tokens=1))
    except EngineDead:
        return False
    return True


def test_a_health_check_that_times_out_ends_the_engine() -> None:
    async def body() -> None:
        world, over = World(), threading.Event()
        library = with_llm(world, _check_health=lambda: over.wait(20))
        timeouts = Timeouts(health_interval_s=0.05, health_timeout_s=0.2)
        engine = make("1.3.0rc22", world, library=library, timeouts=timeouts)
        async with started(engine) as session:
            stream = session.engine.submit(work(1, tokens=2000))
            with pytest.raises(EngineDead, match="has not returned within"):
                await read_to_the_end(stream)
        over.set()

    run_bounded(body())


def with_llm(world: World, version: str = "1.3.0rc22", **changed: Any) -> Any:
    """Return a double whose engine has some methods replaced."""
    real = make_library(version, world, CollectorRegistry())

    class Changed:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return changed.get(name) or getattr(self._inner, name)

    return msgspec.structs.replace(real, llm=lambda **arguments: Changed(real.llm(**arguments)))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("top_k is odd"), InvalidRequest),
        (TypeError("no such input"), InvalidRequest),
        (RuntimeError("something broke"), EngineFailed),
    ],
)
def test_errors_of_generate_async_are_translated(error: Exception, expected: type[Exception]) -> None:
    async def body() -> None:
        world, broken = World(), list[Exception]()
        library = make_library("1.3.0rc22", world, CollectorRegistry())

        class Changed:
            def __init__(self, inner: Any) -> None:
                self._inner = inner

            def __getattr__(self, name: str) -> Any:
                return getattr(self._inner, name)

            def generate_async(self, **arguments: Any) -> Any:
                if broken:
                    raise broken[0]
                return self._inner.generate_async(**arguments)

        changed = msgspec.structs.replace(library, llm=lambda **arguments: Changed(library.llm(**arguments)))
        async with started(make("1.3.0rc22", world, library=changed)) as session:
            broken.append(error)
            with pytest.raises(expected):
                session.engine.submit(work(1))
            assert session.busy() == 0
            broken.clear()
            assert await read_to_the_end(session.engine.submit(work(1)))

    run_bounded(body())


@both
def test_a_prompt_that_the_library_rejects_is_an_invalid_request(version: str) -> None:
    async def body() -> None:
        async with started(make(version, World(), "--max_num_tokens=100")) as session:
            with pytest.raises(InvalidRequest, match="max_num_tokens"):
                session.engine.submit(work(*range(1, 150)))
            assert session.busy() == 0

    run_bounded(body())


@both
def test_an_id_is_in_use_until_its_request_has_ended(version: str) -> None:
    async def body() -> None:
        async with started(make(version, World())) as session:
            request = work(1, tokens=500)
            session.engine.submit(request)
            with pytest.raises(InvalidRequest, match="in use"):
                session.engine.submit(request)
            await session.engine.abort(request.request_id)
            assert await session.engine.submit(request).read()

    run_bounded(body())


def test_an_abort_returns_after_its_timeout() -> None:
    async def body() -> None:
        world = World()
        async with started(make("1.3.0rc22", world, timeouts=Timeouts(abort_s=0.1))) as session:
            world.step_s = 3.0
            await asyncio.sleep(0.02)
            request = work(1, tokens=500)
            stream = session.engine.submit(request)
            await asyncio.wait_for(session.engine.abort(request.request_id), 1)
            with pytest.raises(Cancelled):
                await stream.read()
            world.step_s = 0.001

    run_bounded(body())


@both
def test_d19_readings_start_with_the_engine_and_survive_errors(version: str) -> None:
    async def body() -> None:
        world = World()
        async with started(make(version, world)) as session:
            await eventually(lambda: session.used_blocks() == 0)
            world.poll_errors = 4
            await asyncio.sleep(0.1)
            prompt = tuple(range(1, 101))
            stream = session.engine.submit(work(*prompt, tokens=1900))
            await eventually(lambda: (session.used_blocks() or 0) > 0)
            await eventually(lambda: any(isinstance(reading, KvStored) for reading in session.readings), 15)
            assert len((await read_to_the_end(stream)).tokens[0]) == 1900
            await session.as_at_the_start(5)
            loads = [reading for reading in session.readings if isinstance(reading, LoadSnapshot)]
            assert max(load.running for load in loads) == 1
            assert loads[-1] == LoadSnapshot(0, 0, 0, 256)
            (stored,) = [reading for reading in session.readings if isinstance(reading, KvStored)]
            assert stored.token_ids == prompt[:96]
            assert stored.block_size == session.info.block_size == 16

    run_bounded(body(), 40)


@both
def test_d20_a_model_with_two_kinds_of_attention_publishes_each_block_once(version: str) -> None:
    async def body() -> None:
        world = World()
        world.windows = (64,)
        async with started(make(version, world)) as session:
            await read_to_the_end(session.engine.submit(work(*range(1, 101))))
            await eventually(lambda: any(isinstance(reading, KvStored) for reading in session.readings))
            await asyncio.sleep(0.2)
            assert len([reading for reading in session.readings if isinstance(reading, KvStored)]) == 1

    run_bounded(body())


def test_kv_events_are_not_polled_when_the_user_disables_them() -> None:
    async def body() -> None:
        polled: list[float] = []
        library = with_llm(World(), get_kv_cache_events=lambda timeout: polled.append(timeout) or [])
        for more in (("--kv_cache_config.event_buffer_max_size=0",), ("--kv_cache_config.enable_block_reuse=false",)):
            async with started(make("1.3.0rc22", World(), *more, library=library)):
                await asyncio.sleep(0.1)
        assert polled == []

    run_bounded(body())


@both
def test_metrics_of_the_library_keep_their_names(version: str) -> None:
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
def test_log_probabilities_of_prompt_and_output_are_the_engines(version: str) -> None:
    async def body() -> None:
        async with started(make(version, World())) as session:
            outputs: list[Any] = []
            stream = session.engine.submit(work(1, 2, 3, tokens=2, output=OutputOptions(logprobs=2, prompt_logprobs=0)))
            while read := await stream.read():
                outputs += read
            end = outputs[-1]
            assert isinstance(end, Finished)
            assert end.reason is FinishReason.LENGTH
            (scored,) = [output for output in outputs if isinstance(output, PromptScored)]
            assert len(scored.logprobs.chosen) == 2
            assert scored.logprobs.top == ()
            deltas = [output for output in outputs if isinstance(output, TokenDelta)]
            best = [[entry.rank for entry in position] for delta in deltas for position in delta.logprobs.top]
            assert best == [[1, 2], [1, 2]]

    run_bounded(body())


@both
def test_sampled_choices_end_each_with_a_legal_reason(version: str) -> None:
    async def body() -> None:
        async with started(make(version, World(), "--sampler_type=TRTLLMSampler")) as session:
            request = work(
                1, tokens=40, sampling=Sampling(n=3, seed=5), stop=StopConditions(stop_token_ids=tuple(range(60)))
            )
            answer = await read_to_the_end(session.engine.submit(request), 3)
            for tokens, end in zip(answer.tokens, answer.ends, strict=True):
                assert end is not None
                if end.reason is FinishReason.STOP:
                    assert tokens[-1] == end.stop_reason
                else:
                    assert (end.reason, len(tokens)) == (FinishReason.LENGTH, 40)
            again = await read_to_the_end(
                session.engine.submit(msgspec.structs.replace(request, request_id=new_request_id("t"))), 3
            )
            assert again.tokens == answer.tokens, "the seed decides"

    run_bounded(body())


def test_adapters_are_loaded_used_and_unloaded_by_name(tmp_path: Path) -> None:
    async def body() -> None:
        (tmp_path / "given").mkdir()
        (tmp_path / "mine").mkdir()
        lora = f"--lora_config={{lora_dir: [{tmp_path}/given]}}"
        async with started(make("1.3.0rc22", World(), lora)) as session:
            engine = session.engine
            assert engine.capabilities.lora
            assert session.info.adapters == ("given",)
            assert (await engine.execute(ListLoras())).adapters == ("given",)
            loaded = await engine.execute(LoadLora(name="mine", path=str(tmp_path / "mine")))
            assert loaded.adapters == ("given", "mine")
            for wrong in (LoadLora(name="mine", path=str(tmp_path)), LoadLora(name="x", path="no/such")):
                with pytest.raises(InvalidRequest):
                    await engine.execute(wrong)
            stream = engine.submit(work(1, tokens=200, lora_name="mine"))
            assert (await engine.execute(UnloadLora(name="mine"))).adapters == ("given",)
            assert session.busy() == 0, "unloading waits for the requests that use the adapter"
            assert len((await read_to_the_end(stream)).tokens[0]) == 200
            with pytest.raises(InvalidRequest):
                await engine.execute(UnloadLora(name="mine"))
            with pytest.raises(InvalidRequest, match="lora_name"):
                engine.submit(work(1, lora_name="mine"))
            with pytest.raises(Unsupported):
                await engine.execute(Pause())

    run_bounded(body())


@pytest.mark.parametrize(
    ("role", "handoff"),
    [("aggregated", HandoffStyle.NONE), ("prefill", HandoffStyle.LATE), ("decode", HandoffStyle.LATE)],
)
def test_the_role_decides_the_request_type(role: Any, handoff: HandoffStyle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    engine = build_engine(Settings(engine="trtllm", role=role, model=str(MODEL_DIR), name="model"))
    assert isinstance(engine, TrtllmEngine)
    assert engine.capabilities.handoff is handoff


def test_an_embedding_model_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    (tmp_path / "modules.json").write_text("[]")
    with pytest.raises(ConfigError, match="embeddings"):
        build_engine(Settings(engine="trtllm", model=str(tmp_path), name="model"))


def test_lora_is_a_capability_only_if_the_arguments_enable_it() -> None:
    assert not make("1.3.0rc22", World()).capabilities.lora
    assert make("1.3.0rc22", World(), "--enable_lora").capabilities.lora


def test_guided_decoding_is_a_capability_only_with_a_backend() -> None:
    assert make("1.3.0rc22", World()).capabilities.guided == frozenset()
    by_option = make("1.3.0rc22", World(), guided="xgrammar")
    by_argument = make("1.3.0rc22", World(), "--guided_decoding_backend=llguidance")
    for engine in (by_option, by_argument):
        assert engine.capabilities.guided == {"json", "regex", "choice", "grammar", "structural_tag"}


@pytest.mark.parametrize(
    ("changed", "expected", "names"),
    [
        ({"get_kv_cache_capacity": dict}, EngineDead, "KV cache"),
        ({"generate_async": None}, EngineDead, "first request"),
    ],
)
def test_an_engine_that_fails_its_first_request_does_not_start(changed: Any, expected: Any, names: str) -> None:
    def broken(**arguments: Any) -> Any:
        raise RuntimeError("CUDA error")

    async def body() -> None:
        library = with_llm(World(), **{name: value or broken for name, value in changed.items()})
        engine = make("1.3.0rc22", World(), library=library)
        with pytest.raises(expected, match=names):
            await engine.start()
        await engine.stop()

    run_bounded(body())


@pytest.mark.parametrize(
    ("error", "expected"), [(ValueError("dtype: bad"), ConfigError), (RuntimeError("out of memory"), EngineDead)]
)
def test_errors_of_the_constructor_are_translated(error: Exception, expected: type[Exception]) -> None:
    def broken(**arguments: Any) -> Any:
        raise error

    async def body() -> None:
        library = msgspec.structs.replace(make_library("1.3.0rc22", World(), CollectorRegistry()), llm=broken)
        with pytest.raises(expected, match=str(error)):
            await make("1.3.0rc22", World(), library=library).start()

    run_bounded(body())


def test_an_engine_whose_start_was_cancelled_is_shut_down() -> None:
    async def body() -> None:
        go, engines = threading.Event(), list[Any]()
        real = make_library("1.3.0rc22", World(), CollectorRegistry())

        def slow(**arguments: Any) -> Any:
            go.wait(5)
            engines.append(real.llm(**arguments))
            return engines[0]

        engine = make("1.3.0rc22", World(), library=msgspec.structs.replace(real, llm=slow))
        starting = asyncio.create_task(engine.start())
        await asyncio.sleep(0.05)
        starting.cancel()
        await engine.stop()
        go.set()
        await eventually(lambda: bool(engines) and engines[0]._executor is None)

    run_bounded(body())


@pytest.mark.parametrize(
    ("sampling", "names"),
    [
        (Sampling(frequency_penalty=0.5), "frequency_penalty"),
        (Sampling(presence_penalty=-1.0), "presence_penalty"),
        (Sampling(repetition_penalty=1.1), "repetition_penalty"),
        (Sampling(min_p=0.1), "min_p"),
        (Sampling(temperature=0.7, seed=0), "seed"),
    ],
)
def test_an_option_that_the_sampler_ignores_is_refused_by_name(sampling: Sampling, names: str) -> None:
    async def body() -> None:
        plain = Sampling(
            temperature=0.0, seed=3, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0
        )
        async with started(make("1.2.1", World())) as session:
            with pytest.raises(Unsupported, match=f"^{names}: .*--sampler_type TRTLLMSampler"):
                session.engine.submit(work(1, tokens=4, sampling=sampling))
            await read_to_the_end(session.engine.submit(work(1, tokens=4, sampling=plain)))
        for version, more in (("1.2.1", ("--sampler_type=TRTLLMSampler",)), ("1.3.0rc22", ())):
            async with started(make(version, World(), *more)) as session:
                await read_to_the_end(session.engine.submit(work(1, tokens=4, sampling=sampling)))

    run_bounded(body())


def test_a_priority_that_the_version_lacks_is_refused_by_name() -> None:
    async def body() -> None:
        async with started(make("1.2.1", World())) as session:
            with pytest.raises(Unsupported, match=r"^priority: "):
                session.engine.submit(work(1, priority=3))
            await read_to_the_end(session.engine.submit(work(1, priority=0)))

    run_bounded(body())
