"""Modes and bounds of recording and rebalancing. Imports no torch, so that settings can be checked without it."""

from typing import Literal

import msgspec

from baton.experts.placement import Algorithm

Mode = Literal["stat", "stat_approx", "per_pass", "per_token"]

MAX_RECORD_BYTES = 256 << 20
APPROXIMATE_STRIDE = 8  # stat_approx counts one pass in so many


class BalancerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """When and how to rebalance: every `interval` passes, by the last `window` of them.

    With `approximate` only one pass in `APPROXIMATE_STRIDE` of these is counted.
    """

    interval: int
    window: int
    layers_per_chunk: int = 0
    utilization_threshold: float = 1.0
    algorithm: Algorithm = "auto"
    approximate: bool = False
