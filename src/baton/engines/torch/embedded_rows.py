"""Rows of media as tensors, on the device and in the precision of the model, while a prompt is computed."""

import ctypes
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from baton.engines.torch.native.decoder import EmbeddedRows
from baton.engines.torch.prompt_media import PromptMedia
from baton.engines.torch.scheduler import Chunk
from baton.errors import EngineFailed
from baton.protocol.media import MediaEmbedding

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class MediaRows:
    """The rows of the prompts that are being computed. Used from the engine's thread."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._tensors: WeakKeyDictionary[PromptMedia, list[Tensor]] = WeakKeyDictionary()

    def of(self, chunk: Chunk) -> list[EmbeddedRows]:
        """Return the rows of media in a chunk, each with the row of the chunk from which on they are."""
        media, stop = chunk.sequence.media, chunk.start + chunk.length
        if media is None or chunk.start >= media.rows_end:
            return []
        tensors = self._tensors.get(media)
        if tensors is None:
            tensors = self._tensors[media] = [self._tensor(item) for item in media.items]
        found = [
            EmbeddedRows(run.start - chunk.start, tensors[run.number][run.row : run.row + run.length])
            for run in media.rows_in(chunk.start, stop)
        ]
        if stop >= media.rows_end:  # a preempted sequence converts them again
            self._tensors.pop(media)
        return found

    def _tensor(self, item: MediaEmbedding) -> Tensor:
        if item.data is None:
            raise EngineFailed("the rows of media are not on this worker")
        rows = _as_tensor(item.data, _DTYPES[item.dtype]).view(item.item.rows, item.size)
        return rows.to(device=self._device, dtype=self._dtype)


def _as_tensor(data: memoryview, dtype: torch.dtype) -> Tensor:
    """Return the numbers in `data`, not copied: they are only read, and `data` may be read-only."""
    if not data.nbytes:
        return torch.empty(0, dtype=dtype)
    source = np.frombuffer(data, dtype=np.uint8)
    memory = (ctypes.c_uint8 * data.nbytes).from_address(source.ctypes.data)
    memory.source = source  # type: ignore[attr-defined]  # keeps `data` alive as long as the tensor
    return torch.frombuffer(memory, dtype=dtype)
