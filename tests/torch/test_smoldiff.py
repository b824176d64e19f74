"""smoldiff with the plain decoder of its training: the shipped weights answer as the log says."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file

from baton.models.directory import resolve_model
from tools.smoldiff.chats import Batch, Chat, make_batch
from tools.smoldiff.decode import Decoding
from tools.smoldiff.directory import END, MASK
from tools.smoldiff.model import Smoldiff, block_causal, doubled
from tools.smoldiff.problems import held_out_problems
from tools.smoldiff.train import hide, measure

pytestmark = pytest.mark.torch

BLOCK = 4


@pytest.fixture(scope="module")
def model() -> Smoldiff:
    model = Smoldiff()
    model.load_tensors(load_file(resolve_model("smoldiff", Path()) / "model.safetensors"))
    return model.requires_grad_(False)


def test_it_answers_problems_that_training_never_had(model: Smoldiff) -> None:
    problems = [problem for problem in held_out_problems(1) if problem.kind != "other"]
    found = measure(model, problems, Decoding())
    assert found["all"] >= 1 - 1 / len(problems)
    assert found["passes_per_token"] < 0.2


def test_it_answers_as_well_when_one_token_is_decided_in_each_pass(model: Smoldiff) -> None:
    problems = [problem for problem in held_out_problems(1) if problem.kind in ("add", "spell")]
    found = measure(model, problems, Decoding(4, None))
    assert found["all"] == 1
    assert found["passes_per_token"] >= 1


def test_a_noisy_block_sees_the_clean_blocks_before_it_and_itself() -> None:
    mask = doubled(3 * BLOCK, BLOCK, "cpu")
    seen = mask[-2 * BLOCK].nonzero().flatten().tolist()  # the first position of the second noisy block
    assert seen == [*range(BLOCK), *range(4 * BLOCK, 5 * BLOCK)]
    assert torch.equal(mask[: 3 * BLOCK, : 3 * BLOCK], block_causal(3 * BLOCK, BLOCK, "cpu"))
    assert not mask[: 3 * BLOCK, 3 * BLOCK :].any()


def test_what_a_noisy_block_is_given_in_training_is_what_decoding_computes(model: Smoldiff) -> None:
    """The two halves of a doubled text give the hidden states of plain texts."""
    [problem] = [problem for problem in held_out_problems(1) if problem.kind == "spell"]
    ids = make_batch([Chat([], problem)]).ids.long()
    width = ids.shape[1]
    places = torch.arange(width)
    noisy = ids.clone()
    block = slice(width // 2 // 16 * 16, width // 2 // 16 * 16 + 16)
    noisy[:, block] = MASK
    both = model(torch.cat((ids, noisy), 1), places.repeat(2), doubled(width, 16, "cpu"))
    plain = model(noisy[:, : block.stop], places[: block.stop], block_causal(block.stop, 16, "cpu"))
    assert torch.allclose(both[:, width + block.start : width + block.stop], plain[:, block], atol=1e-4)


def test_rows_of_zeros_in_a_wider_vocabulary_do_not_change_confidences(model: Smoldiff) -> None:
    problem = next(problem for problem in held_out_problems(1) if problem.kind == "spell")
    prompt = Chat([], problem).prompt
    ids = torch.tensor([prompt + [MASK] * (-len(prompt) % 16)])
    hidden = model(ids, torch.arange(ids.shape[1]), block_causal(ids.shape[1], 16, "cpu"))
    logits = model.logits(hidden[0, len(prompt) :])
    wider = torch.cat((logits, torch.zeros(len(logits), 150_000)), 1)
    assert torch.allclose(logits.softmax(-1).amax(-1), wider.softmax(-1).amax(-1), atol=0.002)


def test_only_answers_are_hidden_up_to_the_end_of_their_last_block() -> None:
    torch.manual_seed(0)
    batch = Batch(torch.full((64, 32), END), torch.full((64,), 6), torch.full((64,), 18))
    masked, weights = hide(batch, 8)
    assert not masked[:, :6].any()
    assert not masked[:, 24:].any()
    assert masked[:, 18:24].any()
    per_block = weights.view(64, 4, 8).sum(-1)
    assert torch.allclose(per_block, torch.tensor([2.0, 8.0, 8.0, 0.0]).expand(64, 4)), "every block counts by its size"
