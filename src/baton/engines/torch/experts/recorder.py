"""The expert-distribution recorder: keeps the counts of passes, or every choice, until they are written.

Bounded in passes and in bytes. When a bound is reached the oldest pass is dropped, and counted.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from baton.engines.torch.experts.counting import PassCounts
from baton.engines.torch.experts.limits import APPROXIMATE_STRIDE, MAX_RECORD_BYTES, Mode
from baton.experts.placement import Layout

Recorded = npt.NDArray[np.int32]


class PassRows(NamedTuple):
    """The rows of a pass, prompts first: `extend_lengths` are the rows of each sequence, `prompts` how many extend."""

    tokens: list[int]
    positions: list[int]
    extend_lengths: list[int]
    prompts: int


class RecordedPass(NamedTuple):
    """What the recorder keeps of a pass: `counts` per expert (stat) or per slot; `chosen` and `rows` with per_token."""

    number: int
    counts: Recorded
    balancedness: float
    chosen: Recorded | None = None
    rows: PassRows | None = None

    @property
    def nbytes(self) -> int:
        """Approximate memory of this pass."""
        if self.chosen is None or self.rows is None:
            return self.counts.nbytes
        return self.counts.nbytes + self.chosen.nbytes + 16 * len(self.rows.tokens)


class Records(NamedTuple):
    """The passes that the recorder holds, oldest first, how many older ones it has dropped, and the current layout."""

    mode: Mode
    passes: list[RecordedPass]
    dropped: int
    layout: Layout


class ExpertRecorder:
    """Records passes between `start` and `stop`. Used from the engine's thread only."""

    def __init__(self, mode: Mode, max_passes: int | None, max_bytes: int = MAX_RECORD_BYTES) -> None:
        """Keep at most the last `max_passes` passes, None for as many as fit, and at most `max_bytes`."""
        self.mode = mode
        self.recording = False
        self.dropped = 0
        self._max_passes = max_passes
        self._max_bytes = max_bytes
        self._passes: deque[RecordedPass] = deque()
        self._nbytes = 0

    @property
    def passes(self) -> int:
        """How many passes are held."""
        return len(self._passes)

    def start(self) -> None:
        """Begin with an empty record."""
        self._passes.clear()
        self._nbytes = self.dropped = 0
        self.recording = True

    def stop(self) -> None:
        """Record no further passes; those recorded stay."""
        self.recording = False

    def wants(self, number: int) -> bool:
        """Whether the pass with this number is recorded."""
        return self.recording and (self.mode != "stat_approx" or number % APPROXIMATE_STRIDE == 0)

    def add(self, number: int, counts: PassCounts, chosen: Tensor, describe: Callable[[], PassRows]) -> int:
        """Record a pass; return how many older ones were dropped for it."""
        match self.mode:
            case "stat" | "stat_approx":
                recorded = RecordedPass(number, counts.experts.astype(np.int32), counts.balancedness)
            case "per_pass":
                recorded = RecordedPass(number, counts.slots.astype(np.int32), counts.balancedness)
            case "per_token":
                copied = np.array(chosen.cpu().numpy(), dtype=np.int32)  # the next step may overwrite `chosen`
                recorded = RecordedPass(number, counts.slots.astype(np.int32), counts.balancedness, copied, describe())
        self._passes.append(recorded)
        self._nbytes += recorded.nbytes
        return self._drop_oldest()

    def records(self, layout: Layout) -> Records:
        """Return what is recorded, and a copy of `layout`. Nothing in it changes, so another thread may write it."""
        return Records(self.mode, list(self._passes), self.dropped, [list(row) for row in layout])

    def forget(self, written: Records) -> None:
        """Drop passes that have been written; later ones stay."""
        if not written.passes:
            return
        last, kept = written.passes[-1].number, len(self._passes)
        while self._passes and self._passes[0].number <= last:
            self._nbytes -= self._passes.popleft().nbytes
        # Of the passes dropped since, those that were written are not lost.
        dropped_since = len(written.passes) - (kept - len(self._passes))
        self.dropped = max(0, self.dropped - written.dropped - dropped_since)

    def _drop_oldest(self) -> int:
        count = 0
        while self._passes and self._full():
            self._nbytes -= self._passes.popleft().nbytes
            count += 1
        self.dropped += count
        return count

    def _full(self) -> bool:
        too_many = self._max_passes is not None and len(self._passes) > self._max_passes
        return too_many or self._nbytes > self._max_bytes
