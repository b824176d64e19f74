"""Vision towers and their preprocessing on tiny random models: equal to transformers, and loaded alone."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from baton.config.engines import TorchOptions  # noqa: E402
from baton.engines.torch.vision.idefics3 import Idefics3Layout  # noqa: E402
from baton.engines.torch.vision.model import read_layout  # noqa: E402
from baton.engines.torch.vision.pixels import PreparedMedia  # noqa: E402
from baton.engines.torch.vision.qwen import QwenLayout  # noqa: E402
from baton.engines.torch.vision.runner import TowerRunner, normalise  # noqa: E402
from baton.errors import ConfigError, InvalidRequest  # noqa: E402
from baton.protocol.media import EncodedItem  # noqa: E402
from tests.vision_models import make_tiny_idefics3, make_tiny_qwen25vl, noise, noise_frames  # noqa: E402

TOLERANCE = 1e-4
SIZES = [(64, 64), (150, 90), (37, 211), (500, 333), (1, 1), (300, 300), (113, 113)]
FP32 = TorchOptions(device="cpu", dtype="float32", threads=1)


class Model(NamedTuple):
    """A tiny model: in transformers, and in the engine."""

    directory: Path
    reference: Any
    processor: Any
    layout: Any
    runner: TowerRunner

    def rows(self, prepared: PreparedMedia) -> Any:
        return rows_of(self.runner, self.layout, [prepared])[0]


def open_model(directory: Path, options: TorchOptions = FP32) -> Model:
    reference = transformers.AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    layout = read_layout(directory)
    runner = TowerRunner(options, directory, layout, lambda done, total: None)
    processor = transformers.AutoImageProcessor.from_pretrained(directory)
    return Model(directory, reference.eval(), processor, layout, runner)


def rows_of(runner: TowerRunner, layout: Any, media: Sequence[PreparedMedia], dtype: Any = None) -> list[Any]:
    """Encode media of one grid in one batch."""
    parts = [part for one in media for part in one.patches]
    data = torch.from_numpy(runner.encode(parts, media[0].grid)).view(dtype or torch.float32)
    return list(data.view(-1, layout.size).split([one.item.rows for one in media]))


def expected_rows(model: Model, *images: Image.Image) -> list[Any]:
    """The rows of each image, by transformers."""
    nested = [[image] for image in images] if isinstance(model.layout, Idefics3Layout) else list(images)
    inputs = model.processor(images=nested, return_tensors="pt")
    second = inputs["pixel_attention_mask" if isinstance(model.layout, Idefics3Layout) else "image_grid_thw"]
    with torch.inference_mode():
        return list(model.reference.model.get_image_features(inputs["pixel_values"], second).pooler_output)


def prepare(model: Model, image: Image.Image) -> PreparedMedia:
    prepared: PreparedMedia = model.layout.prepare_image(np.asarray(image), "hash")
    return prepared


@pytest.fixture(scope="module")
def idefics3(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return open_model(make_tiny_idefics3(tmp_path_factory.mktemp("idefics3")))


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return open_model(make_tiny_idefics3(tmp_path_factory.mktemp("split"), split=True))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return open_model(make_tiny_qwen25vl(tmp_path_factory.mktemp("qwen")))


@pytest.fixture(params=["idefics3", "split", "qwen"])
def model(request: pytest.FixtureRequest) -> Model:
    opened: Model = request.getfixturevalue(request.param)
    return opened


def assert_close(rows: Any, expected: Any) -> None:
    assert rows.shape == expected.shape
    torch.testing.assert_close(rows, expected, atol=TOLERANCE, rtol=TOLERANCE)


# Rows


@pytest.mark.parametrize("size", SIZES)
def test_rows_of_an_image_equal_those_of_transformers(model: Model, size: tuple[int, int]) -> None:
    image = noise(*size, seed=sum(size))
    [expected] = expected_rows(model, image)
    prepared = prepare(model, image)
    assert prepared.item.rows == len(expected)
    assert_close(model.rows(prepared), expected)


def test_images_in_a_batch_get_their_own_rows(model: Model) -> None:
    images = [noise(150, 90, seed) for seed in range(3)]
    together = rows_of(model.runner, model.layout, [prepare(model, image) for image in images])
    for rows, expected in zip(together, expected_rows(model, *images), strict=True):
        assert_close(rows, expected)
    assert not torch.allclose(together[0], together[1], atol=0.1)


def test_positions_are_fractions_of_the_frame(tmp_path: Path) -> None:
    """A tower that was trained for larger frames than the processor makes."""
    model = open_model(make_tiny_idefics3(tmp_path, image_size=96))
    image = noise(100, 80)
    assert_close(model.rows(prepare(model, image)), expected_rows(model, image)[0])


@pytest.mark.parametrize(("frames", "size"), [(2, (84, 56)), (5, (84, 56)), (8, (140, 112))])
def test_rows_of_a_video_equal_those_of_transformers(qwen: Model, frames: int, size: tuple[int, int]) -> None:
    prepared = qwen.layout.prepare_video(noise_frames(frames, *size), [0.5 * n for n in range(frames)], 2.0, "hash")
    grid = torch.tensor(prepared.item.grid)
    pixels = torch.from_numpy(normalise(prepared.patches, qwen.layout.colours.table())).flatten(0, 1)
    with torch.inference_mode():
        [expected] = qwen.reference.model.get_video_features(pixels, grid).pooler_output
    assert grid.tolist() == [[(frames + 1) // 2, size[1] // 14, size[0] // 14]]
    assert_close(qwen.rows(prepared), expected)


@pytest.mark.parametrize("make", [make_tiny_idefics3, make_tiny_qwen25vl])
def test_bfloat16_rows_are_close(make: Any, tmp_path: Path) -> None:
    model = open_model(make(tmp_path))
    options = TorchOptions(device="cpu", dtype="bfloat16", threads=1)
    runner = TowerRunner(options, tmp_path, model.layout, lambda done, total: None)
    image = noise(100, 80)
    [rows] = rows_of(runner, model.layout, [prepare(model, image)], torch.bfloat16)
    [expected] = expected_rows(model, image)
    torch.testing.assert_close(rows.float(), expected, atol=0.02, rtol=0.02)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.3)])
def test_rows_on_a_gpu(model: Model, dtype: str, tolerance: float) -> None:
    options = TorchOptions(device="cuda", dtype=dtype)  # type: ignore[arg-type]
    runner = TowerRunner(options, model.directory, model.layout, lambda done, total: None)
    image = noise(150, 90)
    [rows] = rows_of(runner, model.layout, [prepare(model, image)], getattr(torch, dtype))
    [expected] = expected_rows(model, image)
    torch.testing.assert_close(rows.float(), expected, atol=tolerance, rtol=tolerance)


# Preprocessing


@pytest.mark.parametrize("size", SIZES)
def test_pixels_equal_those_of_transformers_to_the_bit(model: Model, size: tuple[int, int]) -> None:
    image = noise(*size)
    prepared = prepare(model, image)
    pixels = normalise(prepared.patches, model.layout.colours.table())
    expected = model.processor(images=[image], return_tensors="np")["pixel_values"]
    if isinstance(model.layout, QwenLayout):
        assert np.array_equal(pixels[0], expected)
        return
    side, patch = prepared.grid[0], 8
    frames = pixels.reshape(-1, side, side, 3, patch, patch).transpose(0, 3, 1, 4, 2, 5)
    assert np.array_equal(frames.reshape(-1, 3, side * patch, side * patch), expected[0])


def test_frames_of_a_video_are_processed_as_images(qwen: Model) -> None:
    """Of a temporal patch, one frame each is compared with an image of that frame alone."""
    frames = noise_frames(3, 150, 90)
    prepared = qwen.layout.prepare_video(frames, [0.0, 0.5, 1.0], 2.0, "hash")
    images = qwen.processor(images=[Image.fromarray(frame) for frame in frames], return_tensors="np")["pixel_values"]
    alone = images.reshape(3, -1, 3, 2, 14 * 14)
    pixels = normalise(prepared.patches, qwen.layout.colours.table()).reshape(2, -1, 3, 2, 14 * 14)
    for part, place, frame in ((0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 2)):
        assert np.array_equal(pixels[part, :, :, place], alone[frame, :, :, place])


def test_a_video_has_its_times(qwen: Model) -> None:
    prepared = qwen.layout.prepare_video(noise_frames(4, 84, 56), [0.0, 0.4, 0.8, 1.2], 2.5, "hash")
    token = qwen.layout.config.video_token_id
    assert prepared.item == EncodedItem(
        modality="video",
        content_hash="hash",
        expansion=((token, 12),),
        embed_token=token,
        rows=12,
        grid=((2, 4, 6),),
        seconds_per_grid=0.8,
        timestamps=(0.0, 0.4, 0.8, 1.2),
    )


@pytest.mark.parametrize(("frames", "fps", "count"), [(300, 30.0, 20), (7, 30.0, 4), (3, 1.0, 2), (1, 1.0, 1)])
def test_frames_are_sampled_at_two_a_second(qwen: Model, frames: int, fps: float, count: int) -> None:
    indices = qwen.layout.sample_frames(frames, fps)
    assert len(set(indices)) == count
    assert indices == sorted(indices)
    assert 0 <= indices[0] <= indices[-1] < frames


@pytest.mark.parametrize("name", ["idefics3", "split"])
@pytest.mark.parametrize("size", SIZES)
def test_an_image_in_a_prompt_is_what_the_processor_writes(
    name: str, size: tuple[int, int], request: pytest.FixtureRequest
) -> None:
    model: Model = request.getfixturevalue(name)
    processor = transformers.AutoProcessor.from_pretrained(model.directory)
    image = noise(*size)
    expected = processor(text="<image>", images=[image])["input_ids"][0]
    item = prepare(model, image).item
    assert [token for token, count in item.expansion for _ in range(count)] == list(expected)
    assert item.embed_token == model.reference.config.image_token_id
    assert item.grid == ()


def test_a_qwen_image_in_a_prompt_is_one_token_for_each_row(qwen: Model) -> None:
    item = prepare(qwen, noise(150, 90)).item
    assert (item.expansion, item.embed_token) == (((qwen.reference.config.image_token_id, 15),), item.expansion[0][0])
    assert item.grid == ((1, 6, 10),)


def test_an_image_that_is_too_narrow_is_refused(qwen: Model) -> None:
    with pytest.raises(InvalidRequest, match="more than 200 times"):
        prepare(qwen, noise(2010, 10))


def test_a_video_that_fits_into_no_prompt_is_refused_before_its_frames_are_resized(qwen: Model) -> None:
    frames = np.broadcast_to(np.zeros((1, 1, 1, 3), np.uint8), (20_000, 84, 56, 3))
    with pytest.raises(InvalidRequest, match="takes 60000 tokens of the prompt, more than the context of 4096"):
        qwen.layout.prepare_video(frames, [0.0] * 20_000, 2.0, "hash")


@pytest.mark.parametrize("change", [{"do_normalize": False}, {"do_rescale": False}, {"image_std": [0.2, 0.3, 0.4]}])
def test_colours_follow_the_configuration(change: dict[str, object], tmp_path: Path) -> None:
    model = open_model(_changed(make_tiny_qwen25vl(tmp_path), "preprocessor_config.json", change))
    image = noise(84, 84)
    pixels = normalise(prepare(model, image).patches, model.layout.colours.table())[0]
    assert np.array_equal(pixels, model.processor(images=[image], return_tensors="np")["pixel_values"])


def test_the_newer_file_of_all_processors_is_read_first(tmp_path: Path) -> None:
    make_tiny_qwen25vl(tmp_path)
    images = {"image_processor_type": "Qwen2VLImageProcessor", "size": {"shortest_edge": 3136, "longest_edge": 9408}}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": images}))
    model = open_model(tmp_path)
    image = noise(300, 200)
    assert prepare(model, image).item.rows == len(expected_rows(model, image)[0]) == 8


# Files


def _changed(directory: Path, file: str, change: dict[str, object]) -> Path:
    path = directory / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    return directory


@pytest.mark.parametrize("make", [make_tiny_idefics3, make_tiny_qwen25vl])
def test_weights_of_the_language_model_are_neither_read_nor_held(make: Any, tmp_path: Path) -> None:
    """The language model is said to be far larger than any memory, in a file with a hole."""
    model = open_model(make(tmp_path))
    image = noise(100, 80)
    expected = model.rows(prepare(model, image))
    tensors = load_file(tmp_path / "model.safetensors")
    tower = {name: tensor for name, tensor in tensors.items() if "vis" in name or "connector" in name}
    assert 0 < len(tower) < len(tensors)
    save_file(tower, tmp_path / "model-1.safetensors")
    huge = 1 << 40
    header = json.dumps({"lm_head.weight": {"dtype": "BF16", "shape": [1 << 20, 1 << 19], "data_offsets": [0, huge]}})
    with (tmp_path / "model-2.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(file.tell() + huge)
    weight_map = dict.fromkeys(tower, "model-1.safetensors") | {"lm_head.weight": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    runner = TowerRunner(FP32, tmp_path, model.layout, lambda done, total: None)
    assert sum(part.nbytes for part in runner.tower.parts.values()) == sum(part.nbytes for part in tower.values())
    assert torch.equal(rows_of(runner, model.layout, [prepare(model, image)])[0], expected)


@pytest.mark.parametrize("make", [make_tiny_idefics3, make_tiny_qwen25vl])
def test_broken_weights_raise_config_error_with_their_directory(make: Any, tmp_path: Path) -> None:
    make(tmp_path)
    layout = read_layout(tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    name = sorted(name for name in tensors if "vis" in name)[3]
    for broken in (
        {key: tensor for key, tensor in tensors.items() if key != name},
        {**tensors, name: torch.zeros(3, 3)},
        {**tensors, name: torch.full_like(tensors[name], torch.nan)},
        {key: tensor for key, tensor in tensors.items() if "vis" not in key},
    ):
        save_file(broken, weights)
        with pytest.raises(ConfigError, match=str(tmp_path)):
            TowerRunner(FP32, tmp_path, layout, lambda done, total: None)


@pytest.mark.parametrize(
    ("make", "file", "change", "message"),
    [
        (make_tiny_idefics3, "config.json", {"architectures": ["LlavaForConditionalGeneration"]}, "Llava"),
        (make_tiny_idefics3, "processor_config.json", {"image_seq_len": 64}, "image_seq_len is 64"),
        (make_tiny_idefics3, "preprocessor_config.json", {"max_image_size": {"longest_edge": 60}}, "do not fit"),
        (make_tiny_idefics3, "preprocessor_config.json", {"size": {"height": 50}}, "longest_edge"),
        (make_tiny_qwen25vl, "preprocessor_config.json", {"patch_size": 16}, "the tower has"),
        (make_tiny_qwen25vl, "preprocessor_config.json", {"do_resize": False}, "do_resize"),
        (make_tiny_qwen25vl, "config.json", {"vision_config": {"depth": "many"}}, "depth"),
    ],
)
def test_unsupported_configurations_are_named(
    make: Any, file: str, change: dict[str, object], message: str, tmp_path: Path
) -> None:
    _changed(make(tmp_path), file, change)
    with pytest.raises(ConfigError, match=message):
        read_layout(tmp_path)
