"""Vision-language models: which part of their files is the language model, and its 3-D positions. Knows no tensors.

A language worker reads the language model of such a directory and nothing of the vision tower.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

# The families of language models that each layout can have, by their model_type.
LAYOUTS: Mapping[str, Mapping[str, str]] = {
    "Idefics3ForConditionalGeneration": {"llama": "llama", "mistral": "mistral"},
    "SmolVLMForConditionalGeneration": {"llama": "llama", "mistral": "mistral"},
    "Qwen2_5_VLForConditionalGeneration": {"qwen2_5_vl": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen2": "qwen2"},
}

_QWEN = "Qwen2_5_VLForConditionalGeneration"
# Prefixes of tensor names: of the language model, each with what it is in a model of text alone, and of the rest.
_LANGUAGE = {"model.text_model.": "model.", "model.language_model.": "model.", "language_model.model.": "model."}
_VISION = ("model.vision_model.", "model.connector.", "model.visual.", "visual.")


class SpatialPositions(msgspec.Struct, frozen=True, kw_only=True):
    """3-D rotary positions: how many pairs of dimensions of a head turn with time, height and width, in this order.

    A row of the language model covers `merge` x `merge` patches of a frame; a second of video has
    `tokens_per_second` positions.
    """

    sections: tuple[int, int, int]
    merge: int
    tokens_per_second: float


class _Rope(msgspec.Struct, frozen=True):
    mrope_section: tuple[int, int, int] = (16, 24, 24)


class _Vision(msgspec.Struct, frozen=True):
    spatial_merge_size: int = 2
    tokens_per_second: float = 4


class _SpatialFields(msgspec.Struct, frozen=True):
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
    vision_config: _Vision = _Vision()


def has_media(directory: Path) -> bool:
    """Whether the model in `directory` is of a vision-language layout; False for a file that cannot be read."""
    try:
        content = msgspec.json.decode((directory / "config.json").read_bytes(), type=dict[str, object])
    except (OSError, msgspec.MsgspecError):
        return False
    return layout_of(content) is not None


def layout_of(content: Mapping[str, object]) -> str | None:
    """Return the vision-language layout that a config.json has, None if it is not one of them."""
    match content.get("architectures"):
        case [str(architecture), *_] if architecture in LAYOUTS:
            return architecture
        case _:
            return None


def language_fields(content: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of the language model: those of `text_config`, or of an older file that has none."""
    nested = content.get("text_config")
    fields = {**content, **nested} if isinstance(nested, dict) else dict(content)
    fields["tie_word_embeddings"] = bool(content.get("tie_word_embeddings") or fields.get("tie_word_embeddings"))
    fields["quantization_config"] = content.get("quantization_config")
    return fields


def spatial_positions(content: Mapping[str, object], layout: str) -> SpatialPositions | None:
    """Return the 3-D positions of a layout that has them. Raises msgspec.ValidationError."""
    if layout != _QWEN:
        return None
    fields = msgspec.convert(
        {**language_fields(content), "vision_config": content.get("vision_config") or {}}, _SpatialFields
    )
    rope = fields.rope_parameters or fields.rope_scaling or _Rope()
    return SpatialPositions(
        sections=rope.mrope_section,
        merge=fields.vision_config.spatial_merge_size,
        tokens_per_second=fields.vision_config.tokens_per_second,
    )


def language_tensor(name: str) -> str | None:
    """Return the name that a tensor of a vision-language model has in a model of text alone, None for the tower's."""
    if name.startswith(_VISION):
        return None
    for prefix, plain in _LANGUAGE.items():
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name.replace("language_model.lm_head.", "lm_head.")
