"""Model directories with a vision tower, written without torch: configuration, tokenizer and a few tensors."""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

Tensors = dict[str, NDArray[np.float32]]
IMAGE_TOKEN, VIDEO_TOKEN = 256, 257


def some_tensors(prefix: str = "visual.") -> Tensors:
    """Tensors of a tower, of various sizes, and of a language model."""
    numbers = np.random.default_rng(0)
    tower: Tensors = {f"{prefix}blocks.{n}.weight": numbers.random((8, 4 + 50 * n), np.float32) for n in range(3)}
    return {**tower, "model.layers.0.weight": numbers.random((4, 4), np.float32)}


def write_vision_model(directory: Path, tensors: Tensors | None = None) -> Path:
    """Write a model in the Qwen2.5-VL layout; its tensors do not fit its configuration."""
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "vision_config": {"hidden_size": 64, "num_heads": 4, "out_hidden_size": 48},
        "text_config": {"vocab_size": 258},
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": VIDEO_TOKEN,
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 3136, "max_pixels": 50176}))
    save_file(some_tensors() if tensors is None else tensors, directory / "model.safetensors")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|image_pad|>", "<|video_pad|>")])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def change_json(path: Path, **fields: object) -> None:
    """Change top-level fields of a file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
