"""A model directory is looked at before anything starts: what is wrong with it is said in one line."""

import shutil
from pathlib import Path

import pytest

from baton.engines.echo.engine import MODEL_DIR
from baton.errors import ConfigError
from baton.models.directory import resolve_model

NOWHERE = Path("/nonexistent")  # a directory needs no cache


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL_DIR, tmp_path / "model"))


def test_a_whole_directory_is_found(model: Path) -> None:
    assert resolve_model(str(model), NOWHERE) == model.resolve()


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        resolve_model(str(tmp_path / "nowhere"), NOWHERE)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_file_that_is_missing_or_broken_is_named(model: Path, name: str) -> None:
    (model / name).write_text("{")
    with pytest.raises(ConfigError, match=name):
        resolve_model(str(model), NOWHERE)
    (model / name).unlink()
    with pytest.raises(ConfigError, match=name):
        resolve_model(str(model), NOWHERE)
