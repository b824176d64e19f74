"""The native step with rows of media and 3-D positions: as torch computes it, and the same bits in any chunks."""

import itertools
import math

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from baton.engines.torch.models.llama import LlamaModel, Span, Step, Weights
from baton.engines.torch.models.vision_language import SpatialPositions
from baton.engines.torch.native.decoder import EmbeddedRows, NativeDecoder, Rows
from tests.torch.test_native import BOTH, Prompt, shape, wide

LENGTH = 200
MEDIA = [(3, 40), (90, 31)]  # the first row and the number of rows of each item


class MediaPrompt(Prompt):
    """A prompt with rows of media at some tokens, and with positions in time, height and width."""

    def __init__(self, dtype: torch.dtype) -> None:
        config = shape(qkv_bias=True, spatial=SpatialPositions(sections=(2, 3, 3), merge=2, tokens_per_second=2))
        super().__init__(config, dtype, LENGTH)
        source = torch.Generator().manual_seed(5)
        self.media = [torch.randn(count, config.hidden, generator=source).to(dtype) for _, count in MEDIA]
        self.positions = torch.randint(0, 150, (LENGTH, 3), generator=source)
        self.positions[150:] = torch.arange(60, 110)[:, None]  # text: the index less 90

    def rows(self, start: int, stop: int) -> Rows:
        found = []
        for (first, count), rows in zip(MEDIA, self.media, strict=True):
            begin, end = max(first, start), min(first + count, stop)
            if begin < end:
                found.append(EmbeddedRows(begin - start, rows[begin - first : end - first]))
        positions = -90 if start >= 150 else [tuple(row) for row in self.positions[start:stop].tolist()]
        return Rows(self.tokens[start:stop], start, self.table, positions, found)

    def reference(self) -> Tensor:
        weights = Weights(*(wide(part) for part in self.weights))
        slots = self.kv.shape[2] * self.block
        kv = torch.zeros(self.config.layers, 2, slots, self.config.kv_heads, self.config.head_dim)
        model = LlamaModel(self.config, weights, kv, self.cos, self.sin)
        places = torch.tensor([self.table[p // self.block] * self.block + p % self.block for p in range(LENGTH)])
        embedded = [(first, rows.float()) for (first, _), rows in zip(MEDIA, self.media, strict=True)]
        step = Step(torch.tensor(self.tokens), self.positions.T, places, [Span(0, LENGTH, 0, places)], [], embedded)
        return model.logits(model.forward(step))


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-4), (torch.bfloat16, 0.06)])
def test_rows_of_media_and_spatial_positions_are_as_torch_computes_them(dtype: torch.dtype, near: float) -> None:
    prompt = MediaPrompt(dtype)
    logits = prompt.in_chunks(prompt.decoder(), 150)
    torch.testing.assert_close(logits, prompt.reference(), rtol=near, atol=near)


@pytest.mark.parametrize("dtype", BOTH)
def test_every_way_to_cut_a_prompt_with_media_gives_the_same_bits(dtype: torch.dtype) -> None:
    prompt = MediaPrompt(dtype)
    whole = prompt.in_chunks(prompt.decoder())
    written = prompt.kv.clone()
    for threads, cuts in ((1, [1]), (2, [20, 100, 150]), (3, list(range(7, LENGTH, 7))), (2, list(range(1, LENGTH)))):
        prompt.kv.fill_(math.nan)
        assert torch.equal(prompt.in_chunks(prompt.decoder(threads), *cuts), whole), cuts
        assert torch.equal(prompt.kv.nan_to_num(9), written.nan_to_num(9)), cuts


@pytest.mark.parametrize("dtype", BOTH)
def test_a_prompt_with_media_is_in_a_batch_as_it_is_alone(dtype: torch.dtype) -> None:
    prompt = MediaPrompt(dtype)
    decoder = prompt.decoder()
    alone = prompt.in_chunks(decoder)
    text = Rows([1, 2, 3], 0, [block for block in range(prompt.kv.shape[2]) if block not in prompt.table][:1])
    text_alone = decoder.forward([text]).clone()
    for chunks in ([text, prompt.rows(0, LENGTH)], [prompt.rows(0, LENGTH), text]):
        parts = decoder.forward(chunks).split([len(chunk.tokens) for chunk in chunks])
        found = dict(zip([len(chunk.tokens) for chunk in chunks], parts, strict=True))
        assert torch.equal(found[LENGTH], alone)
        assert torch.equal(found[3], text_alone)


def refuse(decoder: NativeDecoder, rows: Rows) -> None:
    with pytest.raises(ValueError):
        decoder.forward([rows])


def test_positions_and_rows_out_of_range_are_refused_and_nothing_is_written() -> None:
    prompt = MediaPrompt(torch.float32)
    decoder, context = prompt.decoder(), prompt.config.context
    base = prompt.rows(0, 4)
    row = prompt.media[0][:1]
    for wrong in (
        base._replace(positions=-1),
        base._replace(positions=context),
        base._replace(positions=[(0, 0, 0)] * 3 + [(0, context, 0)]),
        base._replace(positions=[(-1, 0, 0)] * 4),
        base._replace(embedded=[EmbeddedRows(4, row)]),
        base._replace(embedded=[EmbeddedRows(0, row.double())]),
        base._replace(embedded=[EmbeddedRows(0, row[:, 1:])]),
    ):
        refuse(decoder, wrong)
    assert torch.isnan(prompt.kv).all()


def test_pieces_with_and_without_three_positions_are_told_apart() -> None:
    prompt = MediaPrompt(torch.float32)
    whole = prompt.in_chunks(prompt.decoder())
    cuts = [0, 60, 150, 170, LENGTH]
    prompt.kv.fill_(math.nan)
    decoder = prompt.decoder()
    chunks = [prompt.rows(*edge) for edge in itertools.pairwise(cuts)]
    assert torch.equal(decoder.forward(chunks), whole)
