"""What is read from config.json before SGLang reads it."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.engines.sglang.model_config import read_config, refuse_without_experts
from baton.errors import ConfigError


def write(directory: Path, config: object) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    "config", [{"num_experts": 8}, {"n_routed_experts": 256}, {"text_config": {"num_local_experts": 16}}]
)
def test_experts_are_found_whatever_their_number_is_called(tmp_path: Path, config: dict[str, Any]) -> None:
    refuse_without_experts(write(tmp_path, config))


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no experts"):
        refuse_without_experts(write(tmp_path, {"hidden_size": 64, "text_config": {"num_hidden_layers": 2}}))


def test_a_config_that_cannot_be_read_is_left_to_sglang(tmp_path: Path) -> None:
    refuse_without_experts(tmp_path)
    assert read_config(write(tmp_path, [1])) == {}
