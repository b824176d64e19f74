"""The engine of encode workers on tiny random models: rows for every request, cancellation, start and stop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("av")

from baton.config.engines import TorchOptions  # noqa: E402
from baton.config.settings import Settings  # noqa: E402
from baton.engine_kit.content_hash import rows_hash  # noqa: E402
from baton.engines.registry import build_engine  # noqa: E402
from baton.engines.torch.vision.model import vision_identity  # noqa: E402
from baton.engines.torch.vision.prepare import prepare  # noqa: E402
from baton.engines.torch.vision_engine import TorchVisionEngine  # noqa: E402
from baton.errors import BatonError, Cancelled, ConfigError, EngineDead, EngineFailed, InvalidRequest, Unsupported  # noqa: E402
from baton.ports.engine import (  # noqa: E402
    EmbedEngine,
    EncodedRows,
    EncodeEngine,
    EncodeWork,
    EngineInfo,
    GenerateEngine,
)
from baton.protocol.commands import ClearCache  # noqa: E402
from baton.protocol.events import LoadSnapshot  # noqa: E402
from baton.protocol.ids import new_request_id  # noqa: E402
from baton.protocol.media import MediaFile  # noqa: E402
from baton.testing import eventually, measure_lag, run_bounded  # noqa: E402
from baton.testing.encode_contract import RowsContract  # noqa: E402
from tests.unit.media.videos import video  # noqa: E402
from tests.vision_models import make_tiny_idefics3, make_tiny_qwen25vl, noise, noise_png  # noqa: E402

TOLERANCE = 1e-4
CPU = TorchOptions(device="cpu", dtype="float32", threads=1)
# Several grids, and several of each.
SIZES = [(84, 84), (150, 90), (90, 150), (84, 84), (400, 300), (150, 90), (84, 84), (30, 30)]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen25vl(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_idefics3(tmp_path_factory.mktemp("split"), split=True)


@asynccontextmanager
async def started(directory: Path, options: TorchOptions = CPU) -> AsyncIterator[tuple[TorchVisionEngine, EngineInfo]]:
    engine = TorchVisionEngine(options, directory, "tiny")
    try:
        yield engine, await engine.start()
    finally:
        await engine.stop()


def image(width: int = 84, height: int = 84, seed: int = 0) -> MediaFile:
    return MediaFile(modality="image", data=noise_png(width, height, seed), place=f"image[{seed}]")


def many() -> list[MediaFile]:
    """600 images: enough to be interrupted."""
    return [image(seed=seed) for seed in range(5)] * 120


def work(*files: MediaFile) -> EncodeWork:
    return EncodeWork(request_id=new_request_id("test"), token_ids=(1,), media=files)


def rows_of(encoded: EncodedRows) -> Any:
    return torch.frombuffer(bytearray(encoded.data), dtype=torch.float32).view(encoded.item.rows, encoded.size)


class Reference:
    """The same model in transformers."""

    def __init__(self, directory: Path) -> None:
        self._model = transformers.AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
        self._processor = transformers.AutoImageProcessor.from_pretrained(directory)

    def rows(self, width: int, height: int, seed: int) -> Any:
        inputs = self._processor(images=[noise(width, height, seed)], return_tensors="pt")
        second = inputs.get("pixel_attention_mask", inputs.get("image_grid_thw"))
        with torch.inference_mode():
            return torch.cat(list(self._model.model.get_image_features(inputs["pixel_values"], second).pooler_output))


class TestTowerEncodes(RowsContract):
    @pytest.fixture(autouse=True)
    def _directory(self, split: Path) -> None:
        self.directory = split

    def make_engine(self) -> EncodeEngine:
        return TorchVisionEngine(CPU, self.directory, "tiny")


# Requests


@pytest.mark.parametrize("name", ["qwen", "split"])
def test_concurrent_requests_get_their_own_rows(name: str, request: pytest.FixtureRequest) -> None:
    directory: Path = request.getfixturevalue(name)
    reference = Reference(directory)

    async def body() -> None:
        async with started(directory) as (engine, info):
            assert info.media is not None
            requests = [
                [(*SIZES[(start + n) % 8], 10 * start + n) for n in range(start % 4 + 1)] for start in range(12)
            ]
            lag = asyncio.create_task(measure_lag())
            answers = await asyncio.gather(*(engine.encode(work(*(image(*one) for one in each))) for each in requests))
            lag.cancel()
            assert await lag < 0.5
            for each, encoded in zip(requests, answers, strict=True):
                for one, rows in zip(each, encoded.items, strict=True):
                    torch.testing.assert_close(rows_of(rows), reference.rows(*one), atol=TOLERANCE, rtol=TOLERANCE)
            progress = engine.progress()
            assert (progress.running, progress.waiting) == (0, 0)

    run_bounded(body(), 60)


def test_images_that_wait_are_encoded_together(qwen: Path) -> None:
    async def body() -> None:
        async with started(qwen) as (engine, _):
            before = engine.progress().steps
            await engine.encode(work(*(image(seed=seed) for seed in range(100))))
            prepared = 100
            assert engine.progress().steps - before - prepared < 50

    run_bounded(body())


def test_the_hash_of_rows_is_that_of_encoder_file_and_modality(qwen: Path) -> None:
    async def body() -> None:
        async with started(qwen) as (engine, info):
            assert info.media is not None
            assert info.media.shape.model == vision_identity(qwen)
            one, same, other = (await engine.encode(work(image(seed=0), image(seed=0), image(seed=1)))).items
            assert one.item == same.item
            assert one.item.content_hash != other.item.content_hash
            assert one.item.content_hash == rows_hash(vision_identity(qwen), noise_png(84, 84, 0), "image")

    run_bounded(body())


def test_one_broken_file_fails_its_request_alone(qwen: Path) -> None:
    async def body() -> None:
        async with started(qwen) as (engine, _):
            broken = MediaFile(modality="image", data=noise_png(84, 84)[:80], place="messages[1]")
            narrow = MediaFile(modality="image", data=noise_png(2100, 10), place="messages[2]")
            good = asyncio.create_task(engine.encode(work(image())))
            for bad, place in ((broken, r"messages\[1\]"), (narrow, r"messages\[2\].*2100 x 10")):
                with pytest.raises(InvalidRequest, match=place):
                    await engine.encode(work(image(), bad, image()))
            assert len((await good).items) == 1
            assert engine.progress().running == 0

    run_bounded(body())


def test_preprocessing_that_fails_is_not_the_clients_fault() -> None:
    class Broken:
        size = 1
        colours: Any = None
        placeholders: dict[str, int] = {}

        def identity(self) -> object:
            return None

        def prepare_image(self, pixels: object, content_hash: str) -> Any:
            raise ValueError("no such filter")

    with pytest.raises(EngineFailed, match=r"image\[0\]: preprocessing failed.*no such filter"):
        prepare(Broken(), "model", image())


@pytest.mark.parametrize("name", ["qwen", "split"])
def test_a_modality_that_the_model_does_not_take_is_refused(name: str, request: pytest.FixtureRequest) -> None:
    async def body() -> None:
        async with started(request.getfixturevalue(name)) as (engine, _):
            expected = {"qwen": {"image", "video"}, "split": {"image"}}[name]
            assert engine.capabilities.encoded_modalities == expected
            with pytest.raises(Unsupported, match="does not take audio"):
                await engine.encode(work(MediaFile(modality="audio", data=b"...")))
            if "video" not in expected:
                with pytest.raises(Unsupported, match="does not take video"):
                    await engine.encode(work(MediaFile(modality="video", data=b"...")))

    run_bounded(body())


def test_a_video_file_becomes_rows_with_times(qwen: Path) -> None:
    """60 frames at 10 a second: two a second are taken, and two of those are one part."""
    data = video(60, 10, size=(84, 56))

    async def body() -> None:
        async with started(qwen) as (engine, info):
            assert info.media is not None
            [encoded] = (await engine.encode(work(MediaFile(modality="video", data=data)))).items
            item = encoded.item
            assert item.grid == ((6, 4, 6),)
            assert item.expansion == ((info.media.placeholders["video"].token, 36),)
            assert item.seconds_per_grid == pytest.approx(1.0)
            assert item.timestamps == pytest.approx([0.5 * number for number in range(12)])
            assert item.content_hash == rows_hash(info.media.shape.model, data, "video")
            parts = rows_of(encoded).view(6, -1)
            assert len({tuple(part.tolist()) for part in parts}) == 6, "the brightness of the frames differs"
            with pytest.raises(InvalidRequest, match="it is not a video"):
                await engine.encode(work(image(), MediaFile(modality="video", data=noise_png(84, 84))))

    run_bounded(body())


def test_a_cancelled_request_is_withdrawn_at_once(split: Path) -> None:
    async def body() -> None:
        async with started(split) as (engine, _):
            large = asyncio.create_task(engine.encode(work(*many())))
            await eventually(lambda: engine.progress().steps > 2)
            assert engine.progress().running == 1
            small = asyncio.create_task(engine.encode(work(image())))
            await asyncio.sleep(0)
            large.cancel()
            with pytest.raises(asyncio.CancelledError):
                await large
            assert len((await small).items) == 1
            progress = engine.progress()
            assert (progress.running, progress.waiting) == (0, 0)
            assert progress.steps < 600

    run_bounded(body())


def test_abort_ends_a_call_with_cancelled(split: Path) -> None:
    async def body() -> None:
        async with started(split) as (engine, _):
            request = work(*many())
            call = asyncio.create_task(engine.encode(request))
            await eventually(lambda: engine.progress().steps > 2)
            with pytest.raises(InvalidRequest, match="in use"):
                await engine.encode(request)
            await engine.abort(request.request_id)
            assert call.done()
            with pytest.raises(Cancelled):
                await call
            assert engine.progress().running == 0

    run_bounded(body())


def test_it_only_encodes(qwen: Path) -> None:
    async def body() -> None:
        async with started(qwen) as (engine, info):
            assert not engine.capabilities.generate
            assert isinstance(engine, EncodeEngine)
            assert not isinstance(engine, GenerateEngine | EmbedEngine)
            assert info.kv is None
            assert (await engine.encode(work())).items == ()
            with pytest.raises(Unsupported):
                await engine.execute(ClearCache())

    run_bounded(body())


# Life


def test_stop_fails_waiting_requests_and_ends_the_readings(split: Path) -> None:
    async def body() -> None:
        engine = TorchVisionEngine(CPU, split, "tiny")
        await engine.start()
        seen: list[object] = []

        async def listen() -> None:
            async for reading in engine.readings():
                seen.append(reading)

        listening = asyncio.create_task(listen())
        calls = [asyncio.create_task(engine.encode(work(*many()))) for _ in range(3)]
        await eventually(lambda: any(isinstance(r, LoadSnapshot) and r.running for r in seen))
        await engine.stop()
        for call in calls:
            with pytest.raises(EngineDead):
                await call
        await listening
        with pytest.raises(EngineDead):
            await engine.encode(work(image()))
        await engine.stop()

    run_bounded(body())


def test_before_start_encode_raises_and_stop_is_no_error(qwen: Path) -> None:
    async def body() -> None:
        engine = TorchVisionEngine(CPU, qwen, "tiny")
        with pytest.raises(EngineDead):
            await engine.encode(work(image()))
        await engine.stop()

    run_bounded(body())


def test_stop_after_a_cancelled_start_is_no_error(qwen: Path) -> None:
    async def body() -> None:
        engine = TorchVisionEngine(CPU, qwen, "tiny")
        start = asyncio.create_task(engine.start())
        await asyncio.sleep(0)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        await engine.stop()

    run_bounded(body())


def test_a_missing_device_raises_config_error(qwen: Path) -> None:
    async def body() -> None:
        engine = TorchVisionEngine(TorchOptions(device="cuda:99"), qwen, "tiny")
        with pytest.raises(BatonError, match="cuda:99") as refusal:
            await engine.start()
        assert isinstance(refusal.value, ConfigError)
        await engine.stop()

    run_bounded(body())


def test_an_encode_worker_has_this_engine(qwen: Path) -> None:
    settings = Settings(engine="torch", role="encode", model=str(qwen), name="tiny")
    assert isinstance(build_engine(settings), TorchVisionEngine)
