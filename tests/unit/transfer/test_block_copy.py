"""Block numbers become the right spans of memory, and invalid input is refused before memory is touched."""

import threading

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import PeerLost
from baton.ports.transfer import BlockMemory
from baton.transfer.block_copy import (
    Spans,
    Stop,
    block_numbers,
    block_pairs,
    copy_blocks,
    copy_blocks_with_numpy,
    load_copier,
    paired_spans,
    require_alike,
    require_host,
    require_sound,
    spans,
)
from tests.unit.transfer.kv_caches import SHAPE, Cache, content, expected

MEMORY = BlockMemory(shape=SHAPE, address=1 << 40, planes=3, plane_bytes=1000, block_bytes=10, blocks=90)
blocks_of_90 = st.lists(st.integers(0, 89), max_size=30) | st.builds(
    lambda start, size: list(range(start, start + size)), st.integers(0, 40), st.integers(0, 50)
)


def bytewise(memory: BlockMemory, blocks: list[int]) -> list[int]:
    """Every address of `blocks`, one byte at a time."""
    planes = [memory.address + plane * memory.plane_bytes for plane in range(memory.planes)]
    size = memory.block_bytes
    return [plane + block * size + byte for plane in planes for block in blocks for byte in range(size)]


def addresses(found: Spans) -> list[int]:
    pairs = zip(found.addresses.tolist(), found.lengths.tolist(), strict=True)
    return [address + byte for address, length in pairs for byte in range(length)]


@given(blocks_of_90)
def test_spans_are_plane_by_plane_in_the_order_of_the_blocks(blocks: list[int]) -> None:
    found = spans(MEMORY, block_numbers(MEMORY, blocks))
    assert addresses(found) == bytewise(MEMORY, blocks)
    assert found.nbytes == len(blocks) * MEMORY.planes * MEMORY.block_bytes


@given(st.data(), blocks_of_90)
def test_paired_spans_are_cut_alike(data: st.DataObject, theirs: list[int]) -> None:
    mine = data.draw(st.lists(st.integers(0, 89), min_size=len(theirs), max_size=len(theirs)))
    other = msgspec.structs.replace(MEMORY, address=1 << 41, plane_bytes=2000)
    source, target = paired_spans(other, np.array(theirs, np.int64), MEMORY, np.array(mine, np.int64))
    assert source.lengths.tolist() == target.lengths.tolist()
    assert addresses(source) == bytewise(other, theirs)
    assert addresses(target) == bytewise(MEMORY, mine)


def test_adjacent_blocks_are_one_span() -> None:
    found = spans(MEMORY, block_numbers(MEMORY, [4, 5, 6, 8, 7]))
    assert found.lengths.tolist() == [30, 10, 10] * 3


@pytest.mark.parametrize("blocks", [[-1], [90], [0, 5, 90], [2**70], ["a"], [[1]], [None]])
def test_block_numbers_outside_the_cache_are_refused(blocks: list[int]) -> None:
    with pytest.raises(PeerLost):
        block_numbers(MEMORY, blocks)


def test_both_lists_must_be_equally_long() -> None:
    with pytest.raises(PeerLost, match="2 blocks cannot be copied into 1"):
        block_pairs(MEMORY, [1, 2], MEMORY, [1])


@pytest.mark.parametrize(("field", "value"), [("model", "other"), ("dtype", "float32"), ("head_dim", 9)])
def test_the_error_names_the_field_that_differs_in_shape(field: str, value: object) -> None:
    other = msgspec.structs.replace(MEMORY, shape=msgspec.structs.replace(SHAPE, **{field: value}))
    with pytest.raises(PeerLost, match=f"{field} is .* here and {value} there"):
        require_alike(MEMORY, other)


@pytest.mark.parametrize("field", ["planes", "block_bytes"])
def test_the_error_names_the_field_that_differs_in_layout(field: str) -> None:
    with pytest.raises(PeerLost, match=f"{field} is .* here and 5 there"):
        require_alike(MEMORY, msgspec.structs.replace(MEMORY, **{field: 5}))


def test_caches_may_have_different_numbers_of_blocks() -> None:
    require_alike(MEMORY, msgspec.structs.replace(MEMORY, blocks=5, plane_bytes=50, address=0))


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({}, 2999),
        ({"blocks": 101}, 3000),
        ({"block_bytes": 12}, 3000),
        ({"planes": 0}, 3000),
        ({"blocks": 0}, 3000),
        ({"block_bytes": -10, "blocks": -90}, 3000),
        ({"planes": -1, "plane_bytes": -1000}, 3000),
        ({"planes": 2**40, "plane_bytes": 2**40}, 3000),
        ({"blocks": 2**31, "plane_bytes": 2**40}, 2**60),
    ],
)
def test_an_inconsistent_cache_or_one_larger_than_its_file_is_refused(changes: dict[str, int], size: int) -> None:
    with pytest.raises(PeerLost):
        require_sound(msgspec.structs.replace(MEMORY, **changes), size)
    require_sound(MEMORY, 3000)


def test_memory_of_a_gpu_is_refused_by_cpu_transports() -> None:
    with pytest.raises(PeerLost, match="shm cannot move KV of device cuda:0"):
        require_host(msgspec.structs.replace(MEMORY, device="cuda:0"), "shm")


@pytest.fixture(params=[pytest.param("compiled", marks=pytest.mark.process), "numpy"])
def copier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The copy in use: without a compiler it is numpy's."""
    load_copier.cache_clear()
    if request.param == "numpy":
        monkeypatch.setenv("CXX", "no-such-compiler")
    assert (load_copier() is None) == (request.param == "numpy")
    yield request.param
    load_copier.cache_clear()


@pytest.mark.parametrize("order", ["runs", "scattered"])
@pytest.mark.parametrize("block_bytes", [512, 48_000, 48_001], ids=["small", "larger than CPU caches", "unaligned"])
def test_a_copy_changes_exactly_the_target_blocks(copier: str, order: str, block_bytes: int) -> None:
    theirs = Cache(1, blocks=40, block_bytes=block_bytes, spare_bytes=100)
    mine = Cache(2, blocks=70, block_bytes=block_bytes, spare_bytes=64)
    random = np.random.default_rng(3)
    their_blocks = random.permutation(40)[:30].tolist() if order == "scattered" else [*range(5, 25), *range(30, 40)]
    my_blocks = random.permutation(70)[:30].tolist() if order == "scattered" else [*range(40, 70)]
    before = mine.bytes.copy()
    pairs = block_pairs(theirs.memory, their_blocks, mine.memory, my_blocks)
    assert copy_blocks(mine.memory, theirs.memory, *pairs, Stop())
    wanted = expected(mine, before, theirs.memory, 1, list(zip(their_blocks, my_blocks, strict=True)))
    assert (mine.bytes == wanted).all()
    assert (theirs.bytes == content(1, theirs.bytes.size)).all()


def test_a_stopped_copy_copies_nothing(copier: str) -> None:
    theirs, mine = Cache(1), Cache(2)
    stop = Stop()
    stop.set()
    pairs = block_pairs(theirs.memory, [1, 2], mine.memory, [3, 4])
    assert not copy_blocks(mine.memory, theirs.memory, *pairs, stop)
    assert (mine.bytes == content(2, mine.bytes.size)).all()


def test_a_copy_can_be_stopped_in_the_middle(copier: str) -> None:
    """Also within one contiguous run, of which a single plane is many pieces."""
    theirs, mine = (Cache(seed, planes=2, blocks=8, block_bytes=4 << 20) for seed in (1, 2))
    pairs = block_pairs(theirs.memory, range(8), mine.memory, range(8))
    ends = [0, mine.bytes.size - 1]
    for _ in range(100):
        stop = Stop()
        mine.bytes[ends] = ~theirs.bytes[ends]
        setter = threading.Timer(0.001, stop.set)
        setter.start()
        is_complete = copy_blocks(mine.memory, theirs.memory, *pairs, stop)
        setter.join()
        has_begun, has_ended = mine.bytes[ends] == theirs.bytes[ends]
        assert is_complete == has_ended
        if has_begun and not is_complete:
            return
    pytest.fail("no copy was stopped in the middle")


@pytest.mark.process
@settings(max_examples=20, deadline=None)
@given(blocks_of_90)
def test_compiled_and_numpy_copy_agree(blocks: list[int]) -> None:
    theirs, first, second = (Cache(seed, blocks=90, block_bytes=16) for seed in (1, 2, 2))
    pairs = block_pairs(theirs.memory, blocks, first.memory, blocks[::-1])
    copy_blocks(first.memory, theirs.memory, *pairs, Stop())
    copy_blocks_with_numpy(second.memory, theirs.memory, *pairs, Stop())
    assert (first.bytes == second.bytes).all()
