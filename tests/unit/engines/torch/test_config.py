"""Which models the built-in engine takes: what it would get wrong is refused by name, before any weight is read."""

import json
from pathlib import Path

import pytest

from baton.engines.torch.models.config import FAMILIES, read_llama_config
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
    assert all(name in refusal.value.message for name in (*FAMILIES, *ENCODERS))


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
