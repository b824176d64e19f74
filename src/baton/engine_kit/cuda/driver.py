"""The functions of NVIDIA's driver that regions and copies need, by ctypes: it is there wherever a GPU can be used.

Every thread calls `use` before anything else. Addresses are integers; a stream is an opaque one.
"""

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_ushort, c_void_p
from typing import Protocol

LIBRARY = "libcuda.so.1"

_PINNED_MEMORY = 1
_ON_DEVICE = 1
_FILE_DESCRIPTOR = 1
_READ, _READ_AND_WRITE = 1, 3
_SMALLEST_GRANULARITY = 0
_PORTABLE = 1
_NON_BLOCKING = 1
_OUT_OF_MEMORY = 2
_MEMORY_MANAGEMENT, _EXPORT_TO_DESCRIPTOR, _RDMA_OF_MAPPED = 102, 103, 116


class CudaError(Exception):
    """A call of the driver failed."""


class Driver(Protocol):
    """What regions and copies need of a GPU. Methods raise CudaError; `create` and `pin` also MemoryError."""

    def use(self, device: int) -> None:
        """Make the context that torch uses too the current one of this thread."""

    def can_share(self, device: int) -> bool:
        """Whether memory can be mapped at an address of our choice, and exported to other processes."""

    def granularity(self, device: int) -> int:
        """Of sizes of memory and of reserved addresses."""

    def reserve(self, nbytes: int) -> int:
        """Return an address from which on nothing else is mapped."""

    def free(self, address: int, nbytes: int) -> None:
        """Return reserved addresses."""

    def create(self, device: int, nbytes: int) -> int:
        """Return the handle of new memory. It exists until the handle is released and nothing maps it, anywhere."""

    def release(self, handle: int) -> None:
        """Give a handle back; mappings of the memory stay valid."""

    def export_handle(self, handle: int) -> int:
        """Return a new file descriptor of the memory, for another process."""

    def import_handle(self, descriptor: int) -> int:
        """Return a handle of the memory of another process. The descriptor may be closed then."""

    def map(self, address: int, nbytes: int, handle: int, device: int, writes: bool) -> None:
        """Map memory at a reserved address, for `device`."""

    def unmap(self, address: int, nbytes: int) -> None:
        """Remove a mapping. Nothing may use it any more."""

    def synchronize(self) -> None:
        """Wait until everything that this process has started on the current device has ended."""

    def pin(self, nbytes: int) -> int:
        """Return new memory of the host that the device reads and writes too, at the same address."""

    def unpin(self, address: int) -> None:
        """Free memory of `pin`."""

    def allocate(self, nbytes: int) -> int:
        """Return new memory of the current device, for this process alone."""

    def deallocate(self, address: int) -> None:
        """Free memory of `allocate`."""

    def stream(self) -> int:
        """Return a new stream of the current device, which waits for no other and comes first."""

    def wait(self, stream: int) -> None:
        """Wait until everything in `stream` has ended."""

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Start a copy between the host and the device, or within either."""

    def load_kernel(self, code: bytes, name: bytes) -> int:
        """Return a kernel of the current device from PTX."""

    def launch(self, kernel: int, groups: int, threads: int, stream: int, arguments: Sequence[int]) -> None:
        """Start a kernel whose arguments all have 64 bits."""


class _Location(ctypes.Structure):
    _fields_ = [("kind", c_int), ("number", c_int)]


class _Flags(ctypes.Structure):
    _fields_ = [("compression", c_ubyte), ("rdma", c_ubyte), ("usage", c_ushort), ("reserved", c_ubyte * 4)]


class _Properties(ctypes.Structure):
    _fields_ = [
        ("kind", c_int),
        ("handles", c_int),
        ("location", _Location),
        ("security", c_void_p),
        ("flags", _Flags),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", c_int)]


_ARGUMENTS: dict[str, list[object]] = {
    "cuInit": [c_uint],
    "cuGetErrorName": [c_int, POINTER(c_char_p)],
    "cuDeviceGetAttribute": [POINTER(c_int), c_int, c_int],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuCtxSetCurrent": [c_void_p],
    "cuCtxSynchronize": [],
    "cuCtxGetStreamPriorityRange": [POINTER(c_int), POINTER(c_int)],
    "cuMemGetAllocationGranularity": [POINTER(c_size_t), POINTER(_Properties), c_int],
    "cuMemAddressReserve": [POINTER(c_ulonglong), c_size_t, c_size_t, c_ulonglong, c_ulonglong],
    "cuMemAddressFree": [c_ulonglong, c_size_t],
    "cuMemCreate": [POINTER(c_ulonglong), c_size_t, POINTER(_Properties), c_ulonglong],
    "cuMemRelease": [c_ulonglong],
    "cuMemExportToShareableHandle": [POINTER(c_int), c_ulonglong, c_int, c_ulonglong],
    "cuMemImportFromShareableHandle": [POINTER(c_ulonglong), c_void_p, c_int],
    "cuMemMap": [c_ulonglong, c_size_t, c_size_t, c_ulonglong, c_ulonglong],
    "cuMemSetAccess": [c_ulonglong, c_size_t, POINTER(_Access), c_size_t],
    "cuMemUnmap": [c_ulonglong, c_size_t],
    "cuMemHostAlloc": [POINTER(c_void_p), c_size_t, c_uint],
    "cuMemFreeHost": [c_void_p],
    "cuMemAlloc_v2": [POINTER(c_ulonglong), c_size_t],
    "cuMemFree_v2": [c_ulonglong],
    "cuStreamCreateWithPriority": [POINTER(c_void_p), c_uint, c_int],
    "cuStreamSynchronize": [c_void_p],
    "cuMemcpyAsync": [c_ulonglong, c_ulonglong, c_size_t, c_void_p],
    "cuModuleLoadData": [POINTER(c_void_p), c_char_p],
    "cuModuleGetFunction": [POINTER(c_void_p), c_void_p, c_char_p],
    "cuLaunchKernel": [c_void_p, *[c_uint] * 7, c_void_p, POINTER(c_void_p), POINTER(c_void_p)],
}


@functools.cache
def find_driver() -> "CudaDriver | None":
    """Return the driver of this machine, None without one or without a GPU."""
    try:
        return CudaDriver(ctypes.CDLL(LIBRARY))
    except (OSError, AttributeError, CudaError):
        return None


class CudaDriver:
    """A Driver. Any thread may use it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, c_int
        self._call("cuInit", 0)
        self._contexts: dict[int, c_void_p] = {}

    def use(self, device: int) -> None:
        """See `Driver.use`."""
        context = self._contexts.get(device)
        if context is None:
            context = c_void_p()
            self._call("cuDevicePrimaryCtxRetain", byref(context), device)
            self._contexts[device] = context
        self._call("cuCtxSetCurrent", context)

    def can_share(self, device: int) -> bool:
        """See `Driver.can_share`."""
        return bool(self._attribute(_MEMORY_MANAGEMENT, device) and self._attribute(_EXPORT_TO_DESCRIPTOR, device))

    def granularity(self, device: int) -> int:
        """See `Driver.granularity`."""
        size = c_size_t()
        properties = self._properties(device)
        self._call("cuMemGetAllocationGranularity", byref(size), byref(properties), _SMALLEST_GRANULARITY)
        return size.value

    def reserve(self, nbytes: int) -> int:
        """See `Driver.reserve`."""
        address = c_ulonglong()
        self._call("cuMemAddressReserve", byref(address), nbytes, 0, 0, 0)
        return address.value

    def free(self, address: int, nbytes: int) -> None:
        """See `Driver.free`."""
        self._call("cuMemAddressFree", address, nbytes)

    def create(self, device: int, nbytes: int) -> int:
        """See `Driver.create`."""
        handle = c_ulonglong()
        self._call("cuMemCreate", byref(handle), nbytes, byref(self._properties(device)), 0)
        return handle.value

    def release(self, handle: int) -> None:
        """See `Driver.release`."""
        self._call("cuMemRelease", handle)

    def export_handle(self, handle: int) -> int:
        """See `Driver.export_handle`."""
        descriptor = c_int(-1)
        self._call("cuMemExportToShareableHandle", byref(descriptor), handle, _FILE_DESCRIPTOR, 0)
        return descriptor.value

    def import_handle(self, descriptor: int) -> int:
        """See `Driver.import_handle`."""
        handle = c_ulonglong()
        self._call("cuMemImportFromShareableHandle", byref(handle), c_void_p(descriptor), _FILE_DESCRIPTOR)
        return handle.value

    def map(self, address: int, nbytes: int, handle: int, device: int, writes: bool) -> None:
        """See `Driver.map`."""
        self._call("cuMemMap", address, nbytes, 0, handle, 0)
        try:
            self._grant(address, nbytes, device, writes)
        except CudaError:
            self.unmap(address, nbytes)
            raise

    def unmap(self, address: int, nbytes: int) -> None:
        """See `Driver.unmap`."""
        self._call("cuMemUnmap", address, nbytes)

    def synchronize(self) -> None:
        """See `Driver.synchronize`."""
        self._call("cuCtxSynchronize")

    def pin(self, nbytes: int) -> int:
        """See `Driver.pin`."""
        address = c_void_p()
        self._call("cuMemHostAlloc", byref(address), nbytes, _PORTABLE)
        return address.value or 0

    def unpin(self, address: int) -> None:
        """See `Driver.unpin`."""
        self._call("cuMemFreeHost", address)

    def allocate(self, nbytes: int) -> int:
        """See `Driver.allocate`."""
        address = c_ulonglong()
        self._call("cuMemAlloc_v2", byref(address), nbytes)
        return address.value

    def deallocate(self, address: int) -> None:
        """See `Driver.deallocate`."""
        self._call("cuMemFree_v2", address)

    def stream(self) -> int:
        """See `Driver.stream`."""
        lowest, highest, stream = c_int(), c_int(), c_void_p()
        self._call("cuCtxGetStreamPriorityRange", byref(lowest), byref(highest))
        self._call("cuStreamCreateWithPriority", byref(stream), _NON_BLOCKING, highest)
        return stream.value or 0

    def wait(self, stream: int) -> None:
        """See `Driver.wait`."""
        self._call("cuStreamSynchronize", stream)

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """See `Driver.copy`."""
        self._call("cuMemcpyAsync", to, source, nbytes, stream)

    def load_kernel(self, code: bytes, name: bytes) -> int:
        """See `Driver.load_kernel`."""
        module, kernel = c_void_p(), c_void_p()
        self._call("cuModuleLoadData", byref(module), code)
        self._call("cuModuleGetFunction", byref(kernel), module, name)
        return kernel.value or 0

    def launch(self, kernel: int, groups: int, threads: int, stream: int, arguments: Sequence[int]) -> None:
        """See `Driver.launch`."""
        values = [c_ulonglong(argument) for argument in arguments]
        places = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self._call("cuLaunchKernel", kernel, groups, 1, 1, threads, 1, 1, 0, stream, places, None)

    def _grant(self, address: int, nbytes: int, device: int, writes: bool) -> None:
        access = _Access(_Location(_ON_DEVICE, device), _READ_AND_WRITE if writes else _READ)
        try:
            self._call("cuMemSetAccess", address, nbytes, byref(access), 1)
        except CudaError:
            if writes:
                raise
            access.flags = _READ_AND_WRITE  # not every driver can map for reading only
            self._call("cuMemSetAccess", address, nbytes, byref(access), 1)

    def _properties(self, device: int) -> _Properties:
        rdma = bool(self._attribute(_RDMA_OF_MAPPED, device))
        return _Properties(_PINNED_MEMORY, _FILE_DESCRIPTOR, _Location(_ON_DEVICE, device), None, _Flags(rdma=rdma))

    def _attribute(self, number: int, device: int) -> int:
        value = c_int()
        self._call("cuDeviceGetAttribute", byref(value), number, device)
        return value.value

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status == _OUT_OF_MEMORY:
            raise MemoryError(f"the GPU has no memory left ({name})")
        if status:
            text = c_char_p()
            self._library.cuGetErrorName(status, byref(text))
            raise CudaError(f"{name}: {(text.value or b'unknown error').decode()}")


def device_number(device: str) -> int | None:
    """Return the number of a device that is called as torch does, None if it is not a GPU of CUDA."""
    name, _, number = device.partition(":")
    return int(number or 0) if name == "cuda" else None
