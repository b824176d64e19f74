"""The KV cache of the echo engine: for each token of a prompt one number, from which the text can be said again.

The number of a token is the token itself; that of a row of media has the characters that the row says. So KV that was
moved wrongly, or not at all, shows in the answer.
"""

import ctypes
import fcntl
import mmap
import os
from array import array
from collections.abc import Sequence

from baton.engines.echo.blocks import BLOCK
from baton.ports.transfer import BlockMemory, KvShape

NUMBER_BYTES = 8


class EchoKv:
    """Memory for `blocks` blocks, which other processes can map."""

    def __init__(self, blocks: int, model: str) -> None:
        nbytes = blocks * BLOCK * NUMBER_BYTES
        self._descriptor = os.memfd_create("baton-echo-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._descriptor, nbytes)
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._pages = mmap.mmap(self._descriptor, nbytes, flags=mmap.MAP_SHARED)
        self._numbers = memoryview(self._pages).cast("q")
        self.memory = BlockMemory(
            shape=KvShape(model=model, dtype="int64", layers=1, kv_heads=1, head_dim=1, block_size=BLOCK),
            address=ctypes.addressof(ctypes.c_char.from_buffer(self._pages)),
            planes=1,
            plane_bytes=nbytes,
            block_bytes=BLOCK * NUMBER_BYTES,
            blocks=blocks,
            descriptor=self._descriptor,
        )

    def write(self, numbers: Sequence[int], blocks: Sequence[int], first: int) -> None:
        """Write the numbers of a prompt into its blocks, from its block `first` on."""
        for start in range(first * BLOCK, len(numbers), BLOCK):
            part = array("q", numbers[start : start + BLOCK])
            place = blocks[start // BLOCK] * BLOCK
            self._numbers[place : place + len(part)] = part

    def read(self, count: int, blocks: Sequence[int]) -> list[int]:
        """Return the first `count` numbers of a prompt."""
        numbers: list[int] = []
        for block in blocks[: -(-count // BLOCK)]:
            numbers += self._numbers[block * BLOCK : (block + 1) * BLOCK]
        return numbers[:count]

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
