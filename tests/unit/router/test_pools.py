"""How fast a pool has been: quantiles that forget."""

import math

from hypothesis import given
from hypothesis import strategies as st

from baton.router.latency import FEWEST, FRESH_S, MOST, OLDEST_S, Window


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.floats(0, 1e6), max_size=2 * MOST), st.floats(0.01, 1.0))
def test_a_quantile_is_the_least_value_that_so_many_do_not_exceed(values: list[float], share: float) -> None:
    window = Window(Clock())
    for value in values:
        window.add(value)
    recent = values[-MOST:]
    found = window.quantile(share)
    if len(recent) < FEWEST:
        assert found is None
        return
    assert found is not None
    enough = math.ceil(share * len(recent))
    assert sum(value <= found for value in recent) >= enough
    assert sum(value < found for value in recent) < enough


def test_old_values_are_forgotten_and_then_nothing_is_known() -> None:
    clock = Clock()
    window = Window(clock)
    for _ in range(FEWEST):
        window.add(5.0)
    assert window.quantile(0.9) == 5.0
    clock.now = OLDEST_S + 1
    assert window.quantile(0.9) is None


def test_new_values_count_after_a_moment() -> None:
    clock = Clock()
    window = Window(clock)
    for _ in range(FEWEST):
        window.add(5.0)
    assert window.quantile(0.5) == 5.0
    for _ in range(10 * FEWEST):
        window.add(9.0)
    assert window.quantile(0.5) == 5.0
    clock.now = FRESH_S
    assert window.quantile(0.5) == 9.0
