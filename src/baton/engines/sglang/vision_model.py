"""What the files of a vision-language model say of its media: tokens, sizes and identity. Imports no SGLang."""

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from baton.engine_kit.safetensors_file import SafetensorsFile
from baton.errors import ConfigError
from baton.ports.engine import Placeholder

# Models whose media SGLang describes by grids, and encodes on its own with --encoder-only.
MODEL_TYPES = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"})
# Of those, the ones that write the time of each frame of a video into the prompt.
WITH_TIMESTAMPS = MODEL_TYPES - {"qwen2_vl", "qwen2_5_vl"}
MODALITIES = frozenset({"image", "video"})
_PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
_SAMPLE_BYTES = 256


class VisionModel(msgspec.Struct, frozen=True, kw_only=True):
    """A vision-language model. A row of its language model has `row_size` numbers and comes from `merge` squared
    patches of `patch_numbers` numbers each; a patch covers `temporal_patch` frames."""

    model_type: str
    tokens: dict[str, int]
    start_token: int
    end_token: int
    merge: int
    temporal_patch: int
    patch_numbers: int
    row_size: int
    tokens_per_second: float | None = None

    @property
    def patches_per_row(self) -> int:
        """How many patches become one row."""
        return self.merge**2

    @property
    def pixel_row_size(self) -> int:
        """How many numbers the patches of one row have."""
        return self.patches_per_row * self.patch_numbers


def read_vision_model(model_dir: Path) -> VisionModel | None:
    """Return the vision-language model in `model_dir`; None for models without vision, and for other kinds of it."""
    try:
        config: dict[str, Any] = json.loads((model_dir / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {model_dir / 'config.json'}: {error}") from None
    if config.get("model_type") not in MODEL_TYPES:
        return None
    try:
        return _vision_model(config, config["vision_config"])
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{model_dir / 'config.json'} does not describe a vision-language model: {error!r}") from None


def _vision_model(config: dict[str, Any], vision: dict[str, Any]) -> VisionModel:
    text = config.get("text_config") or config
    temporal, patch = int(vision.get("temporal_patch_size", 2)), int(vision["patch_size"])
    width = int(vision.get("out_hidden_size") or text["hidden_size"])
    return VisionModel(
        model_type=config["model_type"],
        tokens={modality: int(config[f"{modality}_token_id"]) for modality in sorted(MODALITIES)},
        start_token=int(config["vision_start_token_id"]),
        end_token=int(config["vision_end_token_id"]),
        merge=int(vision.get("spatial_merge_size", 2)),
        temporal_patch=temporal,
        patch_numbers=int(vision.get("in_channels") or vision.get("in_chans") or 3) * temporal * patch**2,
        # Features of inner layers of the tower follow the numbers of the last one.
        row_size=width * (1 + len(vision.get("deepstack_visual_indexes") or ())),
        tokens_per_second=vision.get("tokens_per_second"),
    )


def identify_encoder(model_dir: Path) -> str:
    """Return the identity of the encoder in `model_dir`: its sizes, its preprocessing, and some bytes of its weights.

    Another training of the same model has another identity; another directory or sharding has not.
    """
    digest = hashlib.blake2b(digest_size=12)
    config = json.loads((model_dir / "config.json").read_bytes())
    digest.update(json.dumps(config.get("vision_config"), sort_keys=True).encode())
    for name in _PROCESSOR_FILES:
        if (model_dir / name).is_file():
            digest.update(json.dumps(json.loads((model_dir / name).read_bytes()), sort_keys=True).encode())
    samples: dict[str, bytes] = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        with SafetensorsFile(path) as file:
            samples |= {name: _first_bytes(file, name) for name in file.tensors if "visual." in name}
    for name in sorted(samples):
        digest.update(name.encode() + samples[name])
    return f"{config['model_type']}-{digest.hexdigest()}"


def _first_bytes(file: SafetensorsFile, name: str) -> bytes:
    sample = bytearray(min(_SAMPLE_BYTES, file.tensors[name].nbytes))
    file.read_part(name, 0, sample)
    return bytes(sample)


def placeholders_of(model_dir: Path, model: VisionModel) -> dict[str, Placeholder]:
    """Return what a rendered prompt has in the place of an item, by modality."""
    tokenizer = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    tokenizer.encode_special_tokens = True  # then special tokens in a text become ordinary ones
    found: dict[str, Placeholder] = {}
    for modality, token in model.tokens.items():
        text = tokenizer.id_to_token(token)
        if text is None:
            raise ConfigError(f"the tokenizer in {model_dir} has no token {token}, the placeholder of a {modality}")
        plain = tokenizer.encode(text, add_special_tokens=False).ids
        found[modality] = Placeholder(token=token, text=text, as_text=tuple(plain))
    return found
