"""The real SGLang as an embedder and as a diffusion model."""

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from baton.errors import Cancelled, EngineDead, Unsupported
from baton.ports.engine import EmbedWork
from baton.protocol.commands import Pause
from baton.protocol.events import KvStored, LoadSnapshot
from baton.protocol.ids import new_request_id
from baton.protocol.outputs import FinishReason
from baton.protocol.requests import Sampling, StopConditions
from baton.testing.bounded import eventually
from baton.testing.engine_session import Session, read_to_the_end
from tests.real_sglang.engines import Bench, TestedEmbedder, TestedEngine
from tests.real_sglang.hardware import HIDDEN, VECTOR_TOLERANCE, cores_of_ranks, needs_two, tiny_model
from tests.real_sglang.test_generating import answer_of, work

MASKED = 151936  # SGLang takes the mask token of the published SDAR models for granted


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


@pytest.fixture(scope="module")
def diffusion_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random SDAR: its layers are Qwen3's, and only the way it is run differs."""
    directory = tiny_model(
        tmp_path_factory.mktemp("sdar"), "qwen3", vocab_size=MASKED, num_hidden_layers=2, initializer_range=0.05
    )
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"architectures": ["SDARForCausalLM"]}))
    return directory


def test_embeddings_are_of_one_length_and_of_their_text(bench: Bench, tiny: Path) -> None:
    async def body() -> None:
        session = await bench.session(lambda: TestedEmbedder(tiny))
        engine, info = session.engine, session.info
        assert engine.capabilities.embeddings
        assert info.embedding_size == HIDDEN
        texts = (tuple(range(5, 30)), tuple(range(60, 70)), tuple(range(5, 30)))
        vectors = await engine.embed(EmbedWork(request_id=new_request_id("test"), inputs=texts))
        assert [len(vector) for vector in vectors] == [HIDDEN] * 3
        assert vectors[0] == pytest.approx(vectors[2], abs=VECTOR_TOLERANCE / 100)
        assert vectors[0] != pytest.approx(vectors[1], abs=1e-2)
        assert (info.vocab_size, info.max_prompt_tokens) == (300, 4089)
        with pytest.raises(Unsupported):
            await engine.execute(Pause(mode="keep"))

    bench.run(body(), 150)


def test_embeddings_that_nobody_waits_for_are_taken_back(bench: Bench, tiny: Path) -> None:
    async def body() -> None:
        session = await bench.session(lambda: TestedEmbedder(tiny))
        texts = tuple(tuple(range(5, 200)) * 10 for _ in range(64))
        asked = EmbedWork(request_id=new_request_id("test"), inputs=texts)
        embedding = asyncio.create_task(session.engine.embed(asked))
        await asyncio.sleep(0.05)
        embedding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await embedding
        await eventually(lambda: not session.busy())
        short = EmbedWork(request_id=new_request_id("test"), inputs=((1, 2, 3),))
        await asyncio.wait_for(session.engine.embed(short), 10)

    bench.run(body(), 150)


def test_a_diffusion_model_generates_and_is_aborted(bench: Bench, diffusion_model: Path) -> None:
    async def body() -> None:
        args = ("--dllm-algorithm", "LowConfidence", "--disable-radix-cache", "--max-running-requests", "2")
        session = await bench.session(lambda: TestedEngine(diffusion_model, "null", *args))
        assert session.engine.capabilities.diffusion
        tokens, end, _ = await answer_of(session, work(24))
        assert len(tokens) == 24
        assert end.reason is FinishReason.LENGTH
        assert (await answer_of(session, work(24)))[0] == tokens
        for sampling in (Sampling(temperature=0.7), Sampling(top_p=0.5), Sampling(presence_penalty=1.0)):
            with pytest.raises(Unsupported):
                session.engine.submit(work(4, sampling=sampling))
        long = work(2000, stop=StopConditions(ignore_eos=True))
        stream = session.engine.submit(long)
        await stream.read()
        await session.engine.abort(long.request_id)
        with pytest.raises(Cancelled):
            await stream.read()
        await session.as_at_the_start(20)

    bench.run(body(), 150)


@needs_two
@pytest.mark.timeout(300)
def test_data_parallel_ranks_have_caches_of_their_own(
    bench: Bench, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", cores_of_ranks())

    async def body() -> None:
        session = await bench.session(lambda: TestedEngine(tiny, "null", "--dp-size", "2"))
        assert session.engine.capabilities.dp_size == 2
        cached = [(await answer_of(session, work(2, dp_rank=rank)))[1].cached_tokens for rank in (0, 1, 1, 0)]
        assert cached == [0, 0, 32, 32]
        asked = work(2000, dp_rank=1)
        stream = session.engine.submit(asked)
        await stream.read()
        await session.engine.abort(asked.request_id)

        def told(kind: type) -> set[int]:
            return {reading.dp_rank for reading in session.readings if isinstance(reading, kind)}

        await eventually(lambda: told(KvStored) == {0, 1})
        assert told(LoadSnapshot) == {0, 1}
        stored = [reading for reading in session.readings if isinstance(reading, KvStored)]
        names = [{name for event in stored if event.dp_rank == rank for name in event.block_hashes} for rank in (0, 1)]
        assert names[0] <= names[1], "one name for one content, in every process"
        await a_frozen_rank_ends_the_engine_although_the_other_serves(session)

    bench.run(body(), 200)


async def a_frozen_rank_ends_the_engine_although_the_other_serves(session: Session) -> None:
    schedulers = [
        child for child in psutil.Process().children(recursive=True) if "scheduler" in " ".join(child.cmdline())
    ]
    frozen = session.engine.submit(work(3000, dp_rank=1))
    await frozen.read()
    [victim] = [child for child in schedulers if "DP1" in " ".join(child.cmdline())]
    victim.send_signal(signal.SIGSTOP)

    async def keep_the_other_busy() -> None:
        while True:
            await answer_of(session, work(4, dp_rank=0))

    with pytest.raises(EngineDead, match="has been stopped"):
        await keep_the_other_busy()
    with pytest.raises(EngineDead, match="has been stopped"):
        await read_to_the_end(frozen)
    await session.engine.stop()
