"""Copies of blocks on a GPU: one launch for all blocks and planes, wherever they are.

The driver compiles the kernel for the GPU that it finds, so that no compiler is needed. Copies to and from pinned
memory of the host use the same kernel, with few threads: they wait for the bus, and must not take the GPU from a step.
"""

import threading
from ctypes import memmove
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.engine_kit.cuda.driver import Driver

THREADS = 256
_GROUPS = 65536
_HOST_GROUPS = 64
_INDEX_BYTES = 8

# A group of threads copies block after block: block i of all is block i % count of plane i / count. Each thread copies
# units of {width} bytes. An index of 0 stands for blocks in their order.
_CODE = """
.version 6.4
.target sm_60
.address_size 64

.visible .entry copy_blocks_{width}(
    .param .u64 to, .param .u64 to_plane, .param .u64 to_index,
    .param .u64 source, .param .u64 source_plane, .param .u64 source_index,
    .param .u64 block_bytes, .param .u64 count, .param .u64 total)
{{
    .reg .pred %p;
    .reg .b32 %id, %group, %groups, %size;
    .reg .b64 %i, %groups64, %total, %count, %plane, %k, %at, %step, %bytes, %first;
    .reg .b64 %to, %from, %index, %offset, %a, %b, %x, %y;
    .reg {registers};

    mov.u32 %id, %tid.x;
    mov.u32 %size, %ntid.x;
    mov.u32 %group, %ctaid.x;
    mov.u32 %groups, %nctaid.x;
    cvt.u64.u32 %i, %group;
    cvt.u64.u32 %groups64, %groups;
    mul.wide.u32 %first, %id, {width};
    mul.wide.u32 %step, %size, {width};
    ld.param.u64 %total, [total];
    ld.param.u64 %count, [count];
    ld.param.u64 %bytes, [block_bytes];

next_block:
    setp.ge.u64 %p, %i, %total;
    @%p bra done;
    div.u64 %plane, %i, %count;
    mul.lo.u64 %x, %plane, %count;
    sub.u64 %k, %i, %x;

    ld.param.u64 %index, [to_index];
    mov.u64 %y, %k;
    setp.eq.u64 %p, %index, 0;
    @%p bra have_to;
    shl.b64 %offset, %k, 3;
    add.u64 %offset, %index, %offset;
    ld.global.u64 %y, [%offset];
have_to:
    ld.param.u64 %to, [to];
    ld.param.u64 %x, [to_plane];
    mad.lo.u64 %to, %plane, %x, %to;
    mad.lo.u64 %to, %y, %bytes, %to;

    ld.param.u64 %index, [source_index];
    mov.u64 %y, %k;
    setp.eq.u64 %p, %index, 0;
    @%p bra have_source;
    shl.b64 %offset, %k, 3;
    add.u64 %offset, %index, %offset;
    ld.global.u64 %y, [%offset];
have_source:
    ld.param.u64 %from, [source];
    ld.param.u64 %x, [source_plane];
    mad.lo.u64 %from, %plane, %x, %from;
    mad.lo.u64 %from, %y, %bytes, %from;

    mov.u64 %at, %first;
next_unit:
    setp.ge.u64 %p, %at, %bytes;
    @%p bra block_done;
    add.u64 %a, %from, %at;
    add.u64 %b, %to, %at;
    {load};
    {store};
    add.u64 %at, %at, %step;
    bra next_unit;
block_done:
    add.u64 %i, %i, %groups64;
    bra next_block;
done:
    ret;
}}
"""
_WIDTHS = {
    16: (".b32 %u<4>", "ld.global.v4.u32 {%u0, %u1, %u2, %u3}, [%a]", "st.global.v4.u32 [%b], {%u0, %u1, %u2, %u3}"),
    4: (".b32 %u", "ld.global.u32 %u, [%a]", "st.global.u32 [%b], %u"),
    1: (".b16 %u", "ld.global.u8 %u, [%a]", "st.global.u8 [%b], %u"),
}


def kernel_code(width: int) -> tuple[bytes, bytes]:
    """Return the PTX that copies units of `width` bytes, and the name of its kernel."""
    registers, load, store = _WIDTHS[width]
    code = _CODE.format(width=width, registers=registers, load=load, store=store)
    return code.encode() + b"\0", f"copy_blocks_{width}".encode()


class Blocks(NamedTuple):
    """Blocks of some planes in memory. Without `numbers` they are the first ones, in their order."""

    address: int
    plane_bytes: int
    numbers: NDArray[np.int64] | None = None


class BlockCopier:
    """Copies blocks within a device, or between it and pinned memory of the host. Any thread may use it.

    Raises CudaError or MemoryError.
    """

    def __init__(self, driver: Driver, device: int) -> None:
        self._driver = driver
        self._device = device
        self._lock = threading.Lock()
        self._stream: int | None = None
        self._kernels: dict[int, int] = {}
        self._host = self._index = self._capacity = 0

    def copy(
        self, to: Blocks, source: Blocks, planes: int, block_bytes: int, count: int, on_host: bool = False
    ) -> None:
        """Copy `count` blocks of each plane, and return when they are there. `on_host`: one side is host memory."""
        total = planes * count
        if not total:
            return
        with self._lock:
            self._driver.use(self._device)
            self._stream = stream = self._stream or self._driver.stream()
            to_index, source_index = self._upload(to.numbers, source.numbers, stream)
            kernel = self._kernel(_width(block_bytes, to, source))
            arguments = (
                *(to.address, to.plane_bytes, to_index),
                *(source.address, source.plane_bytes, source_index),
                *(block_bytes, count, total),
            )
            groups = min(total, _HOST_GROUPS if on_host else _GROUPS)
            self._driver.launch(kernel, groups, THREADS, stream, arguments)
            self._driver.wait(stream)

    def close(self) -> None:
        """Free the memory of indexes; nothing is copied any more. Idempotent."""
        with self._lock:
            if self._capacity:
                self._driver.use(self._device)
                self._free()

    def _kernel(self, width: int) -> int:
        if width not in self._kernels:
            self._kernels[width] = self._driver.load_kernel(*kernel_code(width))
        return self._kernels[width]

    def _upload(
        self, first: NDArray[np.int64] | None, second: NDArray[np.int64] | None, stream: int
    ) -> tuple[int, int]:
        """Copy the numbers of blocks to the device; return where each list is, 0 for none."""
        lists = [numbers for numbers in (first, second) if numbers is not None]
        nbytes = sum(len(numbers) for numbers in lists) * _INDEX_BYTES
        if nbytes > self._capacity:
            self._grow(nbytes)
        places = []
        offset = 0
        for numbers in (first, second):
            if numbers is None:
                places.append(0)
                continue
            packed = np.ascontiguousarray(numbers, np.int64)
            memmove(self._host + offset, packed.ctypes.data, packed.nbytes)
            places.append(self._index + offset)
            offset += packed.nbytes
        if offset:
            self._driver.copy(self._index, self._host, offset, stream)
        return places[0], places[1]

    def _grow(self, nbytes: int) -> None:
        capacity = 1 << (nbytes - 1).bit_length()
        if self._capacity:
            self._free()
        self._host = self._driver.pin(capacity)
        try:
            self._index = self._driver.allocate(capacity)
        except BaseException:
            self._driver.unpin(self._host)
            raise
        self._capacity = capacity

    def _free(self) -> None:
        self._driver.unpin(self._host)
        self._driver.deallocate(self._index)
        self._capacity = 0


def _width(block_bytes: int, *sides: Blocks) -> int:
    """Return the largest unit that every block begins and ends with."""
    every = block_bytes
    for side in sides:
        every |= side.address | side.plane_bytes
    return next(width for width in _WIDTHS if every % width == 0)
