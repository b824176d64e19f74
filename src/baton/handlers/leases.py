"""Leases on what an engine holds for other workers: failing them, and freeing the engine when they end."""

import asyncio
import logging

from baton.errors import BatonError, DeadlineExceeded, PeerLost
from baton.handlers.media import LoadedMedia
from baton.handlers.relay import abort
from baton.ports.engine import AbortableEngine, HandleEngine
from baton.ports.transfer import Lease
from baton.protocol.ids import RequestId
from baton.request.tracker import RequestLimits

log = logging.getLogger(__name__)


def handoff_error(error: BaseException) -> BatonError:
    """Return what the worker that claims the handoff gets to know of `error`, which ended the request here."""
    if isinstance(error, BatonError):
        return error
    if isinstance(error, Exception):
        return PeerLost("the worker that computes the handoff failed with an unexpected error; see its log")
    return PeerLost("the request was ended")


def fail_lease(lease: Lease | None, error: BaseException) -> None:
    """End `lease`, if there is one, with `error`: the worker that claims it gets the reason."""
    if lease is not None:
        lease.fail(handoff_error(error))


def mark_unread(engine: AbortableEngine, request_id: RequestId) -> None:
    """Before an abort: nobody has read what `engine` holds for the request."""
    if isinstance(engine, HandleEngine):
        engine.mark_unread(request_id)


class LeaseReaper:
    """Aborts the work of one engine when its lease ends, so that the engine frees what it holds for it.

    A lease whose request has ended lasts for `request_timeout_s` at most: a consumer that has claimed it and only sends
    heartbeats would hold it for ever.
    """

    def __init__(self, engine: AbortableEngine, limits: RequestLimits) -> None:
        self._engine = engine
        self._limits = limits
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, request_id: RequestId, lease: Lease, media: LoadedMedia) -> None:
        """Return at once; when `lease` ends, abort the work and close the media that it was computed from."""
        task = asyncio.create_task(self._reap(request_id, lease, media))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reap(self, request_id: RequestId, lease: Lease, media: LoadedMedia) -> None:
        async with media:
            try:
                await self._ended(lease)
                media.used()
            except BatonError as error:
                log.info("%s the handoff ended: %s", request_id, error.message)
            finally:
                if not lease.claimed:
                    mark_unread(self._engine, request_id)
                await abort(self._engine, request_id, self._limits.abort_timeout_s)

    async def _ended(self, lease: Lease) -> None:
        limit_s = self._limits.request_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await lease.ended()
        except TimeoutError:
            error = DeadlineExceeded(f"the handoff was claimed and not taken within {limit_s:g} s")
            lease.fail(error)
            raise error from None
