"""Durations in a bounded number of bins, for percentiles: eight bins to a doubling, so within 5%."""

import math
from collections import Counter

BINS_PER_DOUBLING = 8


class Histogram:
    """Counts durations in µs."""

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()

    def __bool__(self) -> bool:
        return bool(self._bins)

    def add(self, duration_us: int) -> None:
        """Count a duration."""
        self._bins[round(math.log2(max(1, duration_us)) * BINS_PER_DOUBLING)] += 1

    def merge(self, other: "Histogram") -> None:
        """Count all durations of `other`."""
        self._bins.update(other._bins)

    def percentiles(self, *fractions: float) -> list[int] | None:
        """Return the durations below which these fractions lie, ascending; None if there are none."""
        if not self._bins:
            return None
        total, seen = sum(self._bins.values()), 0
        wanted, found = list(fractions), []
        for number in sorted(self._bins):
            seen += self._bins[number]
            while wanted and seen >= wanted[0] * total:
                found.append(round(2 ** (number / BINS_PER_DOUBLING)))
                wanted.pop(0)
        return found
