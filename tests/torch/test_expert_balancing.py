"""Recording, placing and rebalancing experts in a running engine: tokens never depend on any of it."""

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from baton.config.engines import ExpertOptions, TorchOptions
from baton.engines.torch.engine import TorchEngine
from baton.errors import ConfigError, EngineFailed, InvalidRequest
from baton.experts.files import read_counts, write_layout
from baton.experts.placement import Shape, measure, plan, trivial
from baton.protocol.commands import (
    DumpExpertRecord,
    FromDisk,
    ReleaseMemory,
    ResumeMemory,
    StartExpertRecord,
    StopExpertRecord,
    UpdateWeights,
)
from baton.testing import run_bounded
from tests.doubles.tiny_models import make_tiny_model
from tests.torch.torch_sessions import PROMPT, Session, fresh_answer, read, session

EXPERTS, PER_TOKEN, LAYERS = 8, 2, 3
SIZES = {"num_experts": EXPERTS, "num_experts_per_tok": PER_TOKEN, "num_hidden_layers": LAYERS}
PROMPTS = tuple(tuple((seed * 31 + 7 * at) % 250 for at in range(3 + 9 * seed)) for seed in range(6))
SKEWED = (65,) * 40  # one token again and again uses few experts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("moe"), "qwen3_moe", **SIZES)


@pytest.fixture(scope="module")
def plain(model: Path) -> dict[tuple[int, ...], list[int]]:
    """What an engine with experts in order generates for each prompt."""

    async def body() -> dict[tuple[int, ...], list[int]]:
        async with session(model) as here:
            return {prompt: await here.generate(prompt, 24) for prompt in (*PROMPTS, PROMPT, SKEWED)}

    return run_bounded(body(), 60)


@pytest.fixture(autouse=True)
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR", str(tmp_path / "records"))
    return tmp_path / "records"


def metric(here: Session, name: str, **labels: str) -> float:
    return sum(
        sample.value
        for family in text_string_to_metric_families(here.engine.metrics())
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


async def dump(here: Session) -> dict[str, Any]:
    outcome = await here.execute(DumpExpertRecord())
    assert outcome.path is not None
    content: dict[str, Any] = torch.load(outcome.path, weights_only=True)
    return content


def chosen_by_transformers(model: Path, tokens: list[int]) -> torch.Tensor:
    """Return the experts of each layer and token, in a plain forward pass: layers x tokens x choices."""
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = reference(torch.tensor([tokens]), output_router_logits=True).router_logits
    return torch.stack([layer.view(len(tokens), EXPERTS).topk(PER_TOKEN).indices for layer in logits])


def counted(chosen: torch.Tensor) -> list[list[int]]:
    return [torch.bincount(layer.flatten(), minlength=EXPERTS).tolist() for layer in chosen]


REBALANCING = {
    "every pass": ExpertOptions(eplb=True, ranks=2, interval=1),
    "layer by layer": ExpertOptions(eplb=True, ranks=4, redundant=4, interval=2, layers_per_chunk=1),
    "static": ExpertOptions(eplb=True, ranks=2, redundant=6, interval=2, dispatch="static"),
    "approximate": ExpertOptions(eplb=True, ranks=2, redundant=2, interval=3, recorder="stat_approx"),
}


class Traffic:
    """An engine that lives in one event loop for many examples of a property."""

    def __init__(self, model: Path, **options: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self._session = session(model, **options)
        self.here = self.run(self._session.__aenter__())

    def run(self, body: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(body, 60))

    def close(self) -> None:
        self.run(self._session.__aexit__(None, None, None))
        self.loop.close()


REQUESTS = st.lists(st.tuples(st.sampled_from(PROMPTS), st.integers(1, 24), st.booleans()), min_size=1, max_size=5)


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("name", REBALANCING)
def test_tokens_are_the_same_whatever_moves_between_steps(
    model: Path, plain: dict[tuple[int, ...], list[int]], name: str, native: bool
) -> None:
    traffic = Traffic(model, experts=REBALANCING[name], native=native)

    async def body(requests: list[tuple[tuple[int, ...], int, bool]]) -> None:
        started = [(prompt, tokens, leaves, traffic.here.start(prompt, tokens)) for prompt, tokens, leaves in requests]
        for prompt, tokens, leaves, (request_id, stream) in started:
            if leaves:
                await traffic.here.engine.abort(request_id)
            else:
                assert (await read(stream))[0] == plain[prompt][:tokens]

    @settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(REQUESTS)
    def check(requests: list[tuple[tuple[int, ...], int, bool]]) -> None:
        traffic.run(body(requests))

    try:
        check()
        assert metric(traffic.here, "baton_experts_moved_slots_total") > 0
        assert metric(traffic.here, "baton_experts_rebalances_total", outcome="moved") > 1
    finally:
        traffic.close()


@pytest.mark.parametrize(
    "experts", [{}, {"ranks": 2, "redundant": 4}, {"ranks": 2, "redundant": 4, "dispatch": "static"}]
)
@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_stat_counts_what_transformers_chooses(model: Path, experts: dict[str, Any], native: bool) -> None:
    async def body() -> tuple[list[int], dict[str, Any]]:
        options = ExpertOptions(recorder="stat", **experts)
        async with session(model, experts=options, native=native) as here:
            await here.execute(StartExpertRecord())
            return await here.generate(), await dump(here)

    tokens, content = run_bounded(body(), 60)
    expected = counted(chosen_by_transformers(model, [*PROMPT, *tokens][:-1]))
    assert content["logical_count"].sum(0).tolist() == expected
    assert len(content["logical_count"]) == len(tokens)


def test_stat_approx_counts_one_pass_in_eight(model: Path) -> None:
    async def body() -> tuple[list[int], dict[str, Any]]:
        async with session(model, experts=ExpertOptions(recorder="stat_approx")) as here:
            await here.execute(StartExpertRecord())
            return await here.generate(), await dump(here)

    tokens, content = run_bounded(body(), 60)
    chosen = chosen_by_transformers(model, [*PROMPT, *tokens][:-1])
    prompt, decoded = counted(chosen[:, : len(PROMPT)]), counted(chosen[:, len(PROMPT) + 7 : len(PROMPT) + 8])
    assert content["logical_count"].tolist() == [prompt, decoded]


def test_per_pass_has_the_slots_of_each_pass(model: Path) -> None:
    async def body() -> tuple[list[int], dict[str, Any]]:
        async with session(model, experts=ExpertOptions(recorder="per_pass", ranks=2, redundant=2)) as here:
            await here.execute(StartExpertRecord())
            return await here.generate(), await dump(here)

    tokens, content = run_bounded(body(), 60)
    chosen = chosen_by_transformers(model, [*PROMPT, *tokens][:-1])
    layout = content["last_physical_to_logical_map"]
    assert layout.tolist() == [[*range(EXPERTS), 0, 1]] * LAYERS
    ends = [len(PROMPT) + number for number in range(len(tokens))]
    for record, start, end in zip(content["records"], [0, *ends], ends, strict=False):
        counts = torch.zeros((LAYERS, EXPERTS), dtype=torch.int32)
        counts.scatter_add_(1, layout, record["global_physical_count"])
        assert counts.tolist() == counted(chosen[:, start:end])


def test_per_token_has_every_choice_of_every_row(model: Path) -> None:
    async def body() -> tuple[dict[tuple[int, ...], list[int]], dict[str, Any]]:
        options = ExpertOptions(recorder="per_token", ranks=2, redundant=2)
        async with session(model, experts=options, batch_tokens=16, prefix_cache=False) as here:
            await here.execute(StartExpertRecord())
            streams = {prompt: here.start(prompt, 5)[1] for prompt in PROMPTS[2:4]}
            return {prompt: (await read(stream))[0] for prompt, stream in streams.items()}, await dump(here)

    tokens, content = run_bounded(body(), 60)
    layout = content["last_physical_to_logical_map"]
    found: dict[tuple[int, int], list[torch.Tensor]] = {}
    for record in content["records"]:
        choices = record["topk_ids_of_layer"][:, :, :PER_TOKEN].long()
        logical = layout.gather(1, choices.flatten(1)).view_as(choices)
        assert len(record["input_ids"]) == len(record["positions"]) == choices.shape[1]
        for row, key in enumerate(zip(record["positions"], record["input_ids"], strict=True)):
            found.setdefault(key, []).append(logical[:, row].sort(-1).values)
    for prompt, answer in tokens.items():
        text = [*prompt, *answer][:-1]
        expected = chosen_by_transformers(model, text).sort(-1).values
        for position, token in enumerate(text):
            assert any(torch.equal(expected[:, position], row) for row in found[position, token])
    assert sum(map(len, found.values())) == sum(len(prompt) + len(answer) - 1 for prompt, answer in tokens.items())
    assert {record["forward_mode"] for record in content["records"]} >= {1, 2}


def test_the_record_is_bounded_and_says_what_it_dropped(model: Path) -> None:
    async def body() -> None:
        async with session(model, experts=ExpertOptions(recorder="per_token", recorder_buffer=4)) as here:
            await here.execute(StartExpertRecord())
            await here.generate(tokens=10)
            outcome = await here.execute(DumpExpertRecord())
            assert "4 passes written; 6 older ones were dropped" in outcome.message
            assert metric(here, "baton_experts_recorded_passes_total") == 10
            assert metric(here, "baton_experts_dropped_passes_total") == 6

    run_bounded(body(), 60)


def test_a_dump_begins_after_the_one_before(model: Path) -> None:
    async def body() -> None:
        async with session(model, experts=ExpertOptions(recorder="stat")) as here:
            with pytest.raises(InvalidRequest, match="experts/record/start"):
                await here.execute(DumpExpertRecord())
            await here.execute(StartExpertRecord())
            await here.generate(tokens=4)
            assert len((await dump(here))["logical_count"]) == 4
            await here.generate(tokens=3)
            await here.execute(StopExpertRecord())
            await here.generate(tokens=5)
            assert len((await dump(here))["logical_count"]) == 3
            with pytest.raises(InvalidRequest, match="no pass"):
                await here.execute(DumpExpertRecord())

    run_bounded(body(), 60)


def test_a_record_that_cannot_be_written_is_kept(model: Path, records: Path) -> None:
    async def body() -> None:
        async with session(model, experts=ExpertOptions(recorder="stat")) as here:
            await here.execute(StartExpertRecord())
            await here.generate(tokens=4)
            await asyncio.to_thread(records.touch)  # not a directory
            with pytest.raises(EngineFailed, match="the record cannot be written to"):
                await here.execute(DumpExpertRecord())
            await asyncio.to_thread(records.unlink)
            assert len((await dump(here))["logical_count"]) == 4

    run_bounded(body(), 60)


def test_skewed_traffic_is_balanced_better_after_a_rebalance(
    model: Path, plain: dict[tuple[int, ...], list[int]]
) -> None:
    async def body() -> tuple[float, float]:
        options = ExpertOptions(eplb=True, ranks=4, redundant=4, interval=40, report="both")
        async with session(model, experts=options, prefix_cache=False) as here:
            assert await here.generate(SKEWED, 24) == plain[SKEWED]
            before = metric(here, "baton_experts_balancedness_ratio")
            assert metric(here, "baton_experts_rebalances_total") == 0
            while not metric(here, "baton_experts_rebalances_total", outcome="moved"):
                assert await here.generate(SKEWED, 24) == plain[SKEWED]
            planned = {
                name: metric(here, "baton_experts_rebalance_balancedness_ratio", layout=name)
                for name in ("before", "after")
            }
            assert planned["after"] > planned["before"]
            for _ in range(5):
                assert await here.generate(SKEWED, 24) == plain[SKEWED]
            return before, metric(here, "baton_experts_balancedness_ratio")

    before, after = run_bounded(body(), 60)
    assert after > before


@pytest.mark.parametrize("suffix", [".json", ".pt"])
def test_a_recorded_and_planned_layout_balances_better_and_changes_no_token(
    model: Path, plain: dict[tuple[int, ...], list[int]], tmp_path: Path, suffix: str
) -> None:
    shape = Shape(experts=EXPERTS, redundant=4, ranks=4)
    path = tmp_path / f"layout{suffix}"

    async def record() -> list[list[float]]:
        async with session(model, experts=ExpertOptions(recorder="stat", ranks=4), prefix_cache=False) as here:
            await here.execute(StartExpertRecord())
            assert await here.generate(SKEWED, 24) == plain[SKEWED]
            outcome = await here.execute(DumpExpertRecord())
            return read_counts(Path(str(outcome.path)))

    async def apply(layout: str) -> tuple[list[list[int]], float]:
        options = ExpertOptions(layout=layout, redundant=4, ranks=4, recorder="per_pass", report="prometheus")
        async with session(model, experts=options, prefix_cache=False) as here:
            await here.execute(StartExpertRecord())
            assert await here.generate(SKEWED, 24) == plain[SKEWED]
            content = await dump(here)
            return content["last_physical_to_logical_map"].tolist(), metric(here, "baton_experts_balancedness_ratio")

    counts = run_bounded(record(), 60)
    layout = plan(counts, shape)
    write_layout(path, layout)
    planned, better = run_bounded(apply(str(path)), 60)
    assert planned == layout
    assert measure(counts, layout, 4).balancedness > measure(counts, [trivial(shape)] * LAYERS, 4).balancedness
    _, worse = run_bounded(apply("trivial"), 60)
    assert better > worse


def test_a_dump_is_a_layout_file_too(model: Path, plain: dict[tuple[int, ...], list[int]], tmp_path: Path) -> None:
    counts = [[(expert * 7 + layer) % 5 for expert in range(EXPERTS)] for layer in range(LAYERS)]
    dumped = tmp_path / "dump.json"
    dumped.write_text(json.dumps({"logical_count": counts}))

    async def body() -> None:
        async with session(model, experts=ExpertOptions(layout=str(dumped), ranks=4, redundant=4)) as here:
            for prompt in PROMPTS:
                assert await here.generate(prompt, 24) == plain[prompt]

    run_bounded(body(), 60)


def test_new_weights_reach_every_copy_wherever_experts_have_moved(
    model: Path, plain: dict[tuple[int, ...], list[int]], tmp_path: Path
) -> None:
    other = make_tiny_model(tmp_path / "other", "qwen3_moe", seed=5, **SIZES)
    expected = run_bounded(fresh_answer(other), 60)

    async def body() -> None:
        async with session(model, experts=ExpertOptions(eplb=True, ranks=2, redundant=4, interval=2)) as here:
            for prompt in PROMPTS:
                assert await here.generate(prompt, 24) == plain[prompt]
            assert metric(here, "baton_experts_moved_slots_total") > 0
            both = ("kv_cache", "weights")
            await here.execute(ReleaseMemory(tags=both))
            await here.execute(ResumeMemory(tags=both))
            assert await here.generate(PROMPT, 24) == plain[PROMPT]
            await here.execute(UpdateWeights(source=FromDisk(path=str(other)), version="other"))
            assert await here.generate() == expected
            await here.execute(UpdateWeights(source=FromDisk(path=str(model)), version="back"))
            assert await here.generate(PROMPT, 24) == plain[PROMPT]

    run_bounded(body(), 60)


def test_only_engines_with_a_recorder_say_that_they_record(model: Path, tmp_path: Path) -> None:
    dense = make_tiny_model(tmp_path / "dense")

    def records(directory: Path, **experts: Any) -> bool:
        return TorchEngine(TorchOptions(), directory, "m", experts=ExpertOptions(**experts)).capabilities.expert_records

    assert not records(dense)
    assert not records(model)
    assert records(model, recorder="stat")
    assert records(model, report="prometheus")
    assert records(model, eplb=True, ranks=2)


def test_a_model_without_experts_does_not_start_with_settings_for_them(tmp_path: Path) -> None:
    dense = make_tiny_model(tmp_path / "dense")

    async def body() -> None:
        engine = TorchEngine(TorchOptions(), dense, "m", experts=ExpertOptions(recorder="stat"))
        assert not engine.capabilities.expert_records
        with pytest.raises(ConfigError, match=r"experts\.recorder: the model has no experts"):
            await engine.start()
        await engine.stop()

    run_bounded(body(), 60)
