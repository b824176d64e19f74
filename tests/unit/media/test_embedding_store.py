"""The embedding store: pinned rows stay, the least recently used others go, and requests never wait for each other."""

import asyncio

import pytest

from baton.errors import ConfigError, InvalidRequest
from baton.media.embedding_store import EmbeddingStore, Hold, Wanted
from baton.ports.transfer import EmbeddingShape
from baton.protocol.media import EncodedItem
from baton.testing import eventually, run_bounded

SHAPE = EmbeddingShape(model="m", dtype="float32", size=1024)  # four rows in a block of 16 KiB
BLOCK = 16 << 10


def item(name: str, rows: int = 4) -> EncodedItem:
    return EncodedItem(modality="image", content_hash=name, expansion=((7, rows),), embed_token=7, rows=rows)


async def put(store: EmbeddingStore, *names: str, blocks: int = 1) -> Hold:
    hold = await store.hold([Wanted(name, blocks * BLOCK) for name in names])
    assert hold is not None
    for slot in hold.new:
        hold.rows(slot)[:] = slot.content_hash.encode() * (slot.nbytes // len(slot.content_hash))
        hold.filled(slot, item(slot.content_hash, slot.nbytes // store.row_bytes))
    return hold


async def put_and_release(store: EmbeddingStore, *names: str, blocks: int = 1) -> None:
    (await put(store, *names, blocks=blocks)).release()


def test_rows_are_found_by_content_hash_and_counted() -> None:
    async def body() -> None:
        store = EmbeddingStore(SHAPE, 4 * BLOCK)
        await put_and_release(store, "a", "b")
        hold = store.hold_present(["b", "a", "b"])
        assert hold is not None
        assert [each.content_hash for each in hold.items] == ["b", "a", "b"]
        assert [bytes(hold.rows(slot)[:1]) for slot in hold.slots] == [b"b", b"a", b"b"]
        assert store.hold_present(["a", "c"]) is None
        assert (store.hits, store.misses, store.entries, store.pinned) == (3, 2, 2, 2)
        assert store.used_bytes == 2 * BLOCK
        hold.release()
        hold.release()
        assert store.pinned == 0

    run_bounded(body())


def test_the_least_recently_used_rows_are_evicted_and_pinned_ones_never() -> None:
    async def body() -> None:
        store = EmbeddingStore(SHAPE, 3 * BLOCK)
        for name in "abc":
            await put_and_release(store, name)
        held = store.hold_present(["a"])
        await put_and_release(store, "d")
        assert [store.has(name) for name in "abcd"] == [True, False, True, True]
        await put_and_release(store, "e", blocks=2)
        assert [store.has(name) for name in "acde"] == [True, False, False, True]
        assert held is not None
        assert bytes(held.rows(held.slots[0])) == b"a" * BLOCK

    run_bounded(body())


def test_a_request_waits_without_memory_until_all_of_its_rows_fit() -> None:
    async def body() -> None:
        store = EmbeddingStore(SHAPE, 3 * BLOCK)
        first, second = await put(store, "a"), await put(store, "b")
        large = asyncio.create_task(put(store, "c", "d"))
        small = asyncio.create_task(put(store, "e"))
        await asyncio.sleep(0.01)
        assert not large.done()
        assert not small.done(), "a small request does not overtake for ever"
        first.release()
        (await large).release()
        (await small).release()
        second.release()
        assert store.pinned == 0

    run_bounded(body())


def test_a_cancelled_wait_lets_the_next_request_go_on() -> None:
    async def body() -> None:
        store = EmbeddingStore(SHAPE, 2 * BLOCK)
        first = await put(store, "a")
        large = asyncio.create_task(put(store, "c", "d"))
        small = asyncio.create_task(put(store, "e"))
        await asyncio.sleep(0.01)
        large.cancel()
        (await small).release()
        first.release()
        assert store.pinned == 0

    run_bounded(body())


def test_rows_that_another_request_fills_are_waited_for() -> None:
    async def body() -> None:
        store = EmbeddingStore(SHAPE, 4 * BLOCK)
        filler = await store.hold([Wanted("a", BLOCK)])
        waiter = await store.hold([Wanted("a", BLOCK), Wanted("b", BLOCK)])
        assert filler is not None
        assert waiter is not None
        assert [slot.content_hash for slot in waiter.new] == ["b"]
        ready = asyncio.create_task(waiter.ready())
        await asyncio.sleep(0)
        assert not ready.done()
        filler.filled(filler.new[0], item("a"))
        assert await ready

    run_bounded(body())


def test_rows_that_were_not_filled_are_dropped_and_their_waiters_try_again() -> None:
    async def body() -> None:
        store = EmbeddingStore(SHAPE, 4 * BLOCK)
        filler = await store.hold([Wanted("a", BLOCK)])
        waiter = await store.hold([Wanted("a", None)])
        assert filler is not None
        assert waiter is not None
        filler.release()
        assert not await waiter.ready()
        waiter.release()
        assert (store.entries, store.used_bytes) == (0, 0)
        assert await store.hold([Wanted("a", None)]) is None
        await put_and_release(store, "a")
        await eventually(lambda: store.pinned == 0)

    run_bounded(body())


def test_rows_that_can_never_fit_are_refused() -> None:
    async def body() -> None:
        store = EmbeddingStore(SHAPE, 3 * BLOCK)
        with pytest.raises(InvalidRequest, match="--media-cache-bytes"):
            await put(store, "a", "b", blocks=2)
        await put_and_release(store, "a", "a", "a", blocks=2)
        with pytest.raises(ConfigError, match="--media-cache-bytes"):
            EmbeddingStore(SHAPE, BLOCK - 1)
        with pytest.raises(ConfigError, match="complex64"):
            EmbeddingStore(EmbeddingShape(model="m", dtype="complex64", size=1), BLOCK)

    run_bounded(body())


def test_the_memory_is_whole_rows_and_a_sealed_file() -> None:
    async def body() -> None:
        store = EmbeddingStore(EmbeddingShape(model="m", dtype="bfloat16", size=576), 1 << 20)
        memory = store.memory
        assert memory.block_bytes % store.row_bytes == 0
        assert (memory.planes, memory.nbytes) == (1, memory.blocks * memory.block_bytes)
        assert memory.descriptor is not None
        store.close()
        store.close()

    run_bounded(body())
