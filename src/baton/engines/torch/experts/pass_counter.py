"""Counts the experts of each forward pass, for the recorder, the balancer and the report of one engine."""

import logging
from collections.abc import Callable

from torch import Tensor

from baton.engines.torch.experts.balancer import ExpertBalancer, Placement
from baton.engines.torch.experts.counting import PassCounts, SlotCounter
from baton.engines.torch.experts.dump import ModelLayers
from baton.engines.torch.experts.limits import APPROXIMATE_STRIDE
from baton.engines.torch.experts.metrics import REPORT_PASSES, ExpertMetrics
from baton.engines.torch.experts.recorder import ExpertRecorder, PassRows
from baton.engines.torch.experts.settings import ExpertSettings
from baton.experts.placement import Layout

log = logging.getLogger(__name__)


class PassCounter:
    """Called before and after each pass, from the engine's thread only; `metrics` may be read from any thread."""

    def __init__(self, settings: ExpertSettings, placement: Placement) -> None:
        self.metrics = ExpertMetrics(settings.report_metrics)
        self.layers = ModelLayers(settings.layers, settings.sparse)
        self.recorder = ExpertRecorder(settings.recorder, settings.record_passes) if settings.recorder else None
        self._settings = settings
        self._placement = placement
        self._balancer = (
            ExpertBalancer(placement, settings.shape, settings.balancer, self.metrics.rebalanced)
            if settings.balancer is not None
            else None
        )
        self._passes = 0
        self._reported = 0
        self._slots = SlotCounter(placement.layout, settings.shape)

    @property
    def layout(self) -> Layout:
        """The current layout, a row per sparse layer."""
        return self._placement.layout

    @property
    def used(self) -> bool:
        """Whether anything reads the counts of passes."""
        reports = self._settings.report_log or self._settings.report_metrics
        return self.recorder is not None or self._balancer is not None or reports

    def wants(self) -> bool:
        """Whether the slots that the next pass chooses are needed."""
        recorded = self.recorder is not None and self.recorder.wants(self._passes)
        return recorded or self._reports() or (self._balancer is not None and self._balancer.wants())

    def after_pass(self, chosen: Tensor | None, describe: Callable[[], PassRows]) -> None:
        """Account for a pass, and move experts if it is time.

        `chosen` are the slots of each sparse layer, row and choice, if `wants` was true. `describe` returns the rows.
        """
        counts = None if chosen is None else self._slots.count(chosen)
        if counts is not None and chosen is not None:
            if self.recorder is not None and self.recorder.wants(self._passes):
                self.metrics.recorded(self.recorder.add(self._passes, counts, chosen, describe))
            if self._reports():
                self._report(counts)
        self._passes += 1
        if self._balancer is not None:
            used = counts if self._balancer.wants() else None
            if self._balancer.after_pass(used):
                self._slots = SlotCounter(self._placement.layout, self._settings.shape)

    def _reports(self) -> bool:
        """Whether the current pass is part of the report."""
        settings = self._settings
        if not (settings.report_log or settings.report_metrics):
            return False
        return settings.recorder != "stat_approx" or self._passes % APPROXIMATE_STRIDE == 0

    def _report(self, counts: PassCounts) -> None:
        self.metrics.observe(counts)
        self._reported += 1
        if self._settings.report_log and self._reported % REPORT_PASSES == 0:
            log.info("balancedness of experts: %.3f over %d passes", self.metrics.balancedness, REPORT_PASSES)
