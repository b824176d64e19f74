"""What the tests of embeddings share: a tiny random encoder on disk, and an engine that embeds by counting."""

import asyncio
import json
from array import array
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from baton.errors import BatonError
from baton.ports.engine import Capabilities, EmbedWork, EngineInfo
from baton.protocol.commands import Command, Outcome
from baton.testing import ScriptedEngine

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "far", "away", "from", "home"]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
CONTEXT = 24
SIZE = 16

INFO = EngineInfo(
    model_name="counter",
    model_dir="",
    context_length=CONTEXT,
    block_size=16,
    total_blocks=0,
    max_running=64,
    embedding_size=4,
    embedding_dimensions=(1, 2, 3),
)


class CountingEngine(ScriptedEngine):
    """Embeds a list of tokens as (its length, its sum, 0, 0); waits for `gate` first, if there is one."""

    def __init__(
        self, gate: asyncio.Event | None = None, error: BatonError | None = None, info: EngineInfo = INFO
    ) -> None:
        super().__init__(capabilities=Capabilities(generate=False, embeddings=True), info=info)
        self.gate = gate
        self.error = error
        self.embedded: list[EmbedWork] = []
        self.withdrawn = 0

    async def embed(self, work: EmbedWork) -> "list[array[float]]":
        if self.error is not None:
            raise self.error
        self.embedded.append(work)
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.withdrawn += 1
                raise
        return [array("f", [len(tokens), sum(tokens), 0, 0]) for tokens in work.inputs]

    async def execute(self, command: Command) -> Outcome:
        raise NotImplementedError


class LetterEncoder:
    """A TextEncoder (see `ports/tokenizer.py`): one token for each character."""

    def encode_batch(self, texts: Any) -> list[list[int]]:
        return [[ord(character) for character in text] for text in texts]


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer that cuts and pads, as those of sentence models do."""
    tokenizer = tokenizers.Tokenizer(
        models.WordPiece({word: number for number, word in enumerate(VOCABULARY)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(directory / "tokenizer.json"))


def write_layout(directory: Path, *poolings: str, normalize: bool = True, max_tokens: int = CONTEXT) -> None:
    """Write the files of sentence-transformers."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": number, "name": str(number), "path": paths[number], "type": f"sentence_transformers.models.{kind}"}
        for number, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_tokens}))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    modes = {"word_embedding_dimension": SIZE, "pooling_mode_cls_token": False, "include_prompt": True}
    modes |= {f"pooling_mode_{pooling}": True for pooling in poolings}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(modes))


def write_encoder(directory: Path, kind: str = "bert") -> Any:
    """Write a tiny random encoder with tokenizer and layout; return the model."""
    import torch
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    sizes = {"hidden_size": SIZE, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    if kind == "distilbert":
        sizes = {"dim": SIZE, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}
    if kind in ("albert", "electra"):
        sizes["embedding_size"] = SIZE
    config = AutoConfig.for_model(kind, vocab_size=len(VOCABULARY), max_position_embeddings=40, pad_token_id=0, **sizes)
    model = AutoModel.from_config(config).eval()
    model.save_pretrained(directory)
    write_tokenizer(directory)
    write_layout(directory, "mean_tokens")
    return model
