"""The planner next to SGLang's own algorithms, on the same loads."""

import pytest

from baton.experts.placement import plan, rank_loads
from bench.experts_loads import make_counts
from bench.experts_planner import ALGORITHMS, CASES, GROUPS, NODES, RANKS, ROUNDING, Case, shape_of
from bench.peers.sglang_planner import plan as plan_with_sglang

LAYERS = 6


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_no_layer_has_a_busier_rank_than_in_a_layout_of_sglang(case: Case) -> None:
    counts, shape = make_counts(case.loads, LAYERS), shape_of(case)
    ours = plan(counts, shape, case.policy)
    for algorithm in ALGORITHMS[case.policy]:
        theirs = plan_with_sglang(
            {
                "counts": counts,
                "physical": shape.physical,
                "size": shape.size,
                "groups": GROUPS,
                "nodes": NODES,
                "algorithm": algorithm,
            }
        )["layout"]
        for loads, row, other in zip(counts, ours, theirs, strict=True):
            assert max(rank_loads(loads, row, RANKS)) <= max(rank_loads(loads, other, RANKS)) * (1 + ROUNDING)
