"""Diffusion language models: which models are, their blocks and mask token, and the names of LLaDA. Knows no tensors.

A model's defaults for decoding are in its config.json, or in its generation_config.json, which comes first.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from baton.errors import ConfigError
from baton.protocol.requests import Positive, Remasking, Share

LLADA = "LLaDAModelLM"
# The block length of models whose files do not give one.
BLOCK_LENGTHS: Mapping[str, int] = {"SDARForCausalLM": 4, "SDARMoeForCausalLM": 4, LLADA: 32}
DEFAULT_THRESHOLD = 0.9
MAX_BLOCK_LENGTH = 1024

_FIELDS = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "mlp_hidden_size": "intermediate_size",
    "max_sequence_length": "max_position_embeddings",
    "weight_tying": "tie_word_embeddings",
    "include_qkv_bias": "attention_bias",
    "activation_type": "hidden_act",
    "embedding_size": "vocab_size",
}
# Fields of LLaDA's configuration that change what it computes, with the values that are computed here.
_COMPUTED: Mapping[str, tuple[object, ...]] = {
    "block_type": (None, "llama"),
    "layer_norm_type": (None, "rms"),
    "rope": (None, True),
    "alibi": (None, False),
    "attention_layer_norm": (None, False),
    "clip_qkv": (None,),
    "include_bias": (None, False),
    "input_emb_norm": (None, False),
    "scale_logits": (None, False),
}
_TOP_NAMES = {
    "model.transformer.wte.weight": "model.embed_tokens.weight",
    "model.transformer.ln_f.weight": "model.norm.weight",
    "model.transformer.ff_out.weight": "lm_head.weight",
}
_BLOCK = "model.transformer.blocks."
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_norm": "post_attention_layernorm",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}


class DiffusionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks that a model was trained with, its mask token, and its defaults for decoding.

    `steps` is None where the files give none: then a block has as many as it has positions.
    """

    block_length: int
    mask_token: int
    remasking: Remasking = Remasking.DYNAMIC
    steps: int | None = None
    threshold: float = DEFAULT_THRESHOLD


class _Fields(msgspec.Struct, frozen=True, kw_only=True):
    block_size: Annotated[int, Meta(ge=1, le=MAX_BLOCK_LENGTH)] | None = None
    block_length: Annotated[int, Meta(ge=1, le=MAX_BLOCK_LENGTH)] | None = None
    mask_token_id: Annotated[int, Meta(ge=0)] | None = None
    denoising_steps: Positive | None = None
    confidence_threshold: Share | None = None
    remasking_strategy: Remasking | None = None


def architecture_of(content: Mapping[str, object]) -> str | None:
    """Return the architecture of a diffusion language model, None for other models."""
    listed = content.get("architectures")
    first = listed[0] if isinstance(listed, list) and listed else None
    return first if isinstance(first, str) and first in BLOCK_LENGTHS else None


def is_diffusion(directory: Path) -> bool:
    """Whether the model in `directory` is a diffusion language model; False for a file that cannot be read."""
    try:
        content = msgspec.json.decode((directory / "config.json").read_bytes(), type=dict[str, object])
    except (OSError, msgspec.MsgspecError):
        return False
    return architecture_of(content) is not None


def read_diffusion(directory: Path, content: Mapping[str, object]) -> DiffusionConfig | None:
    """Return how the model with the config.json `content` decodes; None if it generates from left to right.

    Raises ConfigError for a value that is not supported, and for a model without a mask token.
    """
    architecture = architecture_of(content)
    if architecture is None:
        return None
    try:
        fields = msgspec.convert({**content, **_generation_config(directory)}, _Fields)
    except msgspec.ValidationError as error:
        raise ConfigError(f"cannot read {directory / 'config.json'} and generation_config.json: {error}") from None
    mask = fields.mask_token_id if fields.mask_token_id is not None else _mask_of_tokenizer(directory)
    if mask is None:
        raise ConfigError(f"{directory / 'config.json'}: mask_token_id is missing, and the tokenizer has no mask token")
    return DiffusionConfig(
        block_length=fields.block_size or fields.block_length or BLOCK_LENGTHS[architecture],
        mask_token=mask,
        remasking=fields.remasking_strategy or Remasking.DYNAMIC,
        steps=fields.denoising_steps,
        threshold=DEFAULT_THRESHOLD if fields.confidence_threshold is None else fields.confidence_threshold,
    )


def llada_fields(content: Mapping[str, object], path: Path) -> dict[str, object]:
    """Return the fields of LLaDA's config.json under the names of a Llama. Raises ConfigError."""
    for name, values in _COMPUTED.items():
        if content.get(name) not in values:
            raise ConfigError(f"{path}: {name} {content[name]!r} is not supported")
    renamed = {_FIELDS[name]: value for name, value in content.items() if name in _FIELDS and value is not None}
    return {**content, **renamed}


def llada_tensor(name: str) -> str:
    """Return the name that a tensor of LLaDA has in a Llama; unknown names stay."""
    if not name.startswith(_BLOCK):
        return _TOP_NAMES.get(name, name)
    number, _, rest = name.removeprefix(_BLOCK).partition(".")
    part, _, kind = rest.rpartition(".")
    return f"model.layers.{number}.{_BLOCK_NAMES[part]}.{kind}" if part in _BLOCK_NAMES else name


def _generation_config(directory: Path) -> dict[str, object]:
    path = directory / "generation_config.json"
    try:
        content = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    return {name: value for name, value in content.items() if name in _Fields.__struct_fields__ and value is not None}


def _mask_of_tokenizer(directory: Path) -> int | None:
    """Return the id of the tokenizer's mask token, if it has one."""
    try:
        token = json.loads((directory / "tokenizer_config.json").read_bytes()).get("mask_token")
        added = json.loads((directory / "tokenizer.json").read_bytes()).get("added_tokens", [])
    except (OSError, ValueError):
        return None
    text = token.get("content") if isinstance(token, dict) else token
    return next((each["id"] for each in added if text is not None and each.get("content") == text), None)
