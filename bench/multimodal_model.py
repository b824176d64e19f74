"""Models of the multimodal benchmark: smolsee, and the same language model behind a vision tower that costs more."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Idefics3VisionConfig
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionTransformer

IMAGE_SIZE = 384
SCALE = 4
VISION: dict[str, Any] = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "image_size": IMAGE_SIZE,
    "patch_size": 16,
}
ROWS = (IMAGE_SIZE // 16 // SCALE) ** 2
TOWER_PREFIXES = ("model.vision_model.", "model.connector.")


def make_larger_tower(smolsee: Path, directory: Path) -> Path:
    """Write smolsee with a random tower of 12 layers x 384 to `directory`, and return it. It sees nothing."""
    shutil.copytree(smolsee, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    _change(
        directory / "config.json", {"vision_config": {"model_type": "idefics3_vision", **VISION}, "scale_factor": SCALE}
    )
    edges = {name: {"longest_edge": IMAGE_SIZE} for name in ("size", "max_image_size")}
    _change(directory / "preprocessor_config.json", edges)
    _change(directory / "processor_config.json", {"image_seq_len": ROWS})
    weights = load_file(smolsee / "model.safetensors")
    size = weights["model.connector.modality_projection.proj.weight"].shape[0]
    kept = {name: value for name, value in weights.items() if not name.startswith(TOWER_PREFIXES)}
    save_file({**kept, **_random_tower(size)}, directory / "model.safetensors", {"format": "pt"})
    return directory


def _random_tower(size: int) -> dict[str, torch.Tensor]:
    """Return the weights of a tower and a connector to rows of `size`."""
    torch.manual_seed(0)
    tower = Idefics3VisionTransformer(Idefics3VisionConfig(**VISION))
    width = int(VISION["hidden_size"]) * SCALE**2
    weights = {f"model.vision_model.{name}": value for name, value in tower.state_dict().items()}
    weights["model.connector.modality_projection.proj.weight"] = torch.randn(size, width) / width**0.5
    return {name: value.to(torch.bfloat16).contiguous() for name, value in weights.items() if value.is_floating_point()}


def _change(file: Path, values: Mapping[str, object]) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
