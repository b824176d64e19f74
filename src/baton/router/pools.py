"""The current state of a pool: its workers in discovery, this router's requests in it, and its recent latency."""

import math
from collections import deque
from collections.abc import Callable, Mapping

from baton.ports.runtime import Client
from baton.router.plan import Pool, PoolRole
from baton.router.select import Skip

QUANTILE = 0.9
MAX_SAMPLES = 512
MAX_AGE_S = 60.0
MIN_SAMPLES = 8
REFRESH_INTERVAL_S = 0.25
MEASURED: dict[PoolRole, tuple[str, ...]] = {
    "prefill": ("ttft_ms",),
    "decode": ("itl_ms",),
    "aggregated": ("ttft_ms", "itl_ms"),
}
"""The latencies that are measured for each role."""


class LatencyWindow:
    """Quantiles of the latest samples, limited in number and age. The sorted samples are cached for a moment."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, float]] = deque(maxlen=MAX_SAMPLES)
        self._sorted: list[float] = []
        self._sorted_at = -math.inf

    def add(self, value: float) -> None:
        """Add a sample."""
        self._samples.append((self._clock(), value))

    def quantile(self, share: float) -> float | None:
        """Return the smallest sample that `share` of all samples do not exceed; None with too few samples."""
        now = self._clock()
        if now - self._sorted_at >= REFRESH_INTERVAL_S:
            while self._samples and now - self._samples[0][0] > MAX_AGE_S:
                self._samples.popleft()
            self._sorted = sorted(value for _, value in self._samples)
            self._sorted_at = now
        if len(self._sorted) < MIN_SAMPLES:
            return None
        return self._sorted[min(len(self._sorted) - 1, math.ceil(share * len(self._sorted)) - 1)]


class PoolState:
    """One pool with its client. `waiting` counts the requests in flight that have no output yet."""

    def __init__(self, pool: Pool, client: Client, clock: Callable[[], float]) -> None:
        self.pool = pool
        self.client = client
        self.in_flight = 0
        self.waiting = 0
        self.latency = {"ttft_ms": LatencyWindow(clock), "itl_ms": LatencyWindow(clock)}

    def unavailable(self) -> Skip | None:
        """Return why the pool accepts no request now, or None. Draining workers are not in discovery."""
        if self.pool.queue_limit is not None and self.waiting >= self.pool.queue_limit:
            return "queue"
        return None if self.client.instances() else "empty"

    def measured(self, name: str) -> float | None:
        """Return the 90th percentile of a latency in milliseconds; None with too few samples."""
        return self.latency[name].quantile(QUANTILE)

    def meets(self, targets: Mapping[str, float]) -> bool:
        """Return whether the measured latencies are within `targets`. An unknown latency counts as within."""
        for name, target in targets.items():
            measured = self.measured(name)
            if measured is not None and measured > target:
                return False
        return True
