"""Regions of GPU memory: those of this process, which keep their address, and those of others that are mapped here."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from baton.engine_kit.cuda.driver import CudaError, Driver

_regions: dict[int, "Region"] = {}


def region_at(address: int) -> "Region | None":
    """Return the region of this process that begins at `address`."""
    return _regions.get(address)


class Region:
    """Memory at one address. Its content can be dropped and allocated again; other processes can map it.

    Memory that another process has mapped exists until that process unmaps it: callbacks of `on_drop` tell it to. Any
    thread may use it. Raises CudaError, or MemoryError.
    """

    def __init__(self, driver: Driver, device: int, nbytes: int) -> None:
        driver.use(device)
        granularity = driver.granularity(device)
        self.nbytes = -(-max(nbytes, 1) // granularity) * granularity
        self._driver = driver
        self._device = device
        self._handle: int | None = None
        self._users = 0
        self._changed = threading.Condition()
        self._on_drop: set[Callable[[], None]] = set()
        self.address = driver.reserve(self.nbytes)
        try:
            self.fill()
        except BaseException:
            driver.free(self.address, self.nbytes)
            raise
        _regions[self.address] = self

    def fill(self) -> None:
        """Allocate the memory again; its content is undefined. Does nothing while there is some."""
        with self._changed:
            if self._handle is not None:
                return
            self._driver.use(self._device)
            handle = self._driver.create(self._device, self.nbytes)
            try:
                self._driver.map(self.address, self.nbytes, handle, self._device, writes=True)
            except BaseException:
                self._driver.release(handle)
                raise
            self._handle = handle

    def drop(self) -> None:
        """Give the memory back when everything that uses it has ended. Idempotent."""
        with self._changed:
            self._changed.wait_for(lambda: not self._users)
            if self._handle is None:
                return
            self._driver.use(self._device)
            self._driver.synchronize()
            self._driver.unmap(self.address, self.nbytes)
            self._driver.release(self._handle)
            self._handle = None
        for callback in tuple(self._on_drop):
            callback()

    def close(self) -> None:
        """Give back the memory and its address; nothing uses it any more. Idempotent."""
        if _regions.get(self.address) is self:
            self.drop()
            del _regions[self.address]
            self._driver.free(self.address, self.nbytes)

    def export(self) -> int:
        """Return a new file descriptor, by which another process can map the memory."""
        with self._changed:
            if self._handle is None:
                raise CudaError("the memory has been released")
            self._driver.use(self._device)
            return self._driver.export_handle(self._handle)

    def on_drop(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback`, on any thread, whenever the memory has been dropped; return what ends that."""
        self._on_drop.add(callback)
        return lambda: self._on_drop.discard(callback)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the memory in the block, which must be short. Raises CudaError if there is none now."""
        with self._changed:
            if self._handle is None:
                raise CudaError("the memory has been released")
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()


class MappedRegion:
    """Memory of another process, mapped for reading. It stays as it is when that process ends. Raises CudaError."""

    def __init__(self, driver: Driver, device: int, descriptor: int, nbytes: int) -> None:
        driver.use(device)
        granularity = driver.granularity(device)
        self._driver = driver
        self._device = device
        self._nbytes = -(-nbytes // granularity) * granularity
        self.closed = False
        handle = driver.import_handle(descriptor)
        try:
            self.address = driver.reserve(self._nbytes)
            try:
                driver.map(self.address, self._nbytes, handle, device, writes=False)
            except BaseException:
                driver.free(self.address, self._nbytes)
                raise
        finally:
            driver.release(handle)  # the mapping keeps the memory

    def close(self) -> None:
        """Unmap it; nothing reads it any more. Idempotent."""
        if not self.closed:
            self.closed = True
            self._driver.use(self._device)
            self._driver.unmap(self.address, self._nbytes)
            self._driver.free(self.address, self._nbytes)
