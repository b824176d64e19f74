"""Placeholders and embedding rows, read from model directories."""

import json
from pathlib import Path

import pytest

from baton.engines.echo.engine import MODEL_DIR
from baton.errors import ConfigError
from baton.models.placeholders import media_modalities, read_media_info
from tests.doubles.vision_chat_model import IMAGE, VIDEO, make_vision_chat_model


def change(directory: Path, name: str, **changes: object) -> None:
    content = json.loads((directory / name).read_text()) | changes
    kept = {key: value for key, value in content.items() if value is not None}
    (directory / name).write_text(json.dumps(kept))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_vision_chat_model(tmp_path / "model")


def test_a_model_of_text_has_no_media() -> None:
    assert media_modalities(MODEL_DIR) == frozenset()
    assert read_media_info(MODEL_DIR) is None


def test_the_placeholder_is_the_token_that_the_template_renders(model: Path) -> None:
    """Some models render the token that begins an image; the other one stands for a row."""
    change(model, "config.json", image_token_id=256, boi_token_index=IMAGE, video_token_id=None)
    info = read_media_info(model)
    assert info is not None
    assert {modality: each.token for modality, each in info.placeholders.items()} == {"image": IMAGE}


def test_the_token_of_the_tokenizer_is_found_too(model: Path) -> None:
    change(model, "config.json", image_token_id=None)
    change(model, "tokenizer_config.json", extra_special_tokens={"image_token": "<|image|>"})
    info = read_media_info(model)
    assert info is not None
    assert info.placeholders["image"].token == IMAGE
    assert media_modalities(model) == {"image", "video"}


def test_a_placeholder_that_the_template_does_not_render_is_unknown(model: Path) -> None:
    change(model, "config.json", image_token_id=256)
    info = read_media_info(model)
    assert info is not None
    assert set(info.placeholders) == {"video"}


def test_without_a_template_for_images_the_configuration_decides(tmp_path: Path) -> None:
    model = make_vision_chat_model(tmp_path / "model", template="{{ messages[0].content[-1].text }}")
    info = read_media_info(model)
    assert info is not None
    assert (info.placeholders["image"].token, info.placeholders["video"].token) == (IMAGE, VIDEO)


def test_typed_text_of_a_token_that_is_not_special_is_made_of_other_tokens(model: Path) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    for added in tokenizer["added_tokens"]:
        added["special"] = False
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    info = read_media_info(model)
    assert info is not None
    assert bytes(info.placeholders["image"].as_text) == b"<|image|>"


def test_rows_of_models_with_deepstack_are_longer(model: Path) -> None:
    change(
        model,
        "config.json",
        text_config={"hidden_size": 32, "dtype": "bfloat16"},
        vision_config={"deepstack_visual_indexes": [1, 2]},
    )
    info = read_media_info(model)
    assert info is not None
    assert (info.shape.size, info.shape.dtype) == (96, "bfloat16")


def test_a_placeholder_that_is_no_token_is_a_configuration_error(model: Path) -> None:
    change(model, "config.json", image_token_id=9999)
    change(model, "tokenizer_config.json", chat_template=None)
    with pytest.raises(ConfigError, match="9999, which is not a token"):
        read_media_info(model)
