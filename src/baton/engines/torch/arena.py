"""Memory that can be released to the machine and resumed: one region for each tag, with tensors as views of it.

The views stay valid objects; while their arena is released they must not be accessed. On devices that are neither a CPU
nor a GPU of CUDA, the memory may have another address after `resume`, so raw pointers must be read again.
"""

import fcntl
import logging
import math
import mmap
import os
import tempfile
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from baton.engine_kit.cuda.driver import CudaError, find_driver
from baton.engine_kit.cuda.regions import Region
from baton.errors import ConfigError

log = logging.getLogger(__name__)

_ALIGN = 64
_PART = 64 << 20


class Arena:
    """One region of `nbytes` on one device.

    On a CPU it is a mapping whose pages are returned to the machine while its addresses stay, on a GPU a region that
    does the same; on other devices torch's storage is resized to 0. `dense` memory is read sequentially, and uses huge
    pages on a CPU. `shared` memory on a CPU maps an anonymous file: a process that receives its `descriptor` can map it
    too. Every region of a GPU can be mapped.
    """

    def __init__(
        self, nbytes: int, device: torch.device, spill_dir: Path, dense: bool = False, shared: bool = False
    ) -> None:
        self.nbytes = nbytes
        self.released = False
        self.descriptor: int | None = None
        self._spill_dir = spill_dir
        self._kept: FileIO | None = None
        self._pages: mmap.mmap | None = None
        self._region: Region | None = None
        if device.type == "cpu":
            if shared:
                self.descriptor = _anonymous_file(max(nbytes, 1))
                self._pages = mmap.mmap(self.descriptor, max(nbytes, 1), flags=mmap.MAP_SHARED)
            else:
                self._pages = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if dense and hasattr(mmap, "MADV_HUGEPAGE"):
                self._pages.madvise(mmap.MADV_HUGEPAGE)
            self._bytes = torch.frombuffer(self._pages, dtype=torch.uint8, count=nbytes)
        else:
            self._region = _make_region(nbytes, device) if device.type == "cuda" else None
            self._bytes = _bytes_on(device, nbytes, self._region)
        self._next = 0

    @property
    def address(self) -> int:
        """Where it begins; 0 while torch's storage is released."""
        return self._bytes.data_ptr()

    def carve(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the next tensor of this arena."""
        nbytes = math.prod(shape) * dtype.itemsize
        start, self._next = self._next, self._next + arena_bytes(shape, dtype)
        return self._bytes[start : start + nbytes].view(dtype).view(shape)

    def release(self, keep: bool) -> None:
        """Release the memory; with `keep` its content is saved in an anonymous file. Idempotent.

        Raises OSError, having changed nothing.
        """
        if self.released:
            return
        if keep:
            self._kept = self._spill()
        self._drop()
        self.released = True

    def resume(self) -> None:
        """Allocate the memory again, with its content if that was kept, else zeroed. Idempotent.

        Raises MemoryError, OSError or torch's RuntimeError; then it stays released, and its content is kept.
        """
        if not self.released:
            return
        if self._region is not None:
            torch.cuda.empty_cache()
            self._refill(self._region)
        elif self._pages is None:
            self._bytes.untyped_storage().resize_(self.nbytes)
        try:
            if self._kept is not None:
                self._read_back(self._kept)
            elif self._pages is None:
                self._bytes.zero_()
        except BaseException:
            self._drop()
            raise
        self.released = False
        self._forget()

    def close(self) -> None:
        """Close the file of kept content and the shared descriptor. The tensors stay valid. Idempotent.

        A region of a GPU is given back with the last of its tensors.
        """
        self._forget()
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def _forget(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def _parts(self) -> Iterator[Tensor]:
        for start in range(0, self.nbytes, _PART):
            yield self._bytes[start : start + _PART]

    def _drop(self) -> None:
        if self._pages is not None:
            # Such pages read as zero. Pages of a file are only freed by MADV_REMOVE.
            self._pages.madvise(mmap.MADV_DONTNEED if self.descriptor is None else mmap.MADV_REMOVE)
            return
        if self._region is not None:
            self._region.drop()
            return
        self._bytes.untyped_storage().resize_(0)
        if self._bytes.device.type == "cuda":
            torch.cuda.empty_cache()

    def _refill(self, region: Region) -> None:
        try:
            region.fill()
        except CudaError as error:
            raise RuntimeError(f"the GPU's memory cannot be mapped again: {error}") from error

    def _spill(self) -> FileIO:
        self._spill_dir.mkdir(parents=True, exist_ok=True)
        file = tempfile.TemporaryFile(dir=self._spill_dir, buffering=0)  # noqa: SIM115 - it stays open
        try:
            if self.nbytes:
                os.posix_fallocate(file.fileno(), 0, self.nbytes)  # a full disk raises before anything is written
            for part in self._parts():
                view = memoryview(part.cpu().numpy().data)
                while view:
                    view = view[file.write(view) :]
        except BaseException:
            file.close()
            raise
        return file

    def _read_back(self, file: FileIO) -> None:
        file.seek(0)
        for part in self._parts():
            host = part if part.device.type == "cpu" else torch.empty(len(part), dtype=torch.uint8)
            view = memoryview(host.numpy().data)
            while view:
                count = file.readinto(view)
                if not count:
                    raise OSError("the file of the kept weights is truncated")
                view = view[count:]
            if host is not part:
                part.copy_(host)


class _RegionBytes:
    """A region as an array that torch takes over, without a copy; the last tensor of it closes the region."""

    def __init__(self, region: Region, nbytes: int) -> None:
        self._region = region
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (region.address, False),
            "strides": None,
            "version": 2,
        }

    def __del__(self) -> None:
        try:
            self._region.close()
        except CudaError as error:  # the context may be gone, at the end of the process
            log.debug("a region of GPU memory: %s", error)


def _make_region(nbytes: int, device: torch.device) -> Region | None:
    """Return memory at a fixed address, None, with the reason logged, where the driver has none."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    driver, number = find_driver(), device.index if device.index is not None else torch.cuda.current_device()
    if not nbytes or driver is None or not driver.can_share(number):
        log.warning("this GPU's memory cannot be mapped by other processes, and moves when it is released")
        return None
    try:
        return Region(driver, number, nbytes)
    except CudaError as error:
        log.warning("this GPU's memory cannot be mapped by other processes: %s", error)
        return None


def _bytes_on(device: torch.device, nbytes: int, region: Region | None) -> Tensor:
    if region is None:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    return torch.as_tensor(_RegionBytes(region, nbytes), device=device)


def _anonymous_file(nbytes: int) -> int:
    """Return a file in memory with a sealed length, so that a reader never reads past its end."""
    descriptor = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def arena_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return how many bytes of an arena a tensor takes."""
    return -(-math.prod(shape) * dtype.itemsize // _ALIGN) * _ALIGN


def available_bytes(device: torch.device) -> int:
    """Return how many bytes can be allocated on `device` now, within the limits of this process's cgroup."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line)
    free = int(fields["MemAvailable"].split()[0]) * 1024
    left = _left_in_group(Path("/sys/fs/cgroup"))
    return free if left is None else min(free, left)


def _left_in_group(group: Path) -> int | None:
    """Return how many bytes the cgroup may still allocate, None if it has no readable limit."""
    try:
        limit = int((group / "memory.max").read_text())
        current = int((group / "memory.current").read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # The page cache, such as of the weights' files, is counted but reclaimable.
        cached = int(counts["active_file"]) + int(counts["inactive_file"])
    except (OSError, ValueError, KeyError):
        return None
    return max(0, limit - current + cached)


def find_device(name: str) -> torch.device:
    """Return the device that `--torch-device` names. Raises ConfigError if it does not exist."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"this machine has no device {name}; choose another with --torch-device")
    return device


def use_device(device: torch.device) -> None:
    """Make `device` the current one of this thread: Triton and graphs that are captured run there, whatever their
    tensors are on."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))
