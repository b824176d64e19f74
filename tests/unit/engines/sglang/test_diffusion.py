"""Diffusion models whose files contradict what SGLang takes for granted are refused before it starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.engines.sglang.diffusion import check_diffusion
from baton.errors import ConfigError

SDAR = {"architectures": ["SDARForCausalLM"], "vocab_size": 151936, "mask_token_id": 151669, "block_size": 4}
DLLM = {"dllm_algorithm": "LowConfidence"}


def model(directory: Path, **changes: object) -> Path:
    (directory / "config.json").write_text(json.dumps(SDAR | changes))
    return directory


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({}, DLLM),
        ({"mask_token_id": None, "block_size": None}, DLLM),
        ({"architectures": ["LlamaForCausalLM"], "vocab_size": 300}, {}),
        ({}, {"is_embedding": True}),
        ({"tie_word_embeddings": True}, {**DLLM, "tp_size": 2}),
        (
            {"architectures": ["LLaDA2MoeModelLM"], "vocab_size": 157184, "mask_token_id": 156895, "block_size": 32},
            DLLM,
        ),
    ],
)
def test_a_model_that_fits_is_accepted(tmp_path: Path, changes: dict[str, Any], values: dict[str, Any]) -> None:
    check_diffusion(values, model(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "values", "says"),
    [
        ({}, {}, "SDARForCausalLM is a diffusion model: add `-- --dllm-algorithm LowConfidence`"),
        ({}, {**DLLM, "disaggregation_mode": "decode"}, "no prefill and decode roles"),
        ({"tie_word_embeddings": True}, DLLM, "whose output layer shares the embeddings"),
        ({"vocab_size": 300}, DLLM, "mask token for SDARForCausalLM is 151669, and this model has 300 tokens"),
        ({"mask_token_id": 151700}, DLLM, "mask token for SDARForCausalLM is 151669, and this model's is 151700"),
        ({"block_size": 8}, DLLM, "blocks of 8 tokens, and SGLang takes 4 for granted: add `block_size: 8`"),
        ({"block_size": None, "block_length": 16}, DLLM, "add `block_size: 16`"),
        ({"block_size": 8}, {**DLLM, "dllm_algorithm_config": "/nowhere.yaml"}, "cannot read /nowhere.yaml"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, Any], values: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        check_diffusion(values, model(tmp_path, **changes))


def test_a_block_length_of_the_algorithms_file_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "algorithm.yaml"
    values = {**DLLM, "dllm_algorithm_config": str(file)}
    file.write_text("block_size: 8")
    check_diffusion(values, model(tmp_path, block_size=8))
    for content, says in (
        ("threshold: 0.9", "block_size: 8"),
        ("- 1", "must contain a mapping"),
        ("a: [", "cannot read"),
    ):
        file.write_text(content)
        with pytest.raises(ConfigError, match=says):
            check_diffusion(values, model(tmp_path, block_size=8))


def test_a_directory_without_a_config_is_left_to_sglang(tmp_path: Path) -> None:
    check_diffusion({}, tmp_path)
