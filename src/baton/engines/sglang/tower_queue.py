"""Items that wait for the vision tower, and the batches that it encodes on its thread. Event-loop thread only."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, NamedTuple

from baton.engine_kit.threads import fail, resolve
from baton.engines.sglang.preprocessing import Patches
from baton.errors import BatonError, EngineFailed

if TYPE_CHECKING:
    from torch import Tensor

BATCH_PATCHES = 16_384  # of one forward; a larger item is a batch of its own


class Waiting(NamedTuple):
    """An item that waits for the tower."""

    patches: Patches
    rows: "asyncio.Future[Tensor]"


class TowerQueue:
    """Encodes items with `encode`, which takes a batch and runs on the one thread of `thread`."""

    def __init__(self, encode: "Callable[[Sequence[Patches]], list[Tensor]]", thread: Executor) -> None:
        self.batches = 0
        self._encode = encode
        self._thread = thread
        self._items: list[Waiting] = []
        self._added = asyncio.Event()
        self._ended: BatonError | None = None
        self._running = asyncio.create_task(self._run(), name="sglang-tower")

    async def encode(self, patches: Sequence[Patches]) -> "list[Tensor]":
        """Return the rows of each item. Cancelling the call withdraws what is not being encoded. Raises EngineFailed,
        or the error given to `close`."""
        if self._ended is not None:
            raise self._ended
        waiting = [Waiting(each, asyncio.get_running_loop().create_future()) for each in patches]
        self._items += waiting
        self._added.set()
        try:
            return [await each.rows for each in waiting]
        finally:
            for each in waiting:
                each.rows.cancel()

    async def close(self, error: BatonError) -> None:
        """End every call with `error`; on return the tower is not used. Idempotent."""
        if self._ended is not None:
            return
        self._ended = error
        self._running.cancel()
        await asyncio.wait([self._running])
        await asyncio.get_running_loop().run_in_executor(self._thread, lambda: None)  # after the batch that still runs
        _fail(self._items, self._ended)

    async def _run(self) -> None:
        while True:
            await self._added.wait()
            batch, self._items = take_batch(self._items)
            if batch:
                await self._encode_batch(batch)
            else:
                self._added.clear()

    async def _encode_batch(self, batch: list[Waiting]) -> None:
        patches = [each.patches for each in batch]
        try:
            rows = await asyncio.get_running_loop().run_in_executor(self._thread, self._encode, patches)
        except asyncio.CancelledError:
            self._items += batch  # for `close`
            raise
        except Exception as error:  # noqa: BLE001 - raised in the callers; too little memory, for example
            _fail(batch, EngineFailed(f"SGLang's tower failed: {error!r}"))
            return
        self.batches += 1
        for each, result in zip(batch, rows, strict=True):
            resolve(each.rows, result)


def take_batch(items: Sequence[Waiting]) -> tuple[list[Waiting], list[Waiting]]:
    """Return the next batch, and the rest without those that nothing waits for any more.

    The oldest item is in it, and those of its modality that follow while they fit.
    """
    batch: list[Waiting] = []
    rest: list[Waiting] = []
    free = BATCH_PATCHES
    for each in items:
        if each.rows.done():
            continue
        if not batch or (_fits(each, batch[0]) and free >= len(each.patches.pixels)):
            batch.append(each)
            free -= len(each.patches.pixels)
        else:
            rest.append(each)
    return batch, rest


def _fits(item: Waiting, first: Waiting) -> bool:
    return item.patches.item.modality == first.patches.item.modality


def _fail(items: Sequence[Waiting], error: BatonError) -> None:
    for each in items:
        fail(each.rows, error)
