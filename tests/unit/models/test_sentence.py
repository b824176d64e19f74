"""The files of a sentence model are applied; unsupported values are refused by name."""

import json
from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.models.sentence import Pooling, is_lowercase, is_sentence_model, read_layout, shorter_sizes
from tests.unit.handlers.embed_fakes import write_layout


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_config(tmp_path)
    write_layout(tmp_path, "mean_tokens")
    return tmp_path


def write_config(directory: Path, **changes: object) -> None:
    config = {"model_type": "bert", "vocab_size": 100, "max_position_embeddings": 64, **changes}
    (directory / "config.json").write_text(json.dumps(config))


def test_layout_files_are_read(directory: Path) -> None:
    layout = read_layout(directory)
    assert (layout.poolings, layout.normalize) == ((Pooling.MEAN,), True)
    assert (layout.vocabulary, layout.max_tokens, is_lowercase(directory)) == (100, 24, False)
    write_layout(directory, "lasttoken", "cls_token", normalize=False, max_tokens=1000)
    layout = read_layout(directory)
    assert (layout.poolings, layout.normalize, layout.max_tokens) == ((Pooling.CLS, Pooling.LAST), False, 64)


def test_encoder_without_a_layout_is_pooled_by_mean(tmp_path: Path) -> None:
    write_config(tmp_path)
    layout = read_layout(tmp_path)
    assert (layout.poolings, layout.normalize, layout.max_tokens) == ((Pooling.MEAN,), False, 64)


def test_reserved_positions_of_roberta_are_not_counted(tmp_path: Path) -> None:
    write_config(tmp_path, model_type="roberta", max_position_embeddings=514)
    assert read_layout(tmp_path).max_tokens == 512


def test_short_pooling_mode_is_read(directory: Path) -> None:
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "cls"}))
    assert read_layout(directory).poolings == (Pooling.CLS,)


def test_lower_case_is_read_for_every_architecture(directory: Path) -> None:
    write_config(directory, model_type="qwen3")
    assert not is_lowercase(directory)
    (directory / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    assert is_lowercase(directory)


def test_trained_sizes_are_read(directory: Path) -> None:
    assert read_layout(directory).matryoshka_dimensions == ()
    write_config(directory, is_matryoshka=True, matryoshka_dimensions=[32, 8])
    layout = read_layout(directory)
    assert (layout.is_matryoshka, layout.matryoshka_dimensions) == (True, (32, 8))


def test_vectors_are_shortened_only_to_sizes_that_were_trained() -> None:
    assert shorter_sizes((), False, 8) == ()
    assert shorter_sizes((), True, 4) == (1, 2, 3)
    assert shorter_sizes((8, 2, 4, 16, 0), True, 8) == (2, 4)


def test_sentence_models_are_recognized(directory: Path) -> None:
    assert is_sentence_model(directory)
    (directory / "modules.json").unlink()
    assert is_sentence_model(directory)
    write_config(directory, model_type="llama")
    assert not is_sentence_model(directory)
    write_layout(directory, "lasttoken")
    assert is_sentence_model(directory)


def test_unsupported_architecture_is_refused_by_name(directory: Path) -> None:
    write_config(directory, model_type="qwen3")
    with pytest.raises(ConfigError, match="qwen3"):
        read_layout(directory)


def test_unsupported_module_is_refused_by_name(directory: Path) -> None:
    modules = [{"idx": 0, "name": "0", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}]
    (directory / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConfigError, match="Dense"):
        read_layout(directory)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"pooling_mode_magic": True}, "magic"),
        ({"pooling_mode": "magic"}, "magic"),
        ({"pooling_mode_cls_token": False}, "no pooling mode"),
        ({}, "no pooling mode"),
        ([], "1_Pooling"),
    ],
    ids=str,
)
def test_unsupported_pooling_is_refused_by_name(directory: Path, config: object, message: str) -> None:
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        read_layout(directory)


@pytest.mark.parametrize("name", ["modules.json", "sentence_bert_config.json", "1_Pooling/config.json", "config.json"])
def test_broken_file_is_refused_by_name(directory: Path, name: str) -> None:
    (directory / name).write_text("{")
    with pytest.raises(ConfigError, match=name):
        read_layout(directory)


def test_missing_pooling_file_is_refused_by_name(directory: Path) -> None:
    (directory / "1_Pooling" / "config.json").unlink()
    with pytest.raises(ConfigError, match="1_Pooling"):
        read_layout(directory)
