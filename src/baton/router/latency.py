"""How fast a pool has been of late: quantiles over a window that forgets by number and by age."""

import math
from collections import deque
from collections.abc import Callable

MOST = 512
OLDEST_S = 60.0
FEWEST = 8
FRESH_S = 0.25


class Window:
    """The last values. Reading is cheap: what was worked out is told again for `FRESH_S`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._values: deque[tuple[float, float]] = deque(maxlen=MOST)
        self._sorted: list[float] = []
        self._sorted_at = -math.inf

    def add(self, value: float) -> None:
        """Take note of `value`."""
        self._values.append((self._clock(), value))

    def quantile(self, share: float) -> float | None:
        """Return the value that `share` of the recent ones do not exceed; None if there are too few to tell."""
        now = self._clock()
        if now - self._sorted_at >= FRESH_S:
            while self._values and now - self._values[0][0] > OLDEST_S:
                self._values.popleft()
            self._sorted = sorted(value for _, value in self._values)
            self._sorted_at = now
        if len(self._sorted) < FEWEST:
            return None
        return self._sorted[min(len(self._sorted) - 1, math.ceil(share * len(self._sorted)) - 1)]
