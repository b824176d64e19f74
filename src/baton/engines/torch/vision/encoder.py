"""Encodes media files for requests: decoding and preprocessing on threads of their own, the tower on another one.

    encode(files) ──► decoding threads: prepare ──► tower thread: batches of parts ──► rows
                      at most AHEAD items that are prepared and not encoded

Engines that encode, for themselves or for other workers, have one of these.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from baton.config.engines import TorchOptions
from baton.engine_kit.threads import fail, resolve
from baton.engines.torch.loader import Report
from baton.engines.torch.thread import EngineThread
from baton.engines.torch.vision.batches import PendingItem, take_batch
from baton.engines.torch.vision.model import media_info, read_layout
from baton.engines.torch.vision.prepare import prepare
from baton.engines.torch.vision.runner import TowerRunner, row_type
from baton.errors import BatonError, EngineDead, EngineFailed
from baton.media.decoding import run_decoding
from baton.ports.engine import EncodedRows, MediaInfo
from baton.protocol.media import MediaFile
from baton.request.cancel_scope import CancelScope

# Decoded media take far more memory than their files: others wait as files.
AHEAD = 32

EndedItems = list[tuple[PendingItem, EngineFailed | None]]


class EncodeCore:
    """The tower and the items that wait for it: a Stepper (see `thread.py`), one batch a step."""

    def __init__(self, runner: TowerRunner) -> None:
        self.runner = runner
        self.steps = 0
        self._items: dict[PendingItem, None] = {}  # in order of their turns
        self._ended: EndedItems = []

    @property
    def busy(self) -> bool:
        """Whether an item waits: it leaves with its last rows."""
        return bool(self._items)

    def add(self, item: PendingItem) -> None:
        """Queue an item."""
        self._items[item] = None

    def remove(self, item: PendingItem) -> None:
        """Forget an item. Idempotent."""
        self._items.pop(item, None)

    def step(self) -> None:
        """Encode one batch. A failure ends its items; on a GPU it ends the engine."""
        batch = take_batch(self._items, self.runner.batch_patches)
        self.steps += 1
        for item in dict.fromkeys(part.item for part in batch):
            self._items[item] = self._items.pop(item)  # behind the others
        try:
            rows = self.runner.encode([part.patches for part in batch], batch[0].item.prepared.grid)
        except RuntimeError as error:  # what torch raises
            if not self.runner.survives_errors:
                raise
            for item in {part.item for part in batch}:
                self._end(item, EngineFailed(f"cannot encode the media: {error}"))
            return
        for part, data in zip(batch, rows, strict=True):
            if part.item.put(part.number, data):
                self._end(part.item, None)

    def tick(self) -> None:
        """See `Stepper.tick`."""

    def take_result(self) -> EndedItems | None:
        """See `Stepper.take_result`."""
        ended, self._ended = self._ended, []
        return ended or None

    def close(self) -> None:
        """See `Stepper.close`."""

    def _end(self, item: PendingItem, failure: EngineFailed | None) -> None:
        del self._items[item]
        self._ended.append((item, failure))


class _Running(NamedTuple):
    """What exists between the end of `start` and `stop`."""

    thread: EngineThread[EncodeCore, EndedItems]
    core: EncodeCore
    info: MediaInfo


class VisionEncoder:
    """The vision tower of the model in `directory`. Event-loop thread only."""

    def __init__(self, options: TorchOptions, directory: Path) -> None:
        """Read the configuration. Raises ConfigError if the model has no supported tower."""
        self._options = options
        self._directory = directory
        self._layout = read_layout(directory)
        self._thread: EngineThread[EncodeCore, EndedItems] | None = None
        self._running: _Running | None = None
        self._dead: BatonError | None = None
        self._prepared = 0
        self.running = 0
        """How many items are prepared or encoded now; others wait."""
        self._places = asyncio.Semaphore(AHEAD)
        self._calls: set[CancelScope] = set()
        self._pending: dict[PendingItem, asyncio.Future[None]] = {}

    @property
    def modalities(self) -> frozenset[str]:
        """The modalities that the model takes. Valid before `start`."""
        return frozenset(self._layout.placeholders)

    @property
    def steps(self) -> int:
        """How much work has been done: it grows as long as there is some."""
        return self._prepared + (0 if self._running is None else self._running.core.steps)

    async def start(self, report: Report = lambda done, total: None) -> MediaInfo:
        """Load the tower; `report` is called on another thread. Raises ConfigError and EngineDead."""
        dtype = str(row_type(self._options)).removeprefix("torch.")
        info = await asyncio.to_thread(media_info, self._directory, self._layout, dtype)
        thread: EngineThread[EncodeCore, EndedItems] = EngineThread(self._deliver, self._on_end)
        self._thread = thread
        core = await thread.start("torch-vision", lambda: self._load(report))
        self._running = _Running(thread, core, info)
        return info

    async def encode(self, files: Sequence[MediaFile]) -> list[EncodedRows]:
        """Return the rows of each file, in order. Cancelling the call withdraws all of them.

        Raises InvalidRequest for a file that cannot be read, Unsupported for a modality that the model does not take,
        EngineFailed and EngineDead.
        """
        if self._dead is not None or self._running is None:
            raise self._dead or EngineDead("the engine is not running")
        running, scope = self._running, CancelScope()
        self._calls.add(scope)
        try:
            return await scope.wait(self._encode_all(files, running))
        finally:
            self._calls.discard(scope)

    async def stop(self) -> None:
        """Fail everything that waits with EngineDead and free the tower. Idempotent, also after a failed start."""
        self._fail_all(EngineDead("the engine has stopped"))
        if self._thread is not None:
            await self._thread.stop()
        self._running = None

    async def _encode_all(self, files: Sequence[MediaFile], running: _Running) -> list[EncodedRows]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._encode(file, running)) for file in files]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _encode(self, file: MediaFile, running: _Running) -> EncodedRows:
        shape = running.info.shape
        async with self._places:
            self.running += 1
            try:
                prepared = await run_decoding(prepare, self._layout, shape.model, file)
                self._prepared += 1
                item = PendingItem(prepared, shape.size * row_type(self._options).itemsize)
                await self._compute(item, running)
            finally:
                self.running -= 1
        return EncodedRows(item=prepared.item, dtype=shape.dtype, size=shape.size, data=item.data.data)

    async def _compute(self, item: PendingItem, running: _Running) -> None:
        """Wait until the tower has computed all rows of `item`."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending[item] = done
        running.thread.submit(lambda core: core.add(item))
        try:
            await done
        finally:
            if self._pending.pop(item, None) is not None:
                running.thread.submit(lambda core: core.remove(item))

    def _load(self, report: Report) -> EncodeCore:
        """Runs on the thread: loading takes seconds. Raises ConfigError or EngineDead."""
        try:
            return EncodeCore(TowerRunner(self._options, self._directory, self._layout, report))
        except BatonError:
            raise
        except Exception as error:
            raise EngineDead(f"the vision tower failed: {error!r}") from error

    def _deliver(self, ended: EndedItems) -> None:
        for item, failure in ended:
            done = self._pending.pop(item, None)
            if done is not None:
                if failure is None:
                    resolve(done, None)
                else:
                    fail(done, failure)

    def _on_end(self, problem: BaseException | None) -> None:
        if problem is not None:
            self._fail_all(EngineDead(f"the vision tower failed: {problem!r}"))

    def _fail_all(self, error: BatonError) -> None:
        """End every call; none is accepted after this. The first error stays."""
        self._dead = self._dead or error
        for scope in tuple(self._calls):
            scope.fire(self._dead)
