"""A GPU's driver made of host memory: regions are memory files, so that other processes can map them too."""

import ctypes
import mmap
import os
import threading
from collections.abc import Sequence
from ctypes import c_int, c_long, c_size_t, c_void_p

from baton.engine_kit.cuda.driver import CudaError

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [c_void_p, c_size_t, c_int, c_int, c_int, c_long]
_libc.mmap.restype = c_void_p
_libc.munmap.argtypes = [c_void_p, c_size_t]
_FIXED = 0x10
_NORESERVE = 0x4000
_FAILED = c_void_p(-1).value
GRANULARITY = 1 << 16


class HostDriver:
    """A Driver. `mapped` has the addresses that are mapped now, `handles` what exists."""

    def __init__(self) -> None:
        self.mapped: set[int] = set()
        self.handles: set[int] = set()
        self.launches = 0
        self._pinned: dict[int, object] = {}
        self._thread = threading.local()

    def use(self, device: int) -> None:
        self._thread.device = device

    def can_share(self, device: int) -> bool:
        return True

    def granularity(self, device: int) -> int:
        return GRANULARITY

    def reserve(self, nbytes: int) -> int:
        self._require_context()
        return self._map(None, nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, -1)

    def free(self, address: int, nbytes: int) -> None:
        assert address not in self.mapped, "addresses are unmapped before they are freed"
        _libc.munmap(address, nbytes)

    def create(self, device: int, nbytes: int) -> int:
        self._require_context()
        descriptor = os.memfd_create("baton-test-gpu", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, nbytes)
        self.handles.add(descriptor)
        return descriptor

    def release(self, handle: int) -> None:
        self.handles.remove(handle)
        os.close(handle)

    def export_handle(self, handle: int) -> int:
        assert handle in self.handles
        return os.dup(handle)

    def import_handle(self, descriptor: int) -> int:
        self._require_context()
        handle = os.dup(descriptor)
        self.handles.add(handle)
        return handle

    def map(self, address: int, nbytes: int, handle: int, device: int, writes: bool) -> None:
        if os.fstat(handle).st_size < nbytes:
            raise CudaError("the memory is smaller")
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writes else 0)
        self._map(address, nbytes, access, mmap.MAP_SHARED | _FIXED, handle)
        self.mapped.add(address)

    def unmap(self, address: int, nbytes: int) -> None:
        self._require_context()
        self.mapped.remove(address)
        self._map(address, nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE | _FIXED, -1)

    def synchronize(self) -> None:
        self._require_context()

    def pin(self, nbytes: int) -> int:
        self._require_context()
        memory = ctypes.create_string_buffer(nbytes + 16)
        address = -(-ctypes.addressof(memory) // 16) * 16
        self._pinned[address] = memory
        return address

    def unpin(self, address: int) -> None:
        del self._pinned[address]

    def allocate(self, nbytes: int) -> int:
        return self.pin(nbytes)

    def deallocate(self, address: int) -> None:
        self.unpin(address)

    @property
    def allocations(self) -> int:
        """How much pinned and own memory there is."""
        return len(self._pinned)

    def stream(self) -> int:
        self._require_context()
        return 1

    def wait(self, stream: int) -> None:
        self._require_context()

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        self._require_context()
        ctypes.memmove(to, source, nbytes)

    def load_kernel(self, code: bytes, name: bytes) -> int:
        assert b".entry " + name in code
        return int(name.rsplit(b"_", 1)[1])

    def launch(self, kernel: int, groups: int, threads: int, stream: int, arguments: Sequence[int]) -> None:
        """Do what the kernel does; `kernel` is the size of its units."""
        self._require_context()
        self.launches += 1
        to, to_plane, to_index, source, source_plane, source_index, block_bytes, count, total = arguments
        assert not any(each % kernel for each in (to, to_plane, source, source_plane, block_bytes))
        for number in range(total):
            plane, block = divmod(number, count)
            target = to + plane * to_plane + _at(to_index, block) * block_bytes
            origin = source + plane * source_plane + _at(source_index, block) * block_bytes
            ctypes.memmove(target, origin, block_bytes)

    def _require_context(self) -> None:
        if not hasattr(self._thread, "device"):
            raise CudaError("this thread has no context")

    def _map(self, address: int | None, nbytes: int, access: int, flags: int, descriptor: int) -> int:
        found = _libc.mmap(address, nbytes, access, flags, descriptor, 0)
        if found == _FAILED:
            raise CudaError(os.strerror(ctypes.get_errno()))
        return int(found)


def _at(index: int, block: int) -> int:
    return ctypes.c_int64.from_address(index + 8 * block).value if index else block
