"""The results of the experts benchmark and their tables: medians with their spread, and ratios round by round."""

from collections.abc import Callable, Iterator, Sequence
from statistics import median

import msgspec

from bench.engine_report import (
    Agreement,
    Measure,
    decode_cell,
    engines_of,
    failure_section,
    format_spread,
    noise,
    rates,
    ratio,
    rows_of,
    spread_of,
)
from bench.engine_runs import Run
from bench.experts_engine import DISPATCH, MODES, ModeRun, Sizes, prefill_cell
from bench.experts_model import CONFIG
from bench.experts_planner import GROUPS, NODES, RANKS, PeerPlan, PlanCell
from bench.experts_process import RebalanceRates, RecorderRates
from bench.report import CHANGED_SOURCE, table
from bench.result_files import Machine


class ExpertResults(msgspec.Struct, frozen=True, kw_only=True):
    date: str
    commit: str
    command: str
    source_changed: bool
    machine: Machine
    sizes: Sizes
    engines: list[Run] = []
    agreement: dict[str, Agreement] = {}
    recorder: list[ModeRun[RecorderRates]] = []
    rebalance: list[ModeRun[RebalanceRates]] = []
    plans: list[PlanCell] = []
    layers: int = 0
    """Layers of each plan."""
    peers_skipped: str = ""
    """Why there are no plans of SGLang's algorithms."""


def to_markdown(results: ExpertResults) -> str:
    parts = [
        heading(results),
        CHANGED_SOURCE if results.source_changed else "",
        *engine_section(results),
        *recorder_section(results),
        *rebalance_section(results),
        *planner_section(results),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def heading(results: ExpertResults) -> str:
    machine, config = results.machine, CONFIG | results.sizes.changes
    return (
        "# Mixture of experts: the engine, its recorder, rebalancing, and planning\n\n"
        f"`{results.command}`, {results.date}, commit {results.commit or 'unknown'}. {machine.cores} cores of "
        f"{machine.cpu}, Python {machine.python}. The model is a random one in the layout of Qwen3-MoE: "
        f"{config['num_hidden_layers']} layers of width {config['hidden_size']}, {config['num_experts']} experts of "
        f"width {config['moe_intermediate_size']} in each, of which a token uses {config['num_experts_per_tok']}. A "
        "value is the median with minimum and maximum in brackets."
    )


# The engine next to transformers


def engine_measures(sizes: Sizes) -> list[Measure]:
    decode = [Measure(f"decode, batch {batch}", rates(decode_cell(batch), "decode")) for batch in sizes.batches]
    prefill = [Measure(f"prefill, batch {batch}", rates(prefill_cell(batch), "prefill")) for batch in sizes.batches]
    return [*decode, *prefill]


def engine_section(results: ExpertResults) -> Iterator[str]:
    runs, sizes = results.engines, results.sizes
    if not runs:
        return
    measures = engine_measures(sizes)
    yield "## Next to transformers"
    yield (
        f"Tokens per second. Decode: prompts of {sizes.prompt_tokens} tokens, {sizes.new_tokens} new ones each, "
        f"greedy, from the moment every row has its first token. Prefill: prompts of {sizes.prefill_tokens} tokens to "
        f"their first new token. Each engine runs alone in its own process, {sizes.rounds} rounds in turn, every cell "
        f"{sizes.repeats} times a round. The ratios compare the engines of the same type, round by round."
    )
    titles = [measure.title for measure in measures]
    yield table(["engine", *titles], rows_of(runs, measures))
    yield table(["Baton / transformers", *titles], list(ratio_rows(runs, measures)))
    if results.agreement:
        yield "Greedy outputs compared with those of transformers in float32:"
        yield table(
            ["engine", "equal rows", "leading tokens that agree"],
            [
                [engine, f"{found.equal_rows} of {found.rows}", f"{found.leading_tokens:.1f}"]
                for engine, found in results.agreement.items()
            ],
        )
    yield from failure_section(runs)
    if any(run.measured for run in runs):
        yield noise(runs, measures)


def ratio_rows(runs: Sequence[Run], measures: Sequence[Measure]) -> Iterator[list[str]]:
    for engine in engines_of(runs):
        if engine.startswith("baton-"):
            peer = engine.replace("baton", "transformers")
            yield [engine.removeprefix("baton-"), *(ratio(runs, engine, peer, measure) for measure in measures)]


# The recorder


def recorder_section(results: ExpertResults) -> Iterator[str]:
    runs = results.recorder
    if not runs:
        return
    yield "## Cost of the recorder"
    yield (
        f"Decode tokens per second at batch {max(results.sizes.batches)} in bfloat16, recorded and not recorded in "
        "turn in the same process. The ratio is that of the medians in a process: 1 is no cost. *off* records "
        "nothing in either, and shows the noise."
    )
    by_mode = {mode: [run.rates for run in runs if run.mode == mode and run.rates] for mode in MODES}
    rows = [[mode, *recorder_columns(found)] for mode, found in by_mode.items() if found]
    yield table(["mode", "not recorded", "recorded", "ratio"], rows)
    yield from failures(runs)


def recorder_columns(found: Sequence[RecorderRates]) -> list[str]:
    plain = [value for each in found for value in each.plain]
    recorded = [value for each in found for value in each.recorded]
    ratios = [median(each.recorded) / median(each.plain) for each in found]
    return [format_spread(spread_of(plain)), format_spread(spread_of(recorded)), thousandths(ratios)]


def thousandths(values: Sequence[float]) -> str:
    return f"{median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


# Rebalancing


def rebalance_section(results: ExpertResults) -> Iterator[str]:
    runs = results.rebalance
    if not runs:
        return
    batch = max(results.sizes.batches)
    yield "## Rebalancing while decoding"
    yield (
        f"Two ranks with one thread each, batch {batch}, bfloat16, a model whose routers prefer the experts of the "
        f"first rank, rebalanced once, after {results.sizes.interval} passes, one layer at a time. Decode tokens per "
        "second. *During* is the slowest window of as many steps as the rebalance has layers; next to it is the "
        "slowest such window before."
    )
    columns: dict[str, Callable[[RebalanceRates], float]] = {
        "before": lambda found: found.before,
        "during": lambda found: found.during,
        "slowest window before": lambda found: found.slowest_before,
        "after": lambda found: found.after,
        "after / before": lambda found: found.after / found.before,
        "longest gap, ms": lambda found: 1000 * found.longest_gap_s,
        "median gap, ms": lambda found: 1000 * found.median_gap_s,
        "balancedness before": lambda found: found.balancedness_before,
        "and after": lambda found: found.balancedness_after,
        "slots changed": lambda found: found.moved,
    }
    rows = []
    for dispatch in DISPATCH:
        found = [run.rates for run in runs if run.mode == dispatch and run.rates]
        if found:
            values = ([value(each) for each in found] for value in columns.values())
            rows.append([dispatch, *(format_spread(spread_of(each)) for each in values)])
    yield table(["dispatch", *columns], rows)
    yield from failures(runs)


def failures(runs: Sequence[ModeRun[RecorderRates]] | Sequence[ModeRun[RebalanceRates]]) -> Iterator[str]:
    failed = [f"- {run.mode}, round {run.round}: {run.failure}" for run in runs if run.failure]
    if failed:
        yield "Failed:\n\n" + "\n".join(failed)


# Planning


def planner_section(results: ExpertResults) -> Iterator[str]:
    cells = results.plans
    if not cells:
        return
    yield "## Planning"
    yield (
        f"Layouts for {results.layers} layers of 256 experts on {RANKS} ranks; hierarchical with {GROUPS} groups on "
        f"{NODES} nodes. Balancedness is the mean load of a rank divided by that of the busiest rank, mean of the "
        "layers. *Worse layers*: layers in which our busiest rank is busier than that of either of SGLang's "
        "algorithms. *Again*: a plan with the previous layout, after a tenth of the traffic has changed, and the part "
        "of the slots that get another expert."
    )
    if results.peers_skipped:
        yield f"Without SGLang: {results.peers_skipped}."
    header = ["loads", "policy", "redundant", "plan, s", "balancedness", "worst layer"]
    peers = ["SGLang", "SGLang vec", "worse layers", "SGLang, s"]
    yield table([*header, *peers, "again, s", "moved"], [plan_row(cell) for cell in cells])
    yield f"The longest plan took {max(max(cell.seconds) for cell in cells):.2f} s."


def plan_row(cell: PlanCell) -> list[str]:
    case = cell.case
    return [
        case.loads,
        case.policy,
        str(case.redundant),
        f"{median(cell.seconds):.2f}",
        f"{cell.balancedness:.4f}",
        f"{cell.worst:.4f}",
        *peer_columns(list(cell.peers.values())),
        f"{cell.replan_seconds:.2f}",
        f"{cell.moved:.1%}",
    ]


def peer_columns(peers: Sequence[PeerPlan]) -> list[str]:
    """Balancedness of each algorithm of SGLang, layers in which one of them is better, and the time of the first."""
    if not peers:
        return ["-"] * 4
    balances = [f"{peer.balancedness:.4f}" for peer in peers]
    return [*balances, str(max(peer.worse_layers for peer in peers)), f"{peers[0].seconds:.2f}"]
