"""The built-in engine with a mixture of experts: next to transformers, with a recorder, and while it rebalances."""

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from bench.engine_report import decode_cell
from bench.engine_runs import (
    ENGINES,
    CellSpec,
    EngineSetup,
    Run,
    Spec,
    environment,
    kill_process_tree,
    last_log_line,
    run_engine,
)
from bench.experts_model import CONFIG, SHORT, make_token_prompts
from bench.experts_process import RebalanceRates, RebalanceSpec, RecorderRates, RecorderSpec

COMPARED = ("baton-bf16", "baton-fp32", "transformers-bf16", "transformers-fp32")
MODES = ("off", "stat", "stat_approx", "per_pass", "per_token")
DISPATCH = ("static", "dynamic")
WARM_TOKENS = 4
RANKS = 2
DEADLINE_S = 900.0
# Parts of an interval: the run before it ends, the run in which it ends, and the run after that.
INTERVAL_PARTS = (0.65, 0.5, 0.6)
T = TypeVar("T")


@dataclass(frozen=True)
class Sizes:
    """The size of a run. `rounds` alternate between the systems, or the modes."""

    changes: dict[str, Any] = field(default_factory=dict)
    batches: tuple[int, ...] = (1, 8)
    prompt_tokens: int = 64
    new_tokens: int = 64
    prefill_tokens: int = 512
    rounds: int = 3
    repeats: int = 2
    recorder_runs: int = 16
    interval: int = 200


QUICK = Sizes(
    changes=SHORT,
    batches=(1, 8),
    prompt_tokens=16,
    new_tokens=16,
    prefill_tokens=64,
    rounds=1,
    repeats=1,
    recorder_runs=4,
    interval=100,
)


class ModeRun(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """One process in one round: a mode of the recorder or a kind of dispatch. `rates` is None if it failed."""

    mode: str
    round: int
    rates: T | None = None
    failure: str = ""


def prefill_cell(batch: int) -> str:
    return f"prefill-{batch}"


def make_setup(model: Path, sizes: Sizes, dtype: str, batch: int, new_tokens: int) -> EngineSetup:
    row = max(sizes.prompt_tokens, sizes.prefill_tokens) + new_tokens
    return EngineSetup(
        model=str(model),
        gguf="",
        cache="",
        variant=dtype,
        threads=len(os.sched_getaffinity(0)),
        kv_tokens=batch * row,
        max_batch=batch,
        context=2 ** math.ceil(math.log2(row)),
    )


def make_cells(sizes: Sizes) -> list[CellSpec]:
    """Decode and prefill for each batch. No prompt occurs twice, so that no engine can use a prefix cache."""
    plans = [
        plan
        for batch in sizes.batches
        for plan in (
            (decode_cell(batch), batch, sizes.prompt_tokens, sizes.new_tokens),
            (prefill_cell(batch), batch, sizes.prefill_tokens, 1),
        )
    ]
    return [
        CellSpec(
            name=name,
            new_tokens=new_tokens,
            warm=make_token_prompts(sizes.changes, batch, length, f"{name} warm"),
            runs=[make_token_prompts(sizes.changes, batch, length, f"{name} {turn}") for turn in range(sizes.repeats)],
        )
        for name, batch, length, new_tokens in plans
    ]


def compare_engines(model: Path, sizes: Sizes) -> Iterator[Run]:
    """Yield a run of each engine in each round."""
    engines = [engine for engine in ENGINES if engine.name in COMPARED]
    cells = make_cells(sizes)
    for turn in range(sizes.rounds):
        start = turn % len(engines)
        for engine in (*engines[start:], *engines[:start]):
            spec = Spec(
                peer=engine.peer,
                packages=engine.packages,
                setup=make_setup(model, sizes, engine.variant, max(sizes.batches), sizes.new_tokens),
                cells=cells,
                warm_tokens=WARM_TOKENS,
            )
            yield run_engine(engine.name, turn, Path(sys.executable), spec, DEADLINE_S)


def measure_recorder(model: Path, sizes: Sizes) -> Iterator[ModeRun[RecorderRates]]:
    """Yield the rates of each mode in each round."""
    batch = max(sizes.batches)
    for turn in range(sizes.rounds):
        for mode in rotated(MODES, turn):
            spec = RecorderSpec(
                setup=make_setup(model, sizes, "bfloat16", batch, sizes.new_tokens),
                mode=mode,
                new_tokens=sizes.new_tokens,
                runs=[
                    make_token_prompts(sizes.changes, batch, sizes.prompt_tokens, f"recorder {turn} {number}")
                    for number in range(sizes.recorder_runs)
                ],
            )
            yield run_mode(mode, turn, spec, RecorderRates)


def measure_rebalance(model: Path, sizes: Sizes) -> Iterator[ModeRun[RebalanceRates]]:
    """Yield the rates of each kind of dispatch in each round, for a model whose first rank has most of the load."""
    batch = max(sizes.batches)
    layers, experts = ((CONFIG | sizes.changes)[name] for name in ("num_hidden_layers", "num_experts"))
    for turn in range(sizes.rounds):
        for dispatch in rotated(DISPATCH, turn):
            spec = RebalanceSpec(
                setup=make_setup(model, sizes, "bfloat16", batch, sizes.interval),
                ranks=RANKS,
                redundant=experts // 8,
                dispatch=dispatch,
                interval=sizes.interval,
                layers_per_chunk=1,
                chunks=layers,
                runs=[
                    make_token_prompts(sizes.changes, batch, sizes.prompt_tokens, f"rebalance {turn} {number}")
                    for number in range(len(INTERVAL_PARTS))
                ],
                new_tokens=[int(part * sizes.interval) for part in INTERVAL_PARTS],
            )
            yield run_mode(dispatch, turn, spec, RebalanceRates)


def rotated(names: Sequence[str], turn: int) -> tuple[str, ...]:
    start = turn % len(names)
    return (*names[start:], *names[:start])


def run_mode(mode: str, turn: int, spec: RecorderSpec | RebalanceSpec, kind: type[T]) -> ModeRun[T]:
    """Run `bench.experts_process` to its end or to its deadline."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.experts_process"],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment(spec.setup.threads),
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(msgspec.json.encode(spec), timeout=DEADLINE_S)
            return ModeRun(mode=mode, round=turn, rates=msgspec.json.decode(output, type=kind))
        except subprocess.TimeoutExpired:
            return ModeRun(mode=mode, round=turn, failure=f"no result within {DEADLINE_S:g} s; {last_log_line(log)}")
        except msgspec.DecodeError:
            return ModeRun(mode=mode, round=turn, failure=last_log_line(log))
        finally:
            kill_process_tree(process)
