"""The embedding engine on tiny random encoders: correct vectors in any batch, cancellation, start and stop."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from baton.config.engines import TorchOptions  # noqa: E402
from baton.engines.torch.embedder import TorchEmbedder  # noqa: E402
from baton.errors import BatonError, ConfigError, EngineDead, Unsupported  # noqa: E402
from baton.models.sentence import ENCODERS, Pooling  # noqa: E402
from baton.models.tokenizer import PassageTokenizer  # noqa: E402
from baton.ports.engine import EmbedEngine, EmbedWork, EngineInfo, GenerateEngine  # noqa: E402
from baton.protocol.commands import ClearCache  # noqa: E402
from baton.protocol.events import LoadSnapshot  # noqa: E402
from baton.protocol.ids import new_request_id  # noqa: E402
from baton.testing import eventually, measure_lag, run_bounded  # noqa: E402
from tests.unit.handlers.embed_fakes import CONTEXT, SIZE, VOCABULARY, write_encoder, write_layout  # noqa: E402

TOLERANCE = 1e-5
CPU = TorchOptions(device="cpu", threads=1)
SOME = ((2, 5, 6, 3), (2, 7, 3), (2, *range(4, 17), 3), (8,))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("bert")
    return directory, write_encoder(directory)


@asynccontextmanager
async def started(directory: Path, options: TorchOptions = CPU) -> AsyncIterator[tuple[TorchEmbedder, EngineInfo]]:
    engine = TorchEmbedder(options, directory, "tiny")
    try:
        yield engine, await engine.start()
    finally:
        await engine.stop()


def work(*inputs: tuple[int, ...]) -> EmbedWork:
    return EmbedWork(request_id=new_request_id("test"), inputs=inputs)


def plain(model: Any, tokens: tuple[int, ...], pooling: str = "mean_tokens", normalize: bool = True) -> list[float]:
    """Return the vector of one input, computed alone with transformers."""
    with torch.inference_mode():
        hidden = model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
    weights = torch.arange(1, len(tokens) + 1)[:, None]
    vector = {
        "cls_token": hidden[0],
        "lasttoken": hidden[-1],
        "max_tokens": hidden.max(dim=0).values,
        "mean_tokens": hidden.mean(dim=0),
        "mean_sqrt_len_tokens": hidden.sum(dim=0) / math.sqrt(len(tokens)),
        "weightedmean_tokens": (hidden * weights).sum(dim=0) / weights.sum(),
    }[pooling]
    return (vector / vector.norm() if normalize else vector).tolist()


# Vectors


def test_vectors_do_not_depend_on_the_rest_of_the_batch(bert: tuple[Path, Any]) -> None:
    directory, model = bert

    async def body() -> None:
        async with started(directory) as (engine, info):
            assert (info.embedding_size, info.context_length, info.model_name) == (SIZE, CONTEXT, "tiny")
            assert info.vocab_size == len(VOCABULARY)
            together = await engine.embed(work(*SOME))
            for tokens, vector in zip(SOME, together, strict=True):
                assert list(vector) == pytest.approx(plain(model, tokens), abs=TOLERANCE)
                [alone] = await engine.embed(work(tokens))
                assert list(vector) == pytest.approx(list(alone), abs=TOLERANCE)

    run_bounded(body())


@pytest.mark.parametrize("pooling", list(Pooling))
@pytest.mark.parametrize("normalize", [True, False])
def test_every_pooling_mode_matches_a_direct_computation(
    bert: tuple[Path, Any], pooling: str, normalize: bool, tmp_path: Path
) -> None:
    directory, model = bert
    for file in directory.iterdir():
        if file.is_file():
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "modules.json").unlink()
    (tmp_path / "sentence_bert_config.json").unlink()
    write_layout(tmp_path, pooling, normalize=normalize)

    async def body() -> None:
        async with started(tmp_path) as (engine, _):
            for tokens, vector in zip(SOME, await engine.embed(work(*SOME)), strict=True):
                assert list(vector) == pytest.approx(plain(model, tokens, pooling, normalize), abs=TOLERANCE)

    run_bounded(body())


def test_several_pooling_modes_are_concatenated(bert: tuple[Path, Any], tmp_path: Path) -> None:
    model = write_encoder(tmp_path)
    write_layout(tmp_path, "mean_tokens", "cls_token", normalize=False)

    async def body() -> None:
        async with started(tmp_path) as (engine, info):
            assert info.embedding_size == 2 * SIZE
            [vector] = await engine.embed(work(SOME[0]))
            parts = plain(model, SOME[0], "cls_token", False) + plain(model, SOME[0], "mean_tokens", False)
            assert list(vector) == pytest.approx(parts, abs=TOLERANCE)

    run_bounded(body())


@pytest.mark.parametrize("kind", sorted(ENCODERS - {"bert"}))
def test_every_supported_architecture_embeds(kind: str, tmp_path: Path) -> None:
    model = write_encoder(tmp_path, kind)

    async def body() -> None:
        async with started(tmp_path) as (engine, _):
            for tokens, vector in zip(SOME, await engine.embed(work(*SOME)), strict=True):
                assert list(vector) == pytest.approx(plain(model, tokens), abs=TOLERANCE)

    run_bounded(body())


def test_bfloat16_vectors_are_close(bert: tuple[Path, Any]) -> None:
    directory, model = bert

    async def body() -> None:
        async with started(directory, TorchOptions(device="cpu", threads=1, dtype="bfloat16")) as (engine, _):
            [vector] = await engine.embed(work(SOME[0]))
            exact = plain(model, SOME[0])
            assert sum(a * b for a, b in zip(vector, exact, strict=True)) > 0.99
            assert list(vector) != pytest.approx(exact, abs=1e-7)

    run_bounded(body())


# Requests


def test_concurrent_requests_get_their_own_vectors(bert: tuple[Path, Any]) -> None:
    directory, model = bert
    options = TorchOptions(device="cpu", threads=1, batch_tokens=32)

    async def body() -> None:
        async with started(directory, options) as (engine, _):
            requests = [
                tuple((2, 4 + (number + place) % 13, 3) for place in range(number % 7 + 1)) for number in range(40)
            ]
            lag = asyncio.create_task(measure_lag())
            answers = await asyncio.gather(*(engine.embed(work(*inputs)) for inputs in requests))
            for inputs, vectors in zip(requests, answers, strict=True):
                for tokens, vector in zip(inputs, vectors, strict=True):
                    assert list(vector) == pytest.approx(plain(model, tokens), abs=TOLERANCE)
            lag.cancel()
            assert await lag < 0.5
            progress = engine.progress()
            assert (progress.running, progress.waiting) == (0, 0)
            assert progress.steps >= 3

    run_bounded(body())


def test_a_cancelled_request_is_withdrawn_at_once(bert: tuple[Path, Any]) -> None:
    async def body() -> None:
        async with started(bert[0], TorchOptions(device="cpu", threads=1, batch_tokens=16)) as (engine, _):
            large = asyncio.create_task(engine.embed(work(*SOME * 2000)))
            await eventually(lambda: engine.progress().running == 1)
            small = asyncio.create_task(engine.embed(work(SOME[0])))
            await asyncio.sleep(0)
            large.cancel()
            with pytest.raises(asyncio.CancelledError):
                await large
            assert engine.progress().running + engine.progress().waiting <= 1
            assert len(await small) == 1
            steps = engine.progress().steps
            await asyncio.sleep(0.2)
            assert engine.progress().steps <= steps + 5

    run_bounded(body())


def test_it_only_embeds(bert: tuple[Path, Any]) -> None:
    async def body() -> None:
        async with started(bert[0]) as (engine, _):
            assert not engine.capabilities.generate
            assert engine.capabilities.embeddings
            assert isinstance(engine, EmbedEngine)
            assert not isinstance(engine, GenerateEngine)
            with pytest.raises(Unsupported):
                await engine.execute(ClearCache())
            assert await engine.embed(work()) == []

    run_bounded(body())


# Life


def test_stop_fails_waiting_requests_and_ends_the_readings(bert: tuple[Path, Any]) -> None:
    async def body() -> None:
        engine = TorchEmbedder(TorchOptions(device="cpu", threads=1, batch_tokens=16), bert[0], "tiny")
        await engine.start()
        seen: list[object] = []

        async def listen() -> None:
            async for reading in engine.readings():
                seen.append(reading)

        listening = asyncio.create_task(listen())
        calls = [asyncio.create_task(engine.embed(work(*SOME * 1000))) for _ in range(3)]
        await eventually(lambda: any(isinstance(r, LoadSnapshot) and r.running for r in seen))
        await engine.stop()
        for call in calls:
            with pytest.raises(EngineDead):
                await call
        await listening
        with pytest.raises(EngineDead):
            await engine.embed(work((4,)))
        await engine.stop()

    run_bounded(body())


def test_before_start_embed_raises_and_stop_is_no_error(bert: tuple[Path, Any]) -> None:
    async def body() -> None:
        engine = TorchEmbedder(CPU, bert[0], "tiny")
        with pytest.raises(EngineDead):
            await engine.embed(work((4,)))
        await engine.stop()

    run_bounded(body())


def test_stop_after_a_cancelled_start_is_no_error(bert: tuple[Path, Any]) -> None:
    async def body() -> None:
        engine = TorchEmbedder(CPU, bert[0], "tiny")
        start = asyncio.create_task(engine.start())
        await asyncio.sleep(0.01)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        await engine.stop()

    run_bounded(body())


async def refusal(directory: Path, options: TorchOptions = CPU) -> BatonError:
    """Return what a start fails with."""
    engine = TorchEmbedder(options, directory, "tiny")
    try:
        with pytest.raises(BatonError) as failure:
            await engine.start()
    finally:
        await engine.stop()
    return failure.value


def test_broken_weights_raise_config_error_with_their_directory(tmp_path: Path) -> None:
    from safetensors.torch import load, save_file

    async def body() -> None:
        write_encoder(tmp_path)
        weights = tmp_path / "model.safetensors"
        whole = weights.read_bytes()
        tensors = load(whole)
        name = "encoder.layer.1.output.dense.weight"
        without = {key: tensor for key, tensor in tensors.items() if key != name}
        other_shape = {**tensors, name: torch.zeros(3, 3)}
        nan = {**tensors, name: torch.full_like(tensors[name], torch.nan)}
        for broken in (whole[: len(whole) // 2], b"not at all", b"", without, other_shape, nan):
            weights.unlink()
            if isinstance(broken, bytes):
                weights.write_bytes(broken)
            else:
                save_file(broken, weights, {"format": "pt"})
            error = await refusal(tmp_path)
            assert isinstance(error, ConfigError)
            assert str(tmp_path) in error.message
            assert "\n" not in error.message
        weights.unlink()
        assert isinstance(await refusal(tmp_path), ConfigError)

    run_bounded(body())


def test_a_missing_device_raises_config_error(bert: tuple[Path, Any]) -> None:
    async def body() -> None:
        error = await refusal(bert[0], TorchOptions(device="cuda:99"))
        assert isinstance(error, ConfigError)
        assert "cuda:99" in error.message

    run_bounded(body())


def test_its_tokenizer_neither_truncates_nor_pads(bert: tuple[Path, Any], tmp_path: Path) -> None:
    tokenizer = PassageTokenizer(bert[0])
    assert tokenizer.encode_batch(["The cat", "a " * 30]) == [[2, 4, 5, 3], [2, *[8] * 30, 3]]
    write_encoder(tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    assert PassageTokenizer(tmp_path).encode_batch(["THE"]) == [[2, 4, 3]]
