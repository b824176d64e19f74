"""Metrics of experts in Prometheus' format: balancedness, rebalances, and what the recorder holds."""

from collections import deque
from typing import TYPE_CHECKING, Literal

from prometheus_client import CollectorRegistry, generate_latest

from baton.metrics.families import Counted, Family, Label

if TYPE_CHECKING:  # the page of all metrics is made without torch
    from baton.engines.torch.experts.balancer import Rebalance
    from baton.engines.torch.experts.counting import PassCounts

REPORT_PASSES = 100  # balancedness is a mean over so many counted passes


def _family(name: str, kind: Literal["counter", "gauge"], unit: str, meaning: str, *labels: Label) -> Family:
    processes = ("aggregated", "prefill", "decode")
    return Family(name=name, kind=kind, unit=unit, meaning=meaning, processes=processes, labels=labels)


BALANCEDNESS = _family(
    "baton_experts_balancedness_ratio",
    "gauge",
    "ratio",
    f"Mean load / maximum load of the ranks, mean of the last {REPORT_PASSES} counted passes",
)
CHOICES = _family(
    "baton_experts_rank_choices_total",
    "counter",
    "rows",
    "Rows computed by the experts of a rank, in counted passes",
    Label("rank", source="expert-parallel ranks of the settings"),
)
RECORDED = _family("baton_experts_recorded_passes_total", "counter", "passes", "Passes recorded")
DROPPED = _family("baton_experts_dropped_passes_total", "counter", "passes", "Recorded passes dropped for newer ones")
REBALANCES = _family(
    "baton_experts_rebalances_total",
    "counter",
    "rebalances",
    "Rebalances by outcome",
    Label("outcome", ("moved", "unchanged", "skipped")),
)
MOVED = _family("baton_experts_moved_slots_total", "counter", "slots", "Slots that got another expert in a rebalance")
REBALANCE_SECONDS = _family(
    "baton_experts_rebalance_seconds_total", "counter", "seconds", "Time that rebalances took between steps"
)
PLANNED = _family(
    "baton_experts_rebalance_balancedness_ratio",
    "gauge",
    "ratio",
    "Balancedness of the load counted for the last rebalance, in the layout before and after it",
    Label("layout", ("before", "after")),
)
FAMILIES = (BALANCEDNESS, CHOICES, RECORDED, DROPPED, REBALANCES, MOVED, REBALANCE_SECONDS, PLANNED)


class ExpertMetrics:
    """Set from the engine's thread, read from any. Without `reports` there is no balancedness of passes."""

    def __init__(self, reports: bool) -> None:
        self._registry = registry = CollectorRegistry()
        reported = registry if reports else CollectorRegistry()
        self._recent: deque[float] = deque(maxlen=REPORT_PASSES)
        self._balancedness = Counted(BALANCEDNESS, reported)
        self._choices = Counted(CHOICES, reported)
        self._recorded = Counted(RECORDED, registry)
        self._dropped = Counted(DROPPED, registry)
        self._rebalances = Counted(REBALANCES, registry)
        self._moved = Counted(MOVED, registry)
        self._seconds = Counted(REBALANCE_SECONDS, registry)
        self._planned = Counted(PLANNED, registry)

    @property
    def balancedness(self) -> float:
        """The mean of recent passes."""
        return sum(self._recent) / len(self._recent) if self._recent else 1.0

    def observe(self, counts: "PassCounts") -> None:
        """Account for a counted pass."""
        self._recent.append(counts.balancedness)
        self._balancedness.set(self.balancedness)
        for rank, load in enumerate(counts.ranks.sum(0).tolist()):
            self._choices.labels(str(rank)).inc(load)

    def recorded(self, dropped: int) -> None:
        """Account for a recorded pass, for which `dropped` older ones were dropped."""
        self._recorded.inc()
        self._dropped.inc(dropped)

    def rebalanced(self, done: "Rebalance") -> None:
        """Account for a rebalance."""
        self._rebalances.labels("skipped" if done.skipped else "moved" if done.moved else "unchanged").inc()
        self._moved.inc(done.moved)
        self._seconds.inc(done.seconds)
        self._planned.labels("before").set(done.before.balancedness)
        self._planned.labels("after").set(done.after.balancedness)

    def text(self) -> str:
        """Return the metrics as Prometheus text. Any thread."""
        return generate_latest(self._registry).decode()
