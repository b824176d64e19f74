"""What is held for other workers after the call that made it."""

import asyncio
import logging

from baton.errors import BatonError
from baton.handlers.media import LoadedMedia
from baton.handlers.relay import abort
from baton.ports.engine import AbortableEngine
from baton.ports.transfer import Lease
from baton.protocol.ids import RequestId

log = logging.getLogger(__name__)


class LeaseReaper:
    """Sees to it that work of one engine is aborted, and with it what the engine holds, when its lease ends."""

    def __init__(self, engine: AbortableEngine, abort_timeout_s: float) -> None:
        self._engine = engine
        self._abort_s = abort_timeout_s
        self._tasks: set[asyncio.Task[None]] = set()

    def keep(self, request_id: RequestId, lease: Lease, media: LoadedMedia) -> None:
        """Return at once; when `lease` ends, abort the work and let go of the media that it was made from."""
        task = asyncio.create_task(self._keep(request_id, lease, media))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep(self, request_id: RequestId, lease: Lease, media: LoadedMedia) -> None:
        try:
            await lease.ended()
            media.used()
        except BatonError as error:
            log.info("%s was not handed over: %s", request_id, error.message)
        finally:
            await abort(self._engine, request_id, self._abort_s)
            await media.close()
