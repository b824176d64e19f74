"""Plans expert layouts for skewed loads: the time it takes, and the balance next to that of SGLang's algorithms."""

import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from baton.experts.placement import Layout, Shape, measure, plan, rank_loads
from bench.engine_runs import environment, last_log_line
from bench.experts_loads import EXPERTS, ROWS, Counts, make_counts

Policy = Literal["global", "hierarchical"]

PROGRAM = Path(__file__).parent / "peers" / "sglang_planner.py"
POLICIES: tuple[Policy, ...] = ("global", "hierarchical")
# What SGLang calls its algorithms for each policy. `auto` selects the first.
ALGORITHMS: dict[Policy, tuple[str, ...]] = {
    "global": ("deepseek", "deepseek_vec"),
    "hierarchical": ("deepseek_hierarchical", "deepseek_vec_hierarchical"),
}
REDUNDANT = (0, 32, 64)
RANKS, NODES, GROUPS = 32, 4, 8
DEADLINE_S = 600.0
ROUNDING = 1e-6  # SGLang computes in float32


class Case(NamedTuple):
    """A kind of load, a policy and a number of redundant experts."""

    loads: str
    policy: Policy
    redundant: int


CASES = [Case(loads, policy, redundant) for loads in ROWS for policy in POLICIES for redundant in REDUNDANT]


class PeerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A layout of SGLang's: its time, its balancedness, and in how many layers ours has a busier rank."""

    seconds: float
    balancedness: float
    worse_layers: int
    """Layers in which the busiest rank of our layout is busier."""


class PlanCell(msgspec.Struct, frozen=True, kw_only=True):
    """Our layout for one kind of load and one shape."""

    case: Case
    seconds: list[float]
    replan_seconds: float
    """Time of a plan with a previous layout, for counts that have changed a little."""
    moved: float
    """Part of the slots that get another expert then."""
    balancedness: float
    worst: float
    peers: dict[str, PeerPlan]


class PeerLayout(msgspec.Struct, frozen=True):
    layout: Layout
    seconds: float


class PlannerFailed(Exception):
    """SGLang's planner is not installed, or wrote no result."""


PeerLayouts = dict[Case, dict[str, PeerLayout]]


def shape_of(case: Case) -> Shape:
    grouped = case.policy == "hierarchical"
    return Shape(
        experts=EXPERTS,
        redundant=case.redundant,
        ranks=RANKS,
        nodes=NODES if grouped else 1,
        groups=GROUPS if grouped else 0,
    )


def measure_plans(layers: int, repeats: int, peers: PeerLayouts) -> Iterator[PlanCell]:
    """Yield a cell per kind of load, policy and number of copies, next to the layouts of SGLang's algorithms."""
    for case in CASES:
        counts = make_counts(case.loads, layers)
        yield measure_plan(case, counts, repeats, peers.get(case, {}))


def measure_plan(case: Case, counts: Counts, repeats: int, peers: dict[str, PeerLayout]) -> PlanCell:
    shape, policy = shape_of(case), case.policy
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        layout = plan(counts, shape, policy)
        seconds.append(time.perf_counter() - began)
    changed = drifted(counts, make_counts(case.loads, len(counts), seed=1))
    began = time.perf_counter()
    replanned = plan(changed, shape, policy, layout)
    replan_seconds = time.perf_counter() - began
    balance = measure(counts, layout, shape.ranks)
    return PlanCell(
        case=case,
        seconds=seconds,
        replan_seconds=replan_seconds,
        moved=moved_part(replanned, layout),
        balancedness=balance.balancedness,
        worst=balance.worst,
        peers={algorithm: compare(counts, layout, found, shape) for algorithm, found in peers.items()},
    )


def drifted(counts: Counts, others: Counts) -> Counts:
    """Return counts of traffic of which a tenth has become other traffic."""
    return [
        [0.9 * load + 0.1 * other for load, other in zip(row, changed, strict=True)]
        for row, changed in zip(counts, others, strict=True)
    ]


def moved_part(layout: Layout, previous: Layout) -> float:
    pairs = [pair for rows in zip(layout, previous, strict=True) for pair in zip(*rows, strict=True)]
    return sum(new != old for new, old in pairs) / len(pairs)


def compare(counts: Counts, ours: Layout, peer: PeerLayout, shape: Shape) -> PeerPlan:
    return PeerPlan(
        seconds=peer.seconds,
        balancedness=measure(counts, peer.layout, shape.ranks).balancedness,
        worse_layers=sum(
            max(rank_loads(loads, row, shape.ranks)) > max(rank_loads(loads, other, shape.ranks)) * (1 + ROUNDING)
            for loads, row, other in zip(counts, ours, peer.layout, strict=True)
        ),
    )


def peer_layouts(python: Path, layers: int) -> PeerLayouts:
    """Return the layouts of SGLang's algorithms for every case. Raises PlannerFailed."""
    if not python.exists():
        raise PlannerFailed("SGLang is not installed (make test-sglang installs it into .venv-sglang)")
    wanted = [(case, algorithm) for case in CASES for algorithm in ALGORITHMS[case.policy]]
    counts = {loads: make_counts(loads, layers) for loads in ROWS}
    specs: list[dict[str, object]] = [
        {
            "counts": counts[case.loads],
            "physical": EXPERTS + case.redundant,
            "size": (EXPERTS + case.redundant) // RANKS,
            "groups": GROUPS,
            "nodes": NODES,
            "algorithm": algorithm,
        }
        for case, algorithm in wanted
    ]
    found: PeerLayouts = {}
    for (case, algorithm), layout in zip(wanted, run_peer(python, specs), strict=True):
        found.setdefault(case, {})[algorithm] = layout
    return found


def run_peer(python: Path, cases: Sequence[dict[str, object]]) -> list[PeerLayout]:
    with tempfile.TemporaryFile() as log:
        try:
            done = subprocess.run(
                [str(python), str(PROGRAM)],
                input=msgspec.json.encode(cases),
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment(threads=1) | {"SGLANG_USE_CPU_ENGINE": "1"},
                timeout=DEADLINE_S,
            )
        except subprocess.TimeoutExpired:
            raise PlannerFailed(f"SGLang's planner wrote no result within {DEADLINE_S:g} s") from None
        if done.returncode:
            raise PlannerFailed(f"SGLang's planner ended with {done.returncode}: {last_log_line(log)}")
    return msgspec.json.decode(done.stdout, type=list[PeerLayout])
