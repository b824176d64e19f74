"""Plans expert layouts with SGLang's algorithms: reads cases as JSON from stdin, writes their layouts to stdout.

Runs in an environment with SGLang, and imports nothing of Baton.
"""

import json
import os
import sys
import time
from typing import Any

import torch
from sglang.srt.eplb.eplb_algorithms import EplbAlgorithm, rebalance_experts


def plan(case: dict[str, Any]) -> dict[str, Any]:
    counts = torch.tensor([case["counts"]], dtype=torch.float32)  # one step
    began = time.perf_counter()
    layout, _, _ = rebalance_experts(
        tokens_per_expert=counts,
        num_physical_experts=case["physical"],
        num_local_physical_experts=case["size"],
        num_groups=case["groups"],
        num_nodes=case["nodes"],
        algorithm=EplbAlgorithm[case["algorithm"]],
    )
    return {"layout": layout.tolist(), "seconds": time.perf_counter() - began}


def main() -> None:
    cases = json.load(sys.stdin)
    # What SGLang prints must not mix with the result.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    json.dump([plan(case) for case in cases], results)
    results.flush()


if __name__ == "__main__":
    main()
