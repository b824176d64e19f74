"""The block that a diffusion language model decodes: which positions a pass decides, and when a block is complete."""

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine_kit.block_hash import block_hashes
from baton.engines.torch.blocks import BlockPool
from baton.engines.torch.diffusion.canvas import Canvas
from baton.engines.torch.diffusion.options import DecodingPlan, make_plan
from baton.engines.torch.models.config import read_llama_config
from baton.engines.torch.models.diffusion import DiffusionConfig, is_diffusion, llada_tensor, read_diffusion
from baton.engines.torch.sampling_params import make_sampling_params
from baton.engines.torch.scheduler import Scheduler
from baton.engines.torch.sequence import Phase, Sequence
from baton.errors import ConfigError
from baton.models.defaults import SamplingDefaults
from baton.ports.engine import Work
from baton.protocol.events import KvStored
from baton.protocol.ids import RequestId
from baton.protocol.requests import DiffusionOptions, Remasking, StopConditions

MODEL = DiffusionConfig(block_length=4, mask_token=99)
PLAN = DecodingPlan(block_length=4, mask_token=99, remasking=Remasking.DYNAMIC, steps=4, threshold=0.5)
SDAR = {
    "architectures": ["SDARForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "mask_token_id": 299,
}
LLADA = {
    "architectures": ["LLaDAModelLM"],
    "vocab_size": 300,
    "embedding_size": 304,
    "d_model": 48,
    "mlp_hidden_size": 96,
    "n_layers": 2,
    "n_heads": 6,
    "n_kv_heads": None,
    "max_sequence_length": 512,
    "rope_theta": 5e5,
    "mask_token_id": 299,
}


class Token(msgspec.Struct, frozen=True):
    """A decided token."""

    token: int
    logprobs: None = None


def plan(remasking: Remasking = Remasking.DYNAMIC, **changes: object) -> DecodingPlan:
    return msgspec.structs.replace(PLAN, remasking=remasking, **changes)


@given(st.integers(1, 64), st.integers(1, 64))
def test_the_quotas_of_all_steps_decide_every_position(masks: int, steps: int) -> None:
    quotas = [plan(steps=steps).quota(masks, passes) for passes in range(min(steps, masks))]
    assert sum(quotas) == masks
    assert max(quotas) - min(quotas) <= 1
    assert min(quotas) >= 1


@given(st.lists(st.floats(0, 1), min_size=1, max_size=32), st.integers(1, 8), st.floats(0, 1))
def test_the_dynamic_selection_has_all_above_the_threshold_and_no_fewer_than_the_static_one(
    confidences: list[float], quota: int, threshold: float
) -> None:
    static = plan(Remasking.STATIC).select(confidences, quota)
    dynamic = plan(threshold=threshold).select(confidences, quota)
    assert len(static) == min(quota, len(confidences))
    assert set(static) <= set(dynamic)
    sure = {index for index, confidence in enumerate(confidences) if confidence > threshold}
    assert sure <= set(dynamic)
    assert len(dynamic) == max(len(static), len(sure))
    assert min(confidences[index] for index in dynamic) >= max(
        (confidence for index, confidence in enumerate(confidences) if index not in dynamic), default=0.0
    )


def test_equal_confidences_are_decided_from_the_left() -> None:
    assert plan(Remasking.STATIC).select([0.5, 0.9, 0.5, 0.9], 3) == [1, 3, 0]


def test_a_block_begins_with_the_end_of_the_prompt_and_keeps_what_is_decided() -> None:
    tokens = [1, 2, 3, 4, 5]
    canvas = Canvas(PLAN, tokens)
    assert (canvas.start, canvas.end, canvas.masked) == (4, 8, [5, 6, 7])
    canvas.decide({6: Token(60)})  # type: ignore[dict-item]
    assert canvas.inputs(tokens) == [5, 99, 60, 99]
    assert (canvas.masked, canvas.passes) == ([5, 7], 1)
    tokens += [50, 60, 70]
    canvas.begin(tokens)
    assert (canvas.start, canvas.masked, canvas.passes) == (8, [8, 9, 10, 11], 0)


def params(**stop: object) -> object:
    work = Work(
        request_id=RequestId("r"), token_ids=(1,), max_tokens=int(stop.pop("limit", 50)), stop=StopConditions(**stop)
    )
    return make_sampling_params(work, SamplingDefaults(), 100)


@pytest.mark.parametrize(
    ("decided", "stop", "expected"),
    [
        ({4: 10, 5: 11, 6: 12}, {}, None),
        ({4: 10, 5: 11, 6: 12, 7: 13}, {}, [10, 11, 12, 13]),
        ({4: 10, 5: 9}, {"stop_token_ids": (9,)}, [10, 9]),
        ({5: 9}, {"stop_token_ids": (9,)}, None),
        ({4: 10, 5: 9}, {"stop_token_ids": (9,), "min_tokens": 3}, None),
        ({4: 10, 5: 11}, {"limit": 2}, [10, 11]),
        ({4: 10, 6: 11}, {"limit": 2}, None),
    ],
)
def test_a_block_is_complete_when_no_mask_is_left_before_its_end(
    decided: dict[int, int], stop: dict[str, object], expected: list[int] | None
) -> None:
    canvas = Canvas(PLAN, [1, 2, 3, 4])
    canvas.decide({position: Token(token) for position, token in decided.items()})  # type: ignore[misc]
    found = canvas.complete(params(**stop), 0)  # type: ignore[arg-type]
    assert (found and [cell.token for cell in found]) == expected


def make_sequence(prompt: int, arrival: int = 0, block_length: int | None = None, tokens: int = 32) -> Sequence:
    options = DiffusionOptions(block_length=block_length)
    work = Work(
        request_id=RequestId(f"r{arrival}"), token_ids=tuple(range(prompt)), max_tokens=tokens, diffusion=options
    )
    sampling = make_sampling_params(work, SamplingDefaults(), 100)
    return Sequence(work, 0, sampling, arrival, None, make_plan(work, MODEL, 8))


def run(scheduler: Scheduler) -> dict[Sequence, tuple[int, int]]:
    """Pretend to compute a step that decides every block whole; return the rows of each sequence."""
    batch = scheduler.schedule()
    rows = {}
    for chunk in (*batch.prefills, *batch.decodes):
        rows[chunk.sequence] = (chunk.start, chunk.length)
        last, canvas = chunk.last, chunk.sequence.canvas
        assert canvas is not None
        assert chunk.start % chunk.sequence.unit == chunk.length % chunk.sequence.unit == 0
        scheduler.computed(chunk)
        if last:
            chunk.sequence.tokens += [7] * len(canvas.cells)
            canvas.begin(chunk.sequence.tokens)
    return rows


def test_prompts_are_computed_in_whole_blocks_and_a_finished_block_with_the_next_one() -> None:
    scheduler = Scheduler(BlockPool(32, 8), 4, 16, by_block=True)
    sequence = make_sequence(26)
    scheduler.add(sequence)
    assert [run(scheduler)[sequence] for _ in range(4)] == [(0, 16), (16, 12), (24, 8), (28, 8)]


def test_prompts_go_on_beside_blocks_that_fill_a_step() -> None:
    scheduler = Scheduler(BlockPool(64, 8), 8, 16, by_block=True)
    running = [make_sequence(4, number) for number in range(4)]
    for sequence in running:
        scheduler.add(sequence)
    run(scheduler)
    run(scheduler)
    late = make_sequence(40, 9)
    scheduler.add(late)
    rows = run(scheduler)
    assert all(rows[sequence][1] == 8 for sequence in running)
    assert rows[late] == (0, 8)


def test_kv_of_another_block_length_has_other_hashes_and_other_events() -> None:
    pool = BlockPool(32, 8)
    scheduler = Scheduler(pool, 4, 64, by_block=True)
    salts = []
    for arrival, length in enumerate((None, 2, 4, 2)):
        sequence = make_sequence(16, arrival, length)
        scheduler.add(sequence)
        run(scheduler)
        scheduler.end(sequence)
        stored = [event for event in pool.events if isinstance(event, KvStored)]
        salts += [event.cache_salt for event in stored]
        pool.events = []
        assert sequence.cached_tokens == (0, 0, 16, 16)[arrival], "a whole prompt can be cached"
        own = block_hashes(range(16), 8)
        assert (sequence.hashes[:2] == own) == (length != 2)
    assert set(salts) == {None, "block_length=2:"}


def test_a_preempted_sequence_keeps_what_is_decided() -> None:
    scheduler = Scheduler(BlockPool(8, 8), 4, 64, by_block=True)
    sequence = make_sequence(10)
    scheduler.add(sequence)
    batch = scheduler.schedule()
    for chunk in (*batch.prefills, *batch.decodes):
        scheduler.computed(chunk)
    assert sequence.canvas is not None
    sequence.canvas.decide({11: Token(5)})  # type: ignore[dict-item]
    scheduler.retract(sequence)
    assert (sequence.phase, sequence.computed) == (Phase.WAITING, 0)
    assert sequence.inputs(0, 12) == [*range(10), 99, 5]
    scheduler.schedule()
    assert (sequence.computed, sequence.canvas.passes) == (8, 1), "the full KV block was cached"


def write(directory: Path, content: dict[str, object], generation: dict[str, object] | None = None) -> Path:
    (directory / "config.json").write_text(json.dumps(content))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def test_a_sdar_model_is_a_qwen3_with_blocks(tmp_path: Path) -> None:
    config = read_llama_config(write(tmp_path, {**SDAR, "block_size": 8, "denoising_steps": 4}))
    assert (config.family, config.qk_norm) == ("qwen3", True)
    assert config.diffusion == DiffusionConfig(block_length=8, mask_token=299, steps=4)
    assert is_diffusion(tmp_path)


def test_a_llada_model_is_a_llama_with_names_of_its_own(tmp_path: Path) -> None:
    config = read_llama_config(write(tmp_path, LLADA))
    assert (config.hidden, config.ffn, config.layers, config.heads, config.kv_heads) == (48, 96, 2, 6, 6)
    assert (config.vocab, config.context, config.theta, config.qk_norm) == (304, 512, 5e5, False)
    assert config.diffusion == DiffusionConfig(block_length=32, mask_token=299)
    assert llada_tensor("model.transformer.blocks.11.ff_out.weight") == "model.layers.11.mlp.down_proj.weight"
    assert llada_tensor("model.transformer.ff_out.weight") == "lm_head.weight"
    assert llada_tensor("something.weight") == "something.weight"


def test_the_generation_config_overrides_the_defaults_of_the_config(tmp_path: Path) -> None:
    generation = {"confidence_threshold": 0.7, "remasking_strategy": "low_confidence_static", "top_p": 0.9}
    content = {**SDAR, "confidence_threshold": 0.8}
    found = read_diffusion(write(tmp_path, content, generation), content)
    assert found == DiffusionConfig(block_length=4, mask_token=299, threshold=0.7, remasking=Remasking.STATIC)


def test_the_mask_token_may_be_the_tokenizers(tmp_path: Path) -> None:
    content = {name: value for name, value in SDAR.items() if name != "mask_token_id"}
    write(tmp_path, content)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"mask_token": {"content": "<|MASK|>"}}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 42, "content": "<|MASK|>"}]}))
    found = read_diffusion(tmp_path, content)
    assert found is not None
    assert found.mask_token == 42


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({**SDAR, "mask_token_id": None}, "mask_token_id"),
        ({**SDAR, "mask_token_id": 300}, "mask_token_id 300"),
        ({**SDAR, "block_size": 0}, "block_size"),
        ({**SDAR, "remasking_strategy": "entropy"}, "remasking_strategy"),
        ({**SDAR, "confidence_threshold": 2}, "confidence_threshold"),
        ({**LLADA, "alibi": True}, "alibi"),
        ({**LLADA, "layer_norm_type": "default"}, "layer_norm_type"),
        ({**LLADA, "activation_type": "gelu"}, "gelu"),
        ({**LLADA, "include_bias": True}, "include_bias"),
        ({**LLADA, "d_model": None}, "hidden_size"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, content: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_llama_config(write(tmp_path, content))
