"""Latency windows: quantiles of recent samples."""

import math

from hypothesis import given
from hypothesis import strategies as st

from baton.router.pools import MAX_AGE_S, MAX_SAMPLES, MIN_SAMPLES, REFRESH_INTERVAL_S, LatencyWindow


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.floats(0, 1e6), max_size=2 * MAX_SAMPLES), st.floats(0.01, 1.0))
def test_quantile_is_the_smallest_sample_that_the_share_does_not_exceed(values: list[float], share: float) -> None:
    window = LatencyWindow(Clock())
    for value in values:
        window.add(value)
    recent = values[-MAX_SAMPLES:]
    quantile = window.quantile(share)
    if len(recent) < MIN_SAMPLES:
        assert quantile is None
        return
    assert quantile is not None
    wanted = math.ceil(share * len(recent))
    assert sum(value <= quantile for value in recent) >= wanted
    assert sum(value < quantile for value in recent) < wanted


def test_old_samples_are_dropped() -> None:
    clock = Clock()
    window = LatencyWindow(clock)
    for _ in range(MIN_SAMPLES):
        window.add(5.0)
    assert window.quantile(0.9) == 5.0
    clock.now = MAX_AGE_S + 1
    assert window.quantile(0.9) is None


def test_new_samples_count_after_the_refresh_interval() -> None:
    clock = Clock()
    window = LatencyWindow(clock)
    for _ in range(MIN_SAMPLES):
        window.add(5.0)
    assert window.quantile(0.5) == 5.0
    for _ in range(10 * MIN_SAMPLES):
        window.add(9.0)
    assert window.quantile(0.5) == 5.0
    clock.now = REFRESH_INTERVAL_S
    assert window.quantile(0.5) == 9.0
