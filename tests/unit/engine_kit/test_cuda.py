"""Regions and copies of GPU memory: on a GPU if there is one, else with a driver made of host memory."""

import ctypes
import os
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from baton.engine_kit.cuda.block_kernel import BlockCopier, Blocks
from baton.engine_kit.cuda.driver import CudaError, Driver, device_number, find_driver
from baton.engine_kit.cuda.regions import MappedRegion, Region, region_at
from tests.doubles.host_driver import HostDriver

DRIVER: Driver = find_driver() or HostDriver()


def write(address: int, data: NDArray[np.uint8]) -> None:
    DRIVER.use(0)
    data = np.ascontiguousarray(data)
    stream = DRIVER.stream()
    DRIVER.copy(address, data.ctypes.data, data.nbytes, stream)
    DRIVER.wait(stream)


def read(address: int, nbytes: int) -> NDArray[np.uint8]:
    DRIVER.use(0)
    data = np.empty(nbytes, np.uint8)
    stream = DRIVER.stream()
    DRIVER.copy(data.ctypes.data, address, nbytes, stream)
    DRIVER.wait(stream)
    return data


def noise(nbytes: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8)


def test_a_region_keeps_its_address_while_its_memory_is_dropped_and_filled() -> None:
    region = Region(DRIVER, 0, 1000)
    address = region.address
    write(address, noise(1000))
    assert region_at(address) is region
    dropped: list[str] = []
    forget = region.on_drop(lambda: dropped.append("dropped"))
    region.drop()
    region.drop()
    assert dropped == ["dropped"]
    with pytest.raises(CudaError, match="released"):
        region.export()
    with pytest.raises(CudaError, match="released"), region.in_use():
        pass
    region.fill()
    region.fill()
    assert region.address == address
    write(address, noise(1000, 1))
    assert (read(address, 1000) == noise(1000, 1)).all()
    forget()
    region.close()
    region.close()
    assert dropped == ["dropped"]
    assert region_at(address) is None


def test_memory_that_is_in_use_is_dropped_afterwards() -> None:
    region = Region(DRIVER, 0, 1000)
    thread = threading.Thread(target=region.drop)
    with region.in_use():
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()
        write(region.address, noise(1000))
    thread.join(10)
    assert not thread.is_alive()
    region.close()


def test_a_mapping_has_the_content_and_outlives_the_region() -> None:
    region = Region(DRIVER, 0, 300_000)
    write(region.address, noise(300_000))
    descriptor = region.export()
    mapped = MappedRegion(DRIVER, 0, descriptor, 300_000)
    os.close(descriptor)
    assert mapped.address != region.address
    region.close()
    assert (read(mapped.address, 300_000) == noise(300_000)).all()
    mapped.close()
    mapped.close()
    if isinstance(DRIVER, HostDriver):
        assert not DRIVER.mapped
        assert not DRIVER.handles


def test_what_is_no_memory_is_not_mapped() -> None:
    region = Region(DRIVER, 0, 1000)
    descriptor = region.export()
    with pytest.raises(CudaError):
        MappedRegion(DRIVER, 0, descriptor, region.nbytes + 1)
    os.close(descriptor)
    region.close()


@settings(max_examples=60, deadline=None)
@given(
    planes=st.integers(1, 3),
    block_bytes=st.sampled_from([1, 6, 12, 16, 36, 512, 4096 + 16]),
    spare=st.sampled_from([0, 16, 4, 3]),
    pairs=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=9, unique_by=lambda pair: pair[1]),
)
def test_blocks_of_any_size_are_copied_within_the_device_and_through_the_host(
    planes: int, block_bytes: int, spare: int, pairs: list[tuple[int, int]]
) -> None:
    plane_bytes = 9 * block_bytes + spare
    source, target = Region(DRIVER, 0, planes * plane_bytes), Region(DRIVER, 0, planes * plane_bytes)
    before, after = noise(planes * plane_bytes, 1), noise(planes * plane_bytes, 2).copy()
    write(source.address, before)
    write(target.address, after)
    theirs, mine = (np.array([pair[side] for pair in pairs], np.int64) for side in (0, 1))
    wanted = after.reshape(planes, plane_bytes)
    for their_block, my_block in pairs:
        place, origin = my_block * block_bytes, their_block * block_bytes
        wanted[:, place : place + block_bytes] = before.reshape(planes, -1)[:, origin : origin + block_bytes]
    copier = BlockCopier(DRIVER, 0)
    shape = (planes, block_bytes, len(pairs))
    copier.copy(Blocks(target.address, plane_bytes, mine), Blocks(source.address, plane_bytes, theirs), *shape)
    assert (read(target.address, after.size).reshape(wanted.shape) == wanted).all()
    write(target.address, noise(planes * plane_bytes, 2))
    host = DRIVER.pin(max(1, planes * len(pairs) * block_bytes))
    packed = Blocks(host, len(pairs) * block_bytes)
    copier.copy(packed, Blocks(source.address, plane_bytes, theirs), *shape, on_host=True)
    copier.copy(Blocks(target.address, plane_bytes, mine), packed, *shape, on_host=True)
    assert (read(target.address, after.size).reshape(wanted.shape) == wanted).all()
    DRIVER.unpin(host)
    copier.close()
    copier.close()
    source.close()
    target.close()


def test_names_of_devices() -> None:
    assert [device_number(name) for name in ("cuda", "cuda:3", "cpu", "xpu:0")] == [0, 3, None, None]


def test_a_machine_without_a_driver_has_none() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        assert find_driver() is None
