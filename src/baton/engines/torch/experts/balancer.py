"""Live rebalancing: plans a layout from the counts of recent passes, and moves experts between two passes.

pass      1 ... interval - window | ... interval | interval + 1 | ...
counts    none                    | summed       | none: layers are moved, a chunk after each pass
"""

import logging
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from baton.engines.torch.experts.counting import PassCounts
from baton.engines.torch.experts.limits import APPROXIMATE_STRIDE, BalancerOptions
from baton.experts.moves import moved
from baton.experts.placement import Balance, Layout, Row, Shape, measure, plan

log = logging.getLogger(__name__)


class Placement(Protocol):
    """The slots of a model's experts."""

    @property
    def layout(self) -> Layout:
        """The logical expert in each slot, a row per sparse layer."""

    def place(self, layer: int, row: Row) -> None:
        """Give sparse layer `layer` the experts of `row`. Called between two steps."""


class Rebalance(NamedTuple):
    """A finished or skipped rebalance: balancedness of the counted load before and after it, and its cost."""

    before: Balance
    after: Balance
    moved: int
    skipped: bool
    seconds: float


class ExpertBalancer:
    """Rebalances one model. Used from the engine's thread only.

    A pass is announced by `wants` and ended by `after_pass`. All layers are planned from the same counts, a chunk of
    them after each pass, so that a chunk bounds the time between two passes.
    """

    def __init__(
        self,
        placement: Placement,
        shape: Shape,
        options: BalancerOptions,
        report: Callable[[Rebalance], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._placement = placement
        self._shape = shape
        self._options = options
        self._report = report
        self._clock = clock
        self._todo: list[int] = []
        self._balancedness: list[float] = []
        self._counted: list[list[float]] = []
        self._layout_before: Layout = []
        self._reset()

    @property
    def moving(self) -> bool:
        """Whether a rebalance has begun and has layers left."""
        return bool(self._todo)

    def wants(self) -> bool:
        """Whether the counts of the next pass are needed."""
        left = self._options.interval - self._passes
        if self.moving or left > self._options.window:
            return False
        return not self._options.approximate or left % APPROXIMATE_STRIDE == 1  # the last pass is always counted

    def after_pass(self, counts: PassCounts | None) -> bool:
        """Account for a pass, and rebalance if it is time. `counts` are those of the pass if `wants` was true.

        Return whether experts may have been moved.
        """
        if self.moving:
            self._move_chunk()
            return True
        self._passes += 1
        if counts is not None:
            self._loads += counts.experts
            self._balancedness.append(counts.balancedness)
        if self._passes < self._options.interval:
            return False
        self._begin()
        return True

    def _begin(self) -> None:
        layout = [list(row) for row in self._placement.layout]
        loads: list[list[float]] = self._loads.astype(float).tolist()
        self._counted, self._layout_before = loads, layout
        mean = sum(self._balancedness) / len(self._balancedness) if self._balancedness else 1.0
        if not any(map(any, loads)) or mean > self._options.utilization_threshold:
            balance = measure(loads, layout, self._shape.ranks)
            log.info("experts stay: balancedness %.3f over %d passes", mean, len(self._balancedness))
            self._end(Rebalance(balance, balance, 0, True, 0.0))
            return
        self._todo = list(range(len(layout)))
        self._move_chunk()

    def _move_chunk(self) -> None:
        start = self._clock()
        size = self._options.layers_per_chunk or len(self._todo)
        chunk, self._todo = self._todo[:size], self._todo[size:]
        for layer in chunk:
            self._moved += self._move_layer(layer)
        self._seconds += self._clock() - start
        if not self._todo:
            self._finish()

    def _move_layer(self, layer: int) -> int:
        loads, current, shape = self._counted[layer], self._layout_before[layer], self._shape
        (row,) = plan([loads], shape, self._options.algorithm, previous=[current])
        changed = moved(row, current)
        if changed:
            self._placement.place(layer, row)
        return changed

    def _finish(self) -> None:
        ranks = self._shape.ranks
        before = measure(self._counted, self._layout_before, ranks)
        after = measure(self._counted, self._placement.layout, ranks)
        log.info(
            "experts rebalanced: balancedness %.3f, was %.3f, by the counts of %d passes; %d slots changed in %.0f ms",
            after.balancedness,
            before.balancedness,
            len(self._balancedness),
            self._moved,
            self._seconds * 1e3,
        )
        self._end(Rebalance(before, after, self._moved, False, self._seconds))

    def _end(self, done: Rebalance) -> None:
        self._report(done)
        self._reset()

    def _reset(self) -> None:
        self._passes = 0
        self._loads = np.zeros((len(self._placement.layout), self._shape.experts), dtype=np.int64)
        self._balancedness, self._counted, self._layout_before = [], [], []
        self._moved = 0
        self._seconds = 0.0
