"""Which models the built-in engine takes: what it would get wrong is refused by name, before any weight is read."""

import json
from pathlib import Path

import pytest

from baton.engines.torch.models.config import FAMILIES, read_llama_config
from baton.engines.torch.models.vision_language import LAYOUTS, SpatialPositions, has_media, language_tensor
from baton.errors import ConfigError
from baton.models.sentence import ENCODERS

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
}


def write(directory: Path, **changes: object) -> Path:
    (directory / "config.json").write_text(json.dumps(LLAMA | changes))
    return directory


def test_missing_fields_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    config = read_llama_config(write(tmp_path, head_dim=None, num_key_value_heads=None))
    assert (config.head_dim, config.kv_heads, config.theta, config.tied) == (8, 6, 10000.0, False)


@pytest.mark.parametrize(
    "changes",
    [{"architectures": ["GPT2LMHeadModel"]}, {"architectures": None, "model_type": "gpt2"}, {"architectures": None}],
)
def test_an_unsupported_architecture_is_named_with_the_supported_ones(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match=r"GPT2LMHeadModel|gpt2|unknown") as refusal:
        read_llama_config(write(tmp_path, **changes))
    assert all(name in refusal.value.message for name in (*FAMILIES, *LAYOUTS, *ENCODERS))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": -16}, "head_dim"),
        ({"head_dim": 7}, "heads of 7"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_key_value_heads": 4}, "4 KV heads"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"hidden_size": "large"}, "hidden_size"),
    ],
    ids=str,
)
def test_unsupported_options_are_refused_by_name(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_llama_config(write(tmp_path, **changes))


@pytest.mark.parametrize("content", ["", "[]", "{", "null"])
def test_an_unreadable_config_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_llama_config(tmp_path)


IDEFICS3 = {"architectures": ["Idefics3ForConditionalGeneration"], "model_type": "idefics3"}
QWEN = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
VISION = {"spatial_merge_size": 3, "tokens_per_second": 5, "hidden_size": 7}
TEXT = {name: value for name, value in LLAMA.items() if name != "architectures"}


def write_only(directory: Path, content: dict[str, object]) -> Path:
    (directory / "config.json").write_text(json.dumps(content))
    return directory


def test_the_language_model_of_idefics3_is_in_text_config(tmp_path: Path) -> None:
    text = {**TEXT, "model_type": "llama", "rope_theta": 5000.0, "tie_word_embeddings": True}
    directory = write_only(tmp_path, {**IDEFICS3, "text_config": text, "vision_config": VISION})
    config = read_llama_config(directory)
    assert (config.family, config.hidden, config.theta, config.tied) == ("llama", 48, 5000.0, True)
    assert config.spatial is None
    assert has_media(directory)


def test_qwen_has_spatial_positions_in_new_and_old_files(tmp_path: Path) -> None:
    expected = SpatialPositions(sections=(1, 2, 1), merge=3, tokens_per_second=5)
    new = {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0, "mrope_section": [1, 2, 1]}}
    old = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 1]}, "rope_theta": 7.0}
    for fields in ({"text_config": {**TEXT, "model_type": "qwen2_5_vl_text", **new}}, {**TEXT, **old}):
        config = read_llama_config(write_only(tmp_path, {**fields, **QWEN, "vision_config": VISION}))
        assert (config.family, config.qkv_bias, config.theta, config.spatial) == ("qwen2", True, 7.0, expected)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({**IDEFICS3, "text_config": {**TEXT, "model_type": "gemma"}}, "gemma"),
        ({**QWEN, **TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}}, "mrope_section"),
        ({**QWEN, **TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [2, 2]}}, "mrope_section"),
        ({**IDEFICS3, "text_config": {**TEXT, "model_type": "llama"}, "quantization_config": {}}, "quantised"),
    ],
    ids=str,
)
def test_unsupported_language_models_are_refused_by_name(
    tmp_path: Path, content: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        read_llama_config(write_only(tmp_path, content))


def test_models_of_text_take_no_media(tmp_path: Path) -> None:
    assert not has_media(tmp_path)
    assert not has_media(write(tmp_path))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.text_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.vision_model.post_layernorm.bias", None),
        ("model.connector.modality_projection.proj.weight", None),
        ("visual.blocks.0.norm1.weight", None),
        ("model.visual.blocks.0.norm1.weight", None),
    ],
)
def test_tensors_of_the_language_model_have_their_usual_names(name: str, expected: str | None) -> None:
    assert language_tensor(name) == expected
