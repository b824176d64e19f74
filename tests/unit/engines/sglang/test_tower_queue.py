"""Which items the tower encodes together, and how waiting for it ends. No SGLang."""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from baton.engines.sglang.preprocessing import Patches
from baton.engines.sglang.tower_queue import BATCH_PATCHES, TowerQueue, Waiting, take_batch
from baton.errors import EngineDead, EngineFailed
from baton.protocol.media import EncodedItem
from baton.testing.bounded import eventually, run_bounded


def patches_of(modality: str, patches: int) -> Patches:
    item = EncodedItem(modality=modality, content_hash="", expansion=((1, 1),), embed_token=1, rows=1)
    pixels: Any = range(patches)
    return Patches(item, pixels)


def waiting(modality: str, patches: int) -> Waiting:
    return Waiting(patches_of(modality, patches), asyncio.get_running_loop().create_future())


def test_a_batch_has_the_oldest_item_and_others_of_its_modality_while_they_fit() -> None:
    async def body() -> None:
        image, video, small = waiting("image", BATCH_PATCHES - 4), waiting("video", 4), waiting("image", 4)
        large = waiting("image", BATCH_PATCHES + 1)
        assert take_batch([image, video, small, large]) == ([image, small], [video, large])
        assert take_batch([video, large]) == ([video], [large])
        assert take_batch([large]) == ([large], []), "an item that fits no batch is one of its own"
        assert take_batch([]) == ([], [])

    run_bounded(body(), 5)


def test_what_nothing_waits_for_is_not_encoded() -> None:
    async def body() -> None:
        gone, kept = waiting("video", 4), waiting("image", 4)
        gone.rows.cancel()
        assert take_batch([gone, kept]) == ([kept], [])

    run_bounded(body(), 5)


class ScriptedTower:
    """Encodes an item to its number of patches, when `free` is set; fails for items without patches."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.begun = threading.Event()
        self.batches: list[int] = []

    def encode(self, batch: Sequence[Patches]) -> list[Any]:
        self.batches.append(len(batch))
        self.begun.set()
        self.free.wait(10)
        return [len(each.pixels) ** 2 // len(each.pixels) for each in batch]


def test_items_that_wait_are_one_batch_and_a_failure_ends_only_its_own() -> None:
    async def body() -> None:
        tower = ScriptedTower()
        with ThreadPoolExecutor(1) as thread:
            queue = TowerQueue(tower.encode, thread)
            first = asyncio.create_task(queue.encode([patches_of("image", 7)]))
            await eventually(tower.begun.is_set)
            others = [
                asyncio.create_task(queue.encode([patches_of("image", n), patches_of("image", n)])) for n in (2, 3)
            ]
            gone = asyncio.create_task(queue.encode([patches_of("image", 9)]))
            broken = asyncio.create_task(queue.encode([patches_of("video", 0)]))
            await asyncio.sleep(0)
            gone.cancel()
            await asyncio.sleep(0)
            tower.free.set()
            assert [await each for each in (first, *others)] == [[7], [2, 2], [3, 3]]
            with pytest.raises(EngineFailed, match="ZeroDivisionError"):
                await broken
            assert tower.batches == [1, 4, 1]
            await queue.close(EngineDead("over"))

    run_bounded(body(), 10)


def test_a_queue_that_closes_ends_every_call_after_the_batch_that_runs() -> None:
    async def body() -> None:
        tower = ScriptedTower()
        with ThreadPoolExecutor(1) as thread:
            queue = TowerQueue(tower.encode, thread)
            calls = [asyncio.create_task(queue.encode([patches_of(kind, 5)])) for kind in ("image", "video")]
            await eventually(tower.begun.is_set)
            closing = asyncio.create_task(queue.close(EngineDead("over")))
            await asyncio.sleep(0)
            tower.free.set()
            await closing
            for call in (*calls, queue.encode([patches_of("image", 5)])):
                with pytest.raises(EngineDead, match="over"):
                    await call
            assert tower.batches == [1]

    run_bounded(body(), 10)
