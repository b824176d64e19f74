"""Model directories are checked before any process starts; an error names the file."""

import shutil
from pathlib import Path

import pytest

from baton.engines.echo.engine import MODEL_DIR
from baton.errors import ConfigError
from baton.models.directory import resolve_model

NOWHERE = Path("/nonexistent")  # unused: a directory needs no cache


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL_DIR, tmp_path / "model"))


def test_complete_directory_is_found(model: Path) -> None:
    assert resolve_model(str(model), NOWHERE) == model.resolve()


def test_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        resolve_model(str(tmp_path / "nowhere"), NOWHERE)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_missing_or_broken_file_is_refused_by_name(model: Path, name: str) -> None:
    (model / name).write_text("{")
    with pytest.raises(ConfigError, match=name):
        resolve_model(str(model), NOWHERE)
    (model / name).unlink()
    with pytest.raises(ConfigError, match=name):
        resolve_model(str(model), NOWHERE)
