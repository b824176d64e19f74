"""A script replaces the echo of the prompts that it names."""

import json
from pathlib import Path

import pytest

from baton.engines.echo.engine import MODEL_DIR
from baton.engines.echo.script import read_script
from baton.errors import ConfigError


def tokens(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


def test_the_first_text_in_the_prompt_decides(tmp_path: Path) -> None:
    file = tmp_path / "script.yaml"
    file.write_text(json.dumps({"sun": "day", "moon": "night"}))
    script = read_script(file, MODEL_DIR)
    assert script.answer(tokens("the moon and the sun")) == tokens("day")
    assert script.answer(tokens("the moon")) == tokens("night")
    assert script.answer(tokens("the sea")) is None


@pytest.mark.parametrize("content", ["[a, b]", "a: ''", "a: 1", "'': a", "{"])
def test_a_file_that_maps_no_texts_to_answers_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "script.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"script\.yaml"):
        read_script(file, MODEL_DIR)
