"""Copies between host and device that nothing waits for: through pinned memory, in the order of the stream."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(values: "np.ndarray[Any, Any]", device: torch.device) -> Tensor:
    """Return `values` on `device`. The copy is queued; the host's memory is kept until it is done."""
    source = torch.from_numpy(values)
    if device.type == "cpu":
        return source
    host = torch.empty_like(source, pin_memory=True)
    host.numpy()[...] = values  # torch would wake its threads to copy some thousand numbers
    return host.to(device, non_blocking=True)


class HostCopy:
    """The content of a tensor of the device, on its way to the host."""

    def __init__(self, source: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if source.device.type == "cpu":
            self._host = source
            return
        self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        self._host.copy_(source, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(source.device))

    def wait(self) -> list[Any]:
        """Return the values as lists when they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        values: list[Any] = self._host.tolist()
        return values
