"""Measures one engine with experts: reads a spec as JSON from stdin, and writes the result as JSON to stdout.

recorder    the same batch again and again, recorded and not recorded in turn
rebalance   three runs; in the second one the engine reaches the interval, and moves experts
"""

import itertools
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from baton.config.engines import ExpertOptions, TorchOptions
from baton.engines.torch.engine import TorchEngine
from baton.protocol.commands import StartExpertRecord, StopExpertRecord
from bench.engine_peers.baton_torch import EngineDriver, options_for
from bench.engine_peers.run import timings
from bench.engine_runs import EngineSetup

WARM_TOKENS = 8


class RecorderSpec(msgspec.Struct, frozen=True, kw_only=True, tag="recorder"):
    setup: EngineSetup
    mode: str
    """`off` measures the difference between two equal runs."""
    new_tokens: int
    runs: list[list[list[int]]]
    """The prompts of each run; of two runs one is recorded."""


class RebalanceSpec(msgspec.Struct, frozen=True, kw_only=True, tag="rebalance"):
    setup: EngineSetup
    ranks: int
    redundant: int
    dispatch: str
    interval: int
    layers_per_chunk: int
    chunks: int
    """Passes in which a rebalance moves experts."""
    runs: list[list[list[int]]]
    """The prompts before, during and after the rebalance."""
    new_tokens: list[int]


class RecorderRates(msgspec.Struct, frozen=True, kw_only=True):
    """Decode tokens per second, not recorded and recorded, in the order of the runs."""

    plain: list[float]
    recorded: list[float]


class RebalanceRates(msgspec.Struct, frozen=True, kw_only=True):
    """Decode tokens per second. `during` is the slowest window of as many steps as a rebalance has chunks."""

    before: float
    during: float
    after: float
    slowest_before: float
    """The slowest window of the run before, for comparison."""
    longest_gap_s: float
    median_gap_s: float
    moved: float
    balancedness_before: float
    balancedness_after: float


def options(setup: EngineSetup) -> TorchOptions:
    return options_for(msgspec.structs.asdict(setup))


def start(setup: EngineSetup, experts: ExpertOptions) -> EngineDriver:
    return EngineDriver(lambda: TorchEngine(options(setup), Path(setup.model), "bench", experts=experts))


def decode_rate(engine: EngineDriver, prompts: list[list[int]], new_tokens: int) -> float:
    return timings(engine.generate(prompts, new_tokens), 0.0, 0)["decode"]


def measure_recorder(spec: RecorderSpec) -> RecorderRates:
    recorder: Any = spec.mode
    engine = start(spec.setup, ExpertOptions(recorder=recorder))
    rates: dict[bool, list[float]] = {False: [], True: []}
    engine.generate(spec.runs[0], WARM_TOKENS)
    for number, prompts in enumerate(spec.runs):
        # no, yes, yes, no: so that a machine that gets slower affects both alike
        recorded = number % 4 in (1, 2)
        if spec.mode != "off":
            engine.execute(StartExpertRecord() if recorded else StopExpertRecord())
        rates[recorded].append(decode_rate(engine, prompts, spec.new_tokens))
    engine.close()
    return RecorderRates(plain=rates[False], recorded=rates[True])


def measure_rebalance(spec: RebalanceSpec) -> RebalanceRates:
    dispatch: Any = spec.dispatch
    experts = ExpertOptions(
        eplb=True,
        ranks=spec.ranks,
        redundant=spec.redundant,
        dispatch=dispatch,
        interval=spec.interval,
        layers_per_chunk=spec.layers_per_chunk,
    )
    engine = start(spec.setup, experts)
    engine.generate(spec.runs[0], WARM_TOKENS)
    before, during, after = [
        step_times(engine.generate(prompts, tokens)) for prompts, tokens in zip(spec.runs, spec.new_tokens, strict=True)
    ]
    metrics = engine.metrics()
    engine.close()
    batch, window = len(spec.runs[0]), spec.chunks + 1
    gaps = [later - earlier for earlier, later in itertools.pairwise(during)]
    return RebalanceRates(
        before=rate(before, batch),
        during=slowest(during, batch, window),
        after=rate(after, batch),
        slowest_before=slowest(before, batch, window),
        longest_gap_s=max(gaps),
        median_gap_s=statistics.median(gaps),
        moved=metric(metrics, "baton_experts_moved_slots_total"),
        balancedness_before=metric(metrics, "baton_experts_rebalance_balancedness_ratio", layout="before"),
        balancedness_after=metric(metrics, "baton_experts_rebalance_balancedness_ratio", layout="after"),
    )


def step_times(rows: Sequence[dict[str, Any]]) -> list[float]:
    """Return when each step ended in which all rows were decoded: when the first row got its tokens."""
    begin, end = max(row["times"][0] for row in rows), min(row["times"][-1] for row in rows)
    return [moment for moment in rows[0]["times"] if begin <= moment <= end]


def rate(moments: Sequence[float], batch: int) -> float:
    """Return the tokens per second from the first to the last moment."""
    return batch * (len(moments) - 1) / (moments[-1] - moments[0])


def slowest(moments: Sequence[float], batch: int, window: int) -> float:
    """Return the tokens per second in the slowest `window` steps."""
    return min(rate(moments[at : at + window + 1], batch) for at in range(len(moments) - window))


def metric(text: str, name: str, **labels: str) -> float:
    """Return the value of a sample with these labels; 0 if there is none."""
    return next(
        (
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ),
        0.0,
    )


def main() -> None:
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=RecorderSpec | RebalanceSpec)
    # What libraries print must not mix with the result.
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    found = measure_recorder(spec) if isinstance(spec, RecorderSpec) else measure_rebalance(spec)
    results.write(msgspec.json.encode(found))
    results.flush()


if __name__ == "__main__":
    main()
