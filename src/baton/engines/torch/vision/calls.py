"""Calls of `encode` that are under way, by request id, so that `abort` can end them."""

import asyncio
from typing import NamedTuple

from baton.engines.torch.vision.encoder import VisionEncoder
from baton.errors import Cancelled, InvalidRequest
from baton.ports.engine import Encoded, EncodeWork
from baton.protocol.ids import RequestId
from baton.request.cancel_scope import CancelScope


class _Call(NamedTuple):
    """One call of `encode`: what ends it early, and its end."""

    scope: CancelScope
    ended: asyncio.Event


class EncodeCalls:
    """The calls of one engine. Event-loop thread only."""

    def __init__(self, encoder: VisionEncoder) -> None:
        self._encoder = encoder
        self._calls: dict[RequestId, _Call] = {}

    def __len__(self) -> int:
        return len(self._calls)

    async def encode(self, work: EncodeWork) -> Encoded:
        """See `EncodeEngine.encode`."""
        if work.request_id in self._calls:
            raise InvalidRequest(f"request id {work.request_id} is in use")
        call = self._calls[work.request_id] = _Call(CancelScope(), asyncio.Event())
        try:
            return Encoded(items=tuple(await call.scope.wait(self._encoder.encode(work.media))))
        finally:
            del self._calls[work.request_id]
            call.scope.close()
            call.ended.set()

    async def abort(self, request_id: RequestId) -> None:
        """End a call, and wait for its end. An unknown id is no error."""
        if (call := self._calls.get(request_id)) is not None:
            call.scope.fire(Cancelled("aborted"))
            await call.ended.wait()
