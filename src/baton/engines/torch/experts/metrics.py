"""Metrics of experts in Prometheus' format: balancedness, rebalances, and what the recorder holds."""

from collections import deque

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from baton.engines.torch.experts.balancer import Rebalance
from baton.engines.torch.experts.counting import PassCounts

REPORT_PASSES = 100  # balancedness is a mean over so many counted passes


class ExpertMetrics:
    """Set from the engine's thread, read from any. Without `reports` there is no balancedness of passes."""

    def __init__(self, reports: bool) -> None:
        self._registry = CollectorRegistry()
        reported = self._registry if reports else None
        self._recent: deque[float] = deque(maxlen=REPORT_PASSES)
        self._balancedness = Gauge(
            "baton_experts_balancedness_ratio",
            f"Mean load / maximum load of the ranks, mean of the last {REPORT_PASSES} counted passes",
            registry=reported,
        )
        self._choices = Counter(
            "baton_experts_rank_choices",
            "Rows computed by the experts of a rank, in counted passes",
            ["rank"],
            registry=reported,
        )
        self._recorded = Counter("baton_experts_recorded_passes", "Passes recorded", registry=self._registry)
        self._dropped = Counter(
            "baton_experts_dropped_passes", "Recorded passes dropped for newer ones", registry=self._registry
        )
        self._rebalances = Counter(
            "baton_experts_rebalances", "Rebalances by outcome", ["outcome"], registry=self._registry
        )
        self._moved = Counter(
            "baton_experts_moved_slots", "Slots that got another expert in a rebalance", registry=self._registry
        )
        self._seconds = Counter(
            "baton_experts_rebalance_seconds", "Time that rebalances took between steps", registry=self._registry
        )
        self._planned = Gauge(
            "baton_experts_rebalance_balancedness_ratio",
            "Balancedness of the load counted for the last rebalance, in the layout before and after it",
            ["layout"],
            registry=self._registry,
        )

    @property
    def balancedness(self) -> float:
        """The mean of recent passes."""
        return sum(self._recent) / len(self._recent) if self._recent else 1.0

    def observe(self, counts: PassCounts) -> None:
        """Account for a counted pass."""
        self._recent.append(counts.balancedness)
        self._balancedness.set(self.balancedness)
        for rank, load in enumerate(counts.ranks.sum(0).tolist()):
            self._choices.labels(rank).inc(load)

    def recorded(self, dropped: int) -> None:
        """Account for a recorded pass, for which `dropped` older ones were dropped."""
        self._recorded.inc()
        self._dropped.inc(dropped)

    def rebalanced(self, done: Rebalance) -> None:
        """Account for a rebalance."""
        self._rebalances.labels("skipped" if done.skipped else "moved" if done.moved else "unchanged").inc()
        self._moved.inc(done.moved)
        self._seconds.inc(done.seconds)
        self._planned.labels("before").set(done.before.balancedness)
        self._planned.labels("after").set(done.after.balancedness)

    def text(self) -> str:
        """Return the metrics as Prometheus text. Any thread."""
        return generate_latest(self._registry).decode()
