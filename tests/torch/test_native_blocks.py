"""The native step with attention that is causal from block to block, as diffusion language models have it."""

import math

import pytest
import torch

from baton.engines.torch.native.decoder import Rows
from tests.torch.test_native import BOTH, SHAPES, Prompt, shape

LENGTH = 288  # whole blocks of every length below, over three spans of keys


def blocked(name: str, dtype: torch.dtype, seen: int, page: int = 16) -> Prompt:
    prompt = Prompt(shape(**SHAPES[name]), dtype, LENGTH, page)
    prompt.seen = seen
    return prompt


@pytest.mark.parametrize("name", ["llama", "qwen3", "odd heads", "wide"])
@pytest.mark.parametrize("seen", [2, 4, 32, 48])
def test_a_prompt_in_float32_equals_a_torch_forward(name: str, seen: int) -> None:
    prompt = blocked(name, torch.float32, seen)
    logits = prompt.in_chunks(prompt.decoder())
    torch.testing.assert_close(logits, prompt.reference(), rtol=1e-4, atol=1e-4)
    prompt.seen = 1
    assert not torch.allclose(logits, prompt.reference(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(("name", "seen"), [("llama", 2), ("qwen3", 4), ("odd heads", 48), ("wide", 32)])
def test_every_way_to_cut_a_prompt_into_blocks_gives_the_same_bits(name: str, seen: int, dtype: torch.dtype) -> None:
    prompt = blocked(name, dtype, seen)
    whole = prompt.in_chunks(prompt.decoder())
    written = prompt.kv.clone()
    assert torch.isfinite(whole).all()
    for threads, step in ((1, seen), (2, 2 * seen), (3, 96), (2, 240)):
        prompt.kv.fill_(math.nan)
        cuts = [cut for cut in range(step, LENGTH, step) if cut % seen == 0]
        assert torch.equal(prompt.in_chunks(prompt.decoder(threads), *cuts), whole), cuts
        assert torch.equal(prompt.kv.nan_to_num(9), written.nan_to_num(9)), cuts


@pytest.mark.parametrize("dtype", BOTH)
def test_blocks_of_several_lengths_and_single_tokens_are_as_they_are_alone(dtype: torch.dtype) -> None:
    prompt = blocked("qwen3", dtype, 4)
    prompt.kv.zero_()
    decoder = prompt.decoder()
    decoder.forward([prompt.rows(0, 192)])
    table = prompt.table
    pieces = [Rows(prompt.tokens[start:stop], start, table, block=block) for start, stop, block in PIECES]
    alone = [decoder.forward([piece]).clone() for piece in pieces]
    for piece, logits in zip(pieces, alone, strict=True):
        others = [other for other in pieces if other.start > piece.start + len(piece.tokens)]
        together = decoder.forward([piece, *others])
        assert torch.equal(together[: len(logits)], logits)


# Pieces that write different slots of one cache.
PIECES = [(192, 196, 4), (200, 208, 4), (224, 256, 32), (256, 258, 2), (280, 281, 1), (284, 288, 4)]


def test_a_block_length_below_one_is_refused() -> None:
    prompt = blocked("llama", torch.float32, 4)
    with pytest.raises(ValueError, match="position"):
        prompt.decoder().forward([prompt.rows(0, 8)._replace(block=0)])
