"""Diffusion language models: what SGLang takes for granted about them, compared with the model's files.

SGLang has the mask token and the block length of each architecture as constants, and reads neither from config.json. A
model that was trained with others would answer with noise, or end the engine. Imports no SGLang.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from baton.engines.sglang.model_config import read_config
from baton.errors import ConfigError

MAX_RUNNING = 8  # SGLang's own default is one request at a time


class _Constants(NamedTuple):
    mask_token: int
    block_length: int


_ARCHITECTURES = {
    "SDARForCausalLM": _Constants(151669, 4),
    "SDARMoeForCausalLM": _Constants(151669, 4),
    "LLaDA2MoeModelLM": _Constants(156895, 32),
}


def check_diffusion(values: Mapping[str, Any], model_dir: Path) -> None:
    """Raise ConfigError for a diffusion model that SGLang would run in another way than it was trained.

    `values` are SGLang's parsed arguments. An engine that embeds does not decode, so there is nothing to check.
    """
    config = read_config(model_dir)
    architecture = next(iter(config.get("architectures") or ()), None)
    constants = _ARCHITECTURES.get(str(architecture))
    if constants is None or values.get("is_embedding"):
        return
    if values.get("disaggregation_mode", "null") != "null":
        raise ConfigError(f"{architecture} is a diffusion model, which has no prefill and decode roles")
    if not values.get("dllm_algorithm"):
        raise ConfigError(
            f"{architecture} is a diffusion model: add `-- --dllm-algorithm LowConfidence`, or use --engine torch"
        )
    _check_output_layer(config, values, str(architecture))
    _check_mask(config, constants, str(architecture))
    _check_block_length(config, constants, values.get("dllm_algorithm_config"))


def _check_output_layer(config: Mapping[str, Any], values: Mapping[str, Any], architecture: str) -> None:
    shared = architecture == "SDARForCausalLM" and config.get("tie_word_embeddings")
    if shared and int(values.get("tp_size") or 1) == 1:
        raise ConfigError(
            f"SGLang cannot load a {architecture} whose output layer shares the embeddings (tie_word_embeddings) on one"
            " rank; use --engine torch"
        )


def _check_mask(config: Mapping[str, Any], constants: _Constants, architecture: str) -> None:
    size, mask = int(config.get("vocab_size") or 0), config.get("mask_token_id")
    if size <= constants.mask_token:
        raise ConfigError(
            f"SGLang's mask token for {architecture} is {constants.mask_token}, and this model has {size} tokens; use"
            " --engine torch"
        )
    if mask not in (None, constants.mask_token):
        raise ConfigError(
            f"SGLang's mask token for {architecture} is {constants.mask_token}, and this model's is {mask}; use"
            " --engine torch"
        )


def _check_block_length(config: Mapping[str, Any], constants: _Constants, file: str | None) -> None:
    trained = config.get("block_size") or config.get("block_length")
    if trained in (None, constants.block_length) or "block_size" in _algorithm_config(file):
        return
    raise ConfigError(
        f"this model has blocks of {trained} tokens, and SGLang takes {constants.block_length} for granted: add"
        f" `block_size: {trained}` to a YAML file and name it with --dllm-algorithm-config"
    )


def _algorithm_config(file: str | None) -> Mapping[str, Any]:
    if file is None:
        return {}
    try:
        content = yaml.safe_load(Path(file).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--dllm-algorithm-config: cannot read {file}: {error}") from None
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"--dllm-algorithm-config: {file} must contain a mapping")
    return content or {}
