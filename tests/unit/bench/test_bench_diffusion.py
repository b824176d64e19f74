"""The diffusion benchmark: its variants, the model it compares with, and the report."""

import json
from pathlib import Path

from baton.models.directory import read_config, resolve_model
from baton.models.tokenizer import HubTokenizer
from bench.diffusion import LONGEST_BLOCK, make_questions, variants, write_left_to_right
from bench.diffusion_report import LEFT_TO_RIGHT, DiffusionCell, rows_of


def cell(variant: str, number: int, seconds: float) -> DiffusionCell:
    return DiffusionCell(
        variant=variant,
        at_once=1,
        round=number,
        tokens=100,
        seconds=seconds,
        later_tokens=80,
        later_seconds=seconds / 2,
        passes=25,
        answers=4,
        right=3,
        foreign_cores=0.0,
    )


def test_a_variant_is_compared_with_left_to_right_of_the_same_round() -> None:
    cells = [cell(LEFT_TO_RIGHT, 0, 1.0), cell(LEFT_TO_RIGHT, 1, 4.0), cell("dynamic", 0, 0.5), cell("dynamic", 1, 2.0)]
    left, dynamic = rows_of(cells)
    assert left[-1] == "-"
    assert [dynamic[2], *dynamic[4:]] == ["2.00x", "2.00x", "0.25", "75.0%"]


def test_every_block_length_fits_the_kv_block_of_the_bench() -> None:
    options = [variant.options for variant in variants() if variant.options is not None]
    assert all(LONGEST_BLOCK % (each.block_length or 1) == 0 for each in options)
    assert len({variant.name for variant in variants()}) == len(options) + 1


def test_the_model_to_compare_with_has_the_same_tensors(tmp_path: Path) -> None:
    smoldiff = resolve_model("smoldiff", tmp_path)
    directory = write_left_to_right(smoldiff, tmp_path)
    assert read_config(directory).vocab_size == read_config(smoldiff).vocab_size
    assert json.loads((directory / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    assert (directory / "model.safetensors").samefile(smoldiff / "model.safetensors")


def test_questions_have_as_many_tokens_as_their_answers_need(tmp_path: Path) -> None:
    tokenizer = HubTokenizer(resolve_model("smoldiff", tmp_path))
    questions = make_questions(tokenizer, 2)
    assert len({question.prompt for question in questions}) == len(questions)
    assert all(question.answer_tokens == len(question.problem.answer) + 1 for question in questions)
