"""Reads the config.json of a supported model. What this engine does not support is refused by name.

A vision-language model is read as its language model; `vision_language.py` has what connects it to media.
"""

import math
from pathlib import Path

import msgspec

from baton.engines.torch.models.diffusion import (
    LLADA,
    DiffusionConfig,
    architecture_of,
    llada_fields,
    read_diffusion,
)
from baton.engines.torch.models.experts import ExpertShape, read_experts
from baton.engines.torch.models.vision_language import (
    LAYOUTS,
    SpatialPositions,
    language_fields,
    layout_of,
    spatial_positions,
)
from baton.errors import ConfigError
from baton.models.sentence import ENCODERS

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "SDARForCausalLM": "qwen3",
    "SDARMoeForCausalLM": "qwen3_moe",
    LLADA: "llada",
}


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary positions, as `rope_scaling` or `rope_parameters` give them."""

    rope_type: str = "default"
    type: str | None = None
    rope_theta: float | None = None
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class _Raw(msgspec.Struct, frozen=True, kw_only=True):
    architectures: list[str] | None = None
    model_type: str = ""
    vocab_size: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    rope_theta: float | None = None
    rope_scaling: Rope | None = None
    rope_parameters: Rope | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    qkv_bias: bool = True
    mlp_bias: bool = False
    sliding_window: int | None = None
    use_sliding_window: bool | None = None
    eos_token_id: int | list[int] | None = None
    quantization_config: object = None


class LlamaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a model of the Llama family.

    `layout` is set for the language model of a vision-language model, and `spatial` if it has 3-D positions. `experts`
    is set for a mixture-of-experts model; then `ffn` is that of its dense layers. `diffusion` is set for a diffusion
    language model, whose attention is causal from block to block.
    """

    family: str
    vocab: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    context: int
    theta: float
    rope: Rope
    tied: bool
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    layout: str | None = None
    spatial: SpatialPositions | None = None
    experts: ExpertShape | None = None
    diffusion: DiffusionConfig | None = None

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.kv_heads * self.head_dim


def read_llama_config(directory: Path) -> LlamaConfig:
    """Return the shape of the model in `directory`. Raises ConfigError naming what is not supported."""
    path = directory / "config.json"
    try:
        content = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
        layout = layout_of(content)
        raw = msgspec.convert(_fields(content, layout, path), _Raw)
        spatial = None if layout is None else spatial_positions(content, layout)
        family = _family(raw, layout)
        experts = read_experts(content, family, raw.num_hidden_layers, path)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    _refuse(raw, path)
    config = msgspec.structs.replace(
        _config_of(raw, family),
        layout=layout,
        spatial=spatial,
        experts=experts,
        diffusion=read_diffusion(directory, content),
    )
    _refuse_odd_heads(config, path)
    _refuse_mask(config, path)
    inverse_frequencies(config)  # an unknown kind of positions is refused before the weights are read
    return config


def has_experts(directory: Path) -> bool:
    """Whether the model in `directory` has experts; False for a model that cannot be read."""
    try:
        return read_llama_config(directory).experts is not None
    except ConfigError:
        return False


def _fields(content: dict[str, object], layout: str | None, path: Path) -> dict[str, object]:
    """Return the fields of the language model, under the names of a Llama."""
    if layout is not None:
        return language_fields(content)
    return llada_fields(content, path) if architecture_of(content) == LLADA else content


def _family(raw: _Raw, layout: str | None) -> str:
    architecture = (raw.architectures or [raw.model_type or "unknown"])[0]
    family = FAMILIES.get(architecture) if layout is None else LAYOUTS[layout].get(raw.model_type)
    if family is None and layout is not None:
        raise ConfigError(f"the language model {raw.model_type!r} of {layout} is not supported by the built-in engine")
    if family is None:
        raise ConfigError(
            f"{architecture} is not supported by the built-in engine; it supports {', '.join(FAMILIES)} for text,"
            f" {', '.join(LAYOUTS)} for text and media, and {', '.join(sorted(ENCODERS))} for embeddings. Choose"
            " another engine with --engine"
        )
    return family


def _refuse_odd_heads(config: LlamaConfig, path: Path) -> None:
    if config.heads % config.kv_heads or config.head_dim % 2:
        raise ConfigError(
            f"{path}: {config.heads} heads of {config.head_dim} over {config.kv_heads} KV heads do not divide"
        )
    if config.spatial is not None and sum(config.spatial.sections) != config.head_dim // 2:
        raise ConfigError(
            f"{path}: mrope_section {list(config.spatial.sections)} does not divide the {config.head_dim // 2} pairs"
            " of dimensions of a head"
        )


def _refuse_mask(config: LlamaConfig, path: Path) -> None:
    if config.diffusion is not None and config.diffusion.mask_token >= config.vocab:
        raise ConfigError(
            f"{path}: mask_token_id {config.diffusion.mask_token} is not a token of this model; it has {config.vocab}"
        )


def _config_of(raw: _Raw, family: str) -> LlamaConfig:
    rope = _rope(raw)
    heads = raw.num_attention_heads
    return LlamaConfig(
        family=family,
        vocab=raw.vocab_size,
        hidden=raw.hidden_size,
        ffn=raw.intermediate_size,
        layers=raw.num_hidden_layers,
        heads=heads,
        kv_heads=heads if raw.num_key_value_heads is None else raw.num_key_value_heads,
        head_dim=raw.hidden_size // heads if raw.head_dim is None else raw.head_dim,
        eps=raw.rms_norm_eps,
        context=_context(raw, family, rope),
        theta=rope.rope_theta or raw.rope_theta or 10000.0,
        rope=rope,
        tied=raw.tie_word_embeddings,
        qkv_bias={"qwen2": True, "qwen2_moe": raw.qkv_bias}.get(family, raw.attention_bias),
        o_bias=family in ("llama", "qwen3", "qwen3_moe") and raw.attention_bias,
        qk_norm=family in ("qwen3", "qwen3_moe"),
    )


def _rope(raw: _Raw) -> Rope:
    rope = raw.rope_parameters or raw.rope_scaling or Rope()
    kind = rope.type or rope.rope_type
    # Old files call plain frequencies with 3-D positions mrope.
    return msgspec.structs.replace(rope, rope_type="default" if kind == "mrope" else kind)


def _refuse(raw: _Raw, path: Path) -> None:
    for field in _SIZES:
        if (size := getattr(raw, field)) is not None and size < 1:
            raise ConfigError(f"{path}: {field} is missing or not positive")
    if raw.hidden_act != "silu":
        raise ConfigError(f"{path}: hidden_act {raw.hidden_act!r} is not supported; only silu is")
    if raw.mlp_bias:
        raise ConfigError(f"{path}: mlp_bias is not supported")
    if raw.quantization_config is not None:
        raise ConfigError(f"{path}: quantised weights are not supported; give the model in bfloat16 or float32")


def _context(raw: _Raw, family: str, rope: Rope) -> int:
    """Return the context length with full attention, the only kind that this engine computes."""
    context = raw.max_position_embeddings
    if rope.rope_type == "yarn" and rope.original_max_position_embeddings:
        context = max(context, int(rope.original_max_position_embeddings * rope.factor))
    slides = raw.use_sliding_window if raw.use_sliding_window is not None else family == "mistral"
    # Within one window, sliding and full attention are equal.
    return min(context, raw.sliding_window) if slides and raw.sliding_window else context


def inverse_frequencies(config: LlamaConfig) -> tuple[list[float], float]:
    """Return the rotary frequencies of each pair of dimensions, and the factor on cosine and sine."""
    rope, size = config.rope, config.head_dim
    plain = [config.theta ** (-pair * 2 / size) for pair in range(size // 2)]
    match rope.rope_type:
        case "default":
            return plain, 1.0
        case "linear":
            return [frequency / rope.factor for frequency in plain], 1.0
        case "llama3":
            return [_llama3(frequency, rope, config.context) for frequency in plain], 1.0
        case "yarn":
            return _yarn(plain, config)
        case other:
            raise ConfigError(f"rope_type {other!r} is not supported; default, linear, llama3 and yarn are")


def _llama3(frequency: float, rope: Rope, context: int) -> float:
    """Scale slow rotations by the factor, keep fast ones, and blend those between."""
    original = rope.original_max_position_embeddings or context
    wavelength = 2 * math.pi / frequency
    if wavelength < original / rope.high_freq_factor:
        return frequency
    if wavelength > original / rope.low_freq_factor:
        return frequency / rope.factor
    blend = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return (1 - blend) * frequency / rope.factor + blend * frequency


def _yarn(plain: list[float], config: LlamaConfig) -> tuple[list[float], float]:
    rope, size = config.rope, config.head_dim
    original = rope.original_max_position_embeddings or config.context

    def pair_of(rotations: float) -> float:
        return size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    span = max(high - low, 0.001)
    frequencies = []
    for pair, frequency in enumerate(plain):
        stretched = min(max((pair - low) / span, 0.0), 1.0)
        frequencies.append(frequency / rope.factor * stretched + frequency * (1 - stretched))
    return frequencies, _yarn_attention(rope)


def _yarn_attention(rope: Rope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
