"""Models of known shapes with random weights, written as files: what they answer does not matter, their speed does."""

import json
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from baton.engines.torch.models.config import read_llama_config
from baton.engines.torch.models.llama import carve_weights, named_parts

LLAMA_8B = "Llama-8B shape"
QWEN3_06B = "Qwen3-0.6B shape"
_COMMON: dict[str, object] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 40960,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
    "head_dim": 128,
    "num_key_value_heads": 8,
}
CONFIGS: dict[str, dict[str, object]] = {
    LLAMA_8B: _COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    QWEN3_06B: _COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
}
_PATTERN = 1 << 24
_SPREAD = 0.02


def write_model(shape: str, directory: Path) -> Path:
    """Write a model of the shape to `directory`; return it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIGS[shape]))
    config = read_llama_config(directory)
    parts = named_parts(config, carve_weights(config, lambda size: torch.empty(size, device="meta")))
    header: dict[str, object] = {}
    start = 0
    for name, part in parts.items():
        header[name] = {"dtype": "BF16", "shape": list(part.shape), "data_offsets": [start, start + part.numel() * 2]}
        start += part.numel() * 2
    encoded = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        _write_random(file, parts)
    return directory


def _write_random(file: BinaryIO, parts: dict[str, Tensor]) -> None:
    """Write random numbers for every tensor, norms around 1; one pattern is repeated from different places."""
    numbers = torch.Generator().manual_seed(0)
    pattern = (torch.randn(_PATTERN, generator=numbers) * _SPREAD).to(torch.bfloat16)
    data = memoryview(pattern.view(torch.uint8).numpy().data)
    for number, (name, part) in enumerate(parts.items()):
        left = part.numel()
        if name.endswith("norm.weight"):
            file.write(torch.ones(left, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes())
            continue
        first = number * 7919 % (_PATTERN // 2)
        while left:
            count = min(left, _PATTERN - first)
            file.write(data[2 * first : 2 * (first + count)])
            left, first = left - count, 0
