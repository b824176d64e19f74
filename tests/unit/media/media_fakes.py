"""Media without a network: a scripted loader, and an engine that encodes."""

import asyncio
from collections.abc import Sequence

from baton.errors import BatonError, InvalidRequest
from baton.ports.engine import Capabilities, Encoded, EncodeWork
from baton.protocol.ids import RequestId
from baton.protocol.media import LoadedMediaItem, MediaFile, MediaUrl
from baton.testing import ScriptedEngine


class FakeLoader:
    """A MediaLoader that records its calls. It waits for `gate` first, if there is one."""

    def __init__(self, gate: asyncio.Event | None = None, error: BatonError | None = None) -> None:
        self.named: list[tuple[MediaUrl, ...]] = []
        self.closed = 0
        self.released = 0
        self._gate = gate
        self._error = error

    async def load(self, named: Sequence[MediaUrl]) -> tuple[MediaFile, ...]:
        self.named.append(tuple(named))
        if self._gate is not None:
            await self._gate.wait()
        if self._error is not None:
            raise self._error
        return tuple(MediaFile(modality=each.modality, data=each.url.encode(), place=each.place) for each in named)

    def release(self, loaded: Sequence[LoadedMediaItem]) -> None:
        self.released += len(loaded)

    async def close(self) -> None:
        self.closed += 1


class EncodingEngine(ScriptedEngine):
    """Encodes any media. It waits for `gate` first, if there is one. Held embeddings can be counted."""

    def __init__(self, gate: asyncio.Event | None = None, error: BatonError | None = None) -> None:
        can = Capabilities(generate=False, media_encoding=True, encoded_modalities=frozenset({"image"}))
        super().__init__(capabilities=can)
        self.encoded: list[EncodeWork] = []
        self.held: set[RequestId] = set()
        self.withdrawn = 0
        self._gate = gate
        self._error = error

    async def encode(self, work: EncodeWork) -> Encoded:
        if work.request_id in self.held:
            raise InvalidRequest("in use")
        self.encoded.append(work)
        try:
            if self._gate is not None:
                await self._gate.wait()
        except asyncio.CancelledError:
            self.withdrawn += 1
            raise
        if self._error is not None:
            raise self._error
        self.held.add(work.request_id)
        return Encoded(params={"handle": str(work.request_id)})

    async def abort(self, request_id: RequestId) -> None:
        self.held.discard(request_id)
        await super().abort(request_id)
