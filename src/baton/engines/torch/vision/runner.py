"""A vision tower in memory: patches in, rows on the host out. Used from one thread, like the step of the engine.

On a CPU it computes in float32, whatever the type of the rows: few CPUs multiply bfloat16 faster.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.config.engines import TorchOptions
from baton.engines.torch.arena import find_device
from baton.engines.torch.loader import Report, load_weights
from baton.engines.torch.vision.idefics3 import Idefics3Layout
from baton.engines.torch.vision.idefics3_tower import Idefics3Tower
from baton.engines.torch.vision.identity import tower_tensor
from baton.engines.torch.vision.pixels import Pixels
from baton.engines.torch.vision.qwen import QwenLayout
from baton.engines.torch.vision.qwen_tower import QwenTower
from baton.engines.torch.vision.tower import Tower
from baton.errors import ConfigError

# Waking a thread for fewer patches costs more than it saves, on a busy machine many times more.
_PATCHES_PER_THREAD = 128


def row_type(options: TorchOptions) -> torch.dtype:
    """Return the type of rows: that of the language model's weights."""
    return torch.float32 if options.dtype == "float32" else torch.bfloat16


class TowerRunner:
    """The tower of the model in `directory`. Of its weights, only those of the tower and the connector are read."""

    def __init__(
        self, options: TorchOptions, directory: Path, layout: Idefics3Layout | QwenLayout, report: Report
    ) -> None:
        """Load the weights, which takes seconds. Raises ConfigError for a missing device or wrong weights."""
        self._threads = options.threads or len(os.sched_getaffinity(0))
        self._device = find_device(options.device)
        self._dtype = torch.float32 if self._device.type == "cpu" else row_type(options)
        self._row_type = row_type(options)
        self.tower = self._build(layout)
        load_weights(directory, self.tower.parts, report, tower_tensor)
        if any(not part.isfinite().all() for part in self.tower.parts.values()):
            raise ConfigError(
                f"the weights in {directory} are broken: the vision tower has numbers that are not finite"
            )
        self._table = layout.colours.table()
        self._device_table = torch.from_numpy(self._table).to(self._device, self._dtype)

    @property
    def survives_errors(self) -> bool:
        """Whether it can be used after a failed computation: a GPU is in an unknown state then."""
        return self._device.type == "cpu"

    @property
    def batch_patches(self) -> int:
        """How many patches make a good batch."""
        return 1024 if self._device.type == "cpu" else 16384

    def encode(self, parts: Sequence[Pixels], grid: tuple[int, int]) -> Pixels:
        """Return the rows of parts [patch, value] of equal `grid`, as bytes [part, byte]."""
        patches = np.stack(parts)
        torch.set_num_threads(max(1, min(self._threads, patches.shape[0] * patches.shape[1] // _PATCHES_PER_THREAD)))
        with torch.inference_mode():
            rows = self.tower.forward(self._normalised(patches), grid)
            return rows.to("cpu", self._row_type).flatten(1).contiguous().view(torch.uint8).numpy()

    def _build(self, layout: Idefics3Layout | QwenLayout) -> Tower:
        def tensor(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=self._dtype, device=self._device)

        match layout:
            case Idefics3Layout():
                return Idefics3Tower(layout.config, tensor)
            case QwenLayout():
                return QwenTower(layout.config, tensor)

    def _normalised(self, patches: Pixels) -> Tensor:
        """Return the colours of patches as numbers."""
        if self._device.type == "cpu":
            return torch.from_numpy(normalise(patches, self._table))
        channels = len(self._table)
        values = torch.from_numpy(patches).to(self._device).view(*patches.shape[:2], channels, -1).long()
        offsets = 256 * torch.arange(channels, device=self._device)[:, None]
        return self._device_table.flatten()[values + offsets].flatten(-2)


def normalise(patches: Pixels, table: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the numbers for the colours of patches [part, patch, value], which are ordered by channel."""
    channels = patches.reshape(*patches.shape[:2], len(table), -1)
    numbers = np.empty(channels.shape, dtype=np.float32)
    for channel, numbers_of in enumerate(table):
        numbers[:, :, channel] = numbers_of[channels[:, :, channel]]
    return numbers.reshape(patches.shape)
