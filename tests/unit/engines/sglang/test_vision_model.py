"""What the files of vision-language models say, and where rows of media are in a prompt. No SGLang, and no torch."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.engines.sglang.placed_media import row_ranges
from baton.engines.sglang.vision_model import identify_encoder, read_vision_model
from baton.errors import ConfigError
from baton.protocol.media import EncodedItem

TOKENS = {"image_token_id": 10, "video_token_id": 11, "vision_start_token_id": 12, "vision_end_token_id": 13}
QWEN25 = {
    "model_type": "qwen2_5_vl",
    "hidden_size": 3584,
    "vision_config": {"patch_size": 14, "in_chans": 3, "out_hidden_size": 3584, "tokens_per_second": 2},
    **TOKENS,
}
QWEN2 = {"model_type": "qwen2_vl", "text_config": {"hidden_size": 64}, "vision_config": {"patch_size": 14}, **TOKENS}
QWEN3 = {
    "model_type": "qwen3_vl",
    "text_config": {"hidden_size": 2048},
    "vision_config": {"patch_size": 16, "out_hidden_size": 2048, "deepstack_visual_indexes": [5, 11, 17]},
    **TOKENS,
}


def write(directory: Path, config: object, weights: dict[str, bytes] | None = None) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if weights is not None:
        header: dict[str, Any] = {}
        data = b""
        for name, values in weights.items():
            header[name] = {"dtype": "U8", "shape": [len(values)], "data_offsets": [len(data), len(data) + len(values)]}
            data += values
        encoded = json.dumps(header).encode()
        content = len(encoded).to_bytes(8, "little") + encoded + data
        (directory / "model.safetensors").write_bytes(content)
    return directory


@pytest.mark.parametrize(
    ("config", "row", "pixels"), [(QWEN25, 3584, 4 * 1176), (QWEN2, 64, 4 * 1176), (QWEN3, 4 * 2048, 4 * 1536)]
)
def test_rows_have_the_size_that_the_language_model_takes(
    tmp_path: Path, config: object, row: int, pixels: int
) -> None:
    model = read_vision_model(write(tmp_path, config))
    assert model is not None
    assert (model.row_size, model.pixel_row_size) == (row, pixels)
    assert model.tokens == {"image": 10, "video": 11}


def test_other_models_have_no_media_that_baton_places(tmp_path: Path) -> None:
    assert read_vision_model(write(tmp_path, {"model_type": "llama"})) is None
    with pytest.raises(ConfigError, match="does not describe"):
        read_vision_model(write(tmp_path, {"model_type": "qwen2_vl", "vision_config": {}}))


def test_an_encoder_is_identified_by_its_weights_and_its_preprocessing(tmp_path: Path) -> None:
    weights = {"visual.a": b"abc", "model.b": b"xyz"}
    one = identify_encoder(write(tmp_path / "one", QWEN25, weights))
    assert identify_encoder(write(tmp_path / "two", QWEN25, weights | {"model.b": b"zyx"})) == one
    assert identify_encoder(write(tmp_path / "three", QWEN25, weights | {"visual.a": b"abd"})) != one
    other = write(tmp_path / "four", QWEN25, weights)
    (other / "preprocessor_config.json").write_text('{"max_pixels": 1}')
    assert identify_encoder(other) != one


def test_rows_are_where_the_expansion_has_them() -> None:
    video = EncodedItem(
        modality="video",
        content_hash="",
        expansion=((5, 2), (12, 1), (11, 3), (13, 1), (11, 4)),
        embed_token=11,
        rows=7,
    )
    assert list(row_ranges(video, 100)) == [(103, 105), (107, 110)]
