"""Encoding media on this worker's engine, through the embedding store: what is stored is not encoded again.

Rows that a client has computed go through the store too, and not through the engine.

    file ──hash──► in the store? ──yes──────────────────────► pinned
                        └──no──► engine.encode ──► copied ──► pinned

Requests for the same file at the same time share one call of the engine, which ends when none of them waits for it.
"""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial

from baton.engine_kit.content_hash import rows_hash
from baton.errors import EngineFailed
from baton.handlers.client_rows import file_hash, rows_of
from baton.media.embedding_store import EmbeddingStore, Hold, Wanted
from baton.ports.engine import EncodedRows, EncodeEngine, EncodeWork, MediaInfo
from baton.protocol.ids import new_request_id
from baton.protocol.media import EmbeddingFile, LoadedMediaItem

INLINE_HASH_BYTES = 1 << 20


class _SharedCall:
    """One call of the engine, and how many requests wait for it."""

    def __init__(self, call: Coroutine[None, None, EncodedRows]) -> None:
        self.task = asyncio.create_task(call)
        self.withdrawn = False
        self._waiting = 0

    def join(self) -> None:
        """One more request waits for it."""
        self._waiting += 1

    def leave(self) -> None:
        """A request no longer waits for it; without any, the work is withdrawn."""
        self._waiting -= 1
        if not self._waiting and not self.task.done():
            self.withdrawn = True
            self.task.cancel()


class MediaEncoder:
    """Encodes files to rows in `store`. Event-loop thread only; calls may run concurrently."""

    def __init__(self, engine: EncodeEngine, store: EmbeddingStore, media: MediaInfo) -> None:
        self.store = store
        self._engine = engine
        self._media = media
        self._shape = store.shape
        self._calls: dict[str, _SharedCall] = {}

    async def encode(
        self, files: Sequence[LoadedMediaItem], token_ids: tuple[int, ...], trace_headers: Mapping[str, str]
    ) -> Hold:
        """Return the rows of `files`, in their order; the caller releases them.

        Cancelling the call withdraws the work. Raises the errors of the engine, and InvalidRequest for media whose rows
        are larger than the store.
        """
        hashes = await _hashes(self._shape.model, files)
        by_hash = dict(zip(hashes, files, strict=True))
        encoded: dict[str, EncodedRows] = {}
        while True:
            missing = [each for each in by_hash if each not in encoded and not self.store.has(each)]
            calls = {each: self._join(each, by_hash[each], token_ids, trace_headers) for each in missing}
            encoded |= await _results(calls)
            hold = await self.store.hold([_wanted(each, encoded.get(each)) for each in hashes])
            if hold is not None and await _fill(hold, encoded):  # else some rows were evicted meanwhile
                return hold

    def _join(
        self, content_hash: str, file: LoadedMediaItem, token_ids: tuple[int, ...], trace_headers: Mapping[str, str]
    ) -> _SharedCall:
        """Return the call that encodes `file`, which may run already."""
        call = self._calls.get(content_hash)
        if call is None or call.withdrawn:
            call = self._calls[content_hash] = _SharedCall(self._encode(file, token_ids, trace_headers))
            call.task.add_done_callback(partial(self._ended, content_hash, call))
        call.join()
        return call

    def _ended(self, content_hash: str, call: _SharedCall, task: "asyncio.Task[EncodedRows]") -> None:
        if not task.cancelled():
            task.exception()  # marks it as retrieved: the requests may be gone
        if self._calls.get(content_hash) is call:
            del self._calls[content_hash]

    async def _encode(
        self, file: LoadedMediaItem, token_ids: tuple[int, ...], trace_headers: Mapping[str, str]
    ) -> EncodedRows:
        if isinstance(file, EmbeddingFile):
            return await asyncio.to_thread(rows_of, file, self._media)
        work = EncodeWork(
            request_id=new_request_id("media"), token_ids=token_ids, media=(file,), trace_headers=trace_headers
        )
        encoded = await self._engine.encode(work)
        if len(encoded.items) != 1:
            raise EngineFailed(f"the engine encoded one file to {len(encoded.items)} items")
        [rows] = encoded.items
        expected = rows.item.rows * self.store.row_bytes
        if (rows.dtype, rows.size) != (self._shape.dtype, self._shape.size) or rows.data.nbytes != expected:
            raise EngineFailed(
                f"the engine encoded {rows.item.rows} rows to {rows.data.nbytes} bytes of {rows.size} x {rows.dtype}; a"
                f" row of this model is {self._shape.size} x {self._shape.dtype}"
            )
        return rows


async def _results(calls: Mapping[str, _SharedCall]) -> dict[str, EncodedRows]:
    """Return what joined calls encode, and leave them."""
    try:
        return {content_hash: await asyncio.shield(call.task) for content_hash, call in calls.items()}
    finally:
        for call in calls.values():
            call.leave()


async def _fill(hold: Hold, encoded: Mapping[str, EncodedRows]) -> bool:
    """Copy rows into the new slots; if other requests do not fill theirs, release `hold` and return False."""
    ready = False
    try:
        for slot in hold.new:
            rows = encoded[slot.content_hash]
            hold.rows(slot)[:] = rows.data.cast("B")
            hold.filled(slot, rows.item)
        ready = await hold.ready()
    finally:
        if not ready:
            hold.release()
    return ready


def _wanted(content_hash: str, rows: EncodedRows | None) -> Wanted:
    return Wanted(content_hash, None if rows is None else rows.data.nbytes)


async def _hashes(model: str, files: Sequence[LoadedMediaItem]) -> list[str]:
    def hash_all() -> list[str]:
        return [
            file_hash(file, model) if isinstance(file, EmbeddingFile) else rows_hash(model, file.data, file.modality)
            for file in files
        ]

    if sum(len(file.data) for file in files) <= INLINE_HASH_BYTES:
        return hash_all()
    return await asyncio.to_thread(hash_all)
