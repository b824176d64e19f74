"""Converts a GGUF file into a model directory in the Hugging Face layout: weights, configuration, tokenizer, template.

Supports Llama models with a SmolLM tokenizer, like the demo model; all others are refused by name.
"""

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.engine_kit.bfloat16 import from_float32
from baton.engine_kit.safetensors_writing import write_bfloat16_tensors
from baton.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader

INSTALL = "pip install 'baton-serve[torch]'"

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CONTROL_TOKEN = 3

Report = Callable[[int, int], None]


def refuse_without_gguf() -> None:
    """Raise ConfigError if the package gguf is not installed."""
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"converting the model needs the package gguf: {INSTALL}")


def convert_gguf(source: Path, target: Path, report: Report) -> None:
    """Write the model in `source` to the directory `target`, in bfloat16; `report` gets the finished and total tensors.

    Raises ConfigError if the file is broken, is another kind of model, or if the package gguf is not installed.
    """
    refuse_without_gguf()
    from gguf import GGUFReader

    try:
        reader = GGUFReader(source)
        values = _Values(reader)
        for key, known in (("general.architecture", "llama"), ("tokenizer.ggml.pre", "smollm")):
            if values[key] != known:
                raise ConfigError(f"{source.name} has {key} {values[key]!r}; only {known!r} can be converted")
        target.mkdir()
        _write_weights(reader, values, target / "model.safetensors", report)
        _write_tokenizer(values, target)
    except (ValueError, IndexError, KeyError, NotImplementedError) as error:
        raise ConfigError(f"cannot read {source}: {error!r}") from error
    tied = not any(tensor.name == "output.weight" for tensor in reader.tensors)
    _write_json(target / "config.json", _config(values, tied))
    ends = {
        "bos_token_id": values["tokenizer.ggml.bos_token_id"],
        "eos_token_id": values["tokenizer.ggml.eos_token_id"],
    }
    _write_json(target / "generation_config.json", {**ends, "pad_token_id": values["tokenizer.ggml.padding_token_id"]})


class _Values:
    """The metadata of a GGUF file, by key."""

    def __init__(self, reader: "GGUFReader") -> None:
        self._fields = reader.fields

    def __getitem__(self, key: str) -> Any:
        return self._fields[key].contents()


def _config(values: _Values, tied: bool) -> dict[str, object]:
    heads = values["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(values["tokenizer.ggml.tokens"]),
        "hidden_size": values["llama.embedding_length"],
        "intermediate_size": values["llama.feed_forward_length"],
        "num_hidden_layers": values["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": values["llama.attention.head_count_kv"],
        "head_dim": values["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": values["llama.context_length"],
        # Stored as 32-bit floats; rounding restores the original decimal.
        "rms_norm_eps": float(f"{values['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": float(f"{values['llama.rope.freq_base']:.6g}"),
        "tie_word_embeddings": tied,
        "bos_token_id": values["tokenizer.ggml.bos_token_id"],
        "eos_token_id": values["tokenizer.ggml.eos_token_id"],
        "pad_token_id": values["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def _write_weights(reader: "GGUFReader", values: _Values, path: Path, report: Report) -> None:
    from gguf import dequantize

    heads = {
        "attn_q": values["llama.attention.head_count"],
        "attn_k": values["llama.attention.head_count_kv"],
    }
    shapes = {_hub_name(tensor.name): [int(size) for size in reversed(tensor.shape)] for tensor in reader.tensors}

    def converted() -> Iterator[bytes]:
        for number, tensor in enumerate(reader.tensors):
            weight = dequantize(tensor.data, tensor.tensor_type)
            name = tensor.name.split(".")[-2]
            yield from_float32(_unpermute(weight, heads[name]) if name in heads else weight)
            report(number + 1, len(reader.tensors))

    write_bfloat16_tensors(path, shapes, converted())


def _hub_name(name: str) -> str:
    """Return the Hugging Face name of a tensor. Raises KeyError for a tensor that Llama models do not have."""
    match name.split("."):
        case ["blk", number, tensor, "weight"]:
            return f"model.layers.{number}.{_LAYER[tensor]}.weight"
        case [tensor, "weight"]:
            return f"{_OUTER[tensor]}.weight"
        case _:
            raise KeyError(name)


def _unpermute(weight: "np.ndarray[Any, Any]", heads: int) -> "np.ndarray[Any, Any]":
    """Restore the row order of a q or k projection: GGUF interleaves the two halves of each head."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_tokenizer(values: _Values, target: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = values["tokenizer.ggml.tokens"]
    kinds: list[int] = values["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in values["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    # SmolLM splits numbers into digits, and everything else as GPT-2 does.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.save(str(target / "tokenizer.json"))
    special = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    _write_json(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": values["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            **{f"{short}_token": tokens[values[f"tokenizer.ggml.{long}_token_id"]] for short, long in special.items()},
            "chat_template": values["tokenizer.chat_template"],
        },
    )


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
