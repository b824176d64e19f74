"""The identity of an encoder and its placeholders, from the files alone: torch is not imported."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from baton.engines.torch.vision.model import media_info, read_layout, vision_identity
from baton.errors import ConfigError
from tests.unit.engines.torch.vision_files import (
    IMAGE_TOKEN,
    VIDEO_TOKEN,
    change_json,
    some_tensors,
    write_vision_model,
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_vision_model(tmp_path)


def test_it_is_the_same_for_every_sharding_and_prefix(directory: Path) -> None:
    identity = vision_identity(directory)
    assert len(identity) == 32
    tensors = some_tensors("model.visual.")
    save_file(tensors, directory / "model.safetensors")
    assert vision_identity(directory) == identity
    names = {name: f"model-{number}.safetensors" for number, name in enumerate(tensors)}
    for name, file in names.items():
        save_file({name: tensors[name]}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (directory / "model.safetensors").unlink()
    assert vision_identity(directory) == identity


def test_the_language_model_does_not_change_it(directory: Path) -> None:
    identity = vision_identity(directory)
    save_file(some_tensors() | {"lm_head.weight": np.ones((3, 3), np.float32)}, directory / "model.safetensors")
    change_json(directory / "config.json", text_config={"vocab_size": 258, "num_hidden_layers": 99})
    (directory / "generation_config.json").write_text("{}")
    assert vision_identity(directory) == identity


@pytest.mark.parametrize(
    ("file", "fields"),
    [
        ("config.json", {"vision_config": {"hidden_size": 64, "num_heads": 4, "out_hidden_size": 48, "depth": 7}}),
        ("config.json", {"image_token_id": 3}),
        ("preprocessor_config.json", {"max_pixels": 25088}),
        ("preprocessor_config.json", {"image_mean": [0.4, 0.5, 0.6]}),
        ("preprocessor_config.json", {"resample": 2}),
    ],
)
def test_every_setting_that_changes_rows_changes_it(directory: Path, file: str, fields: dict[str, object]) -> None:
    identity = vision_identity(directory)
    change_json(directory / file, **fields)
    assert vision_identity(directory) != identity


def test_another_training_changes_it(directory: Path) -> None:
    seen = {vision_identity(directory)}
    for number in range(3):
        tensors = some_tensors()
        tensors[f"visual.blocks.{number}.weight"] *= np.float32(1.001)
        save_file(tensors, directory / "model.safetensors")
        seen.add(vision_identity(directory))
    assert len(seen) == 4


def test_weights_without_a_tower_have_none(directory: Path) -> None:
    save_file({"model.layers.0.weight": np.ones((3, 3), np.float32)}, directory / "model.safetensors")
    with pytest.raises(ConfigError, match="no weights of a vision tower"):
        vision_identity(directory)


def test_media_info_has_the_shape_of_rows_and_the_placeholders(directory: Path) -> None:
    layout = read_layout(directory)
    info = media_info(directory, layout, "bfloat16")
    assert (info.shape.model, info.shape.dtype, info.shape.size) == (vision_identity(directory), "bfloat16", 48)
    assert {name: (each.token, each.text) for name, each in info.placeholders.items()} == {
        "image": (IMAGE_TOKEN, "<|image_pad|>"),
        "video": (VIDEO_TOKEN, "<|video_pad|>"),
    }


def test_a_typed_placeholder_has_ordinary_tokens_of_the_same_text(directory: Path) -> None:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    for placeholder in media_info(directory, read_layout(directory), "float32").placeholders.values():
        letters = "".join(tokenizer.id_to_token(token) or "" for token in placeholder.as_text)
        assert letters == placeholder.text
        assert not {IMAGE_TOKEN, VIDEO_TOKEN} & set(placeholder.as_text)


def test_a_tokenizer_without_the_placeholder_is_refused(directory: Path) -> None:
    change_json(directory / "config.json", image_token_id=999)
    with pytest.raises(ConfigError, match="no token 999"):
        media_info(directory, read_layout(directory), "float32")


def test_a_model_of_text_is_no_vision_model(directory: Path) -> None:
    change_json(directory / "config.json", architectures=["LlamaForCausalLM"])
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no vision tower"):
        read_layout(directory)
