"""A probe for roles that need another worker: what this engine can do of its part, alone."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from baton.handlers.admission import build_work
from baton.handlers.relay import relay
from baton.ports.engine import EngineInfo, GenerateEngine
from baton.ports.runtime import Context
from baton.protocol.handoff import LocalProbe
from baton.protocol.outputs import Chunk
from baton.protocol.requests import GenerateRequest
from baton.request.tracker import RequestTracker


class ProbeHandler:
    """Tries one engine."""

    def __init__(self, engine: GenerateEngine, info: EngineInfo, tracker: RequestTracker) -> None:
        self._engine = engine
        self._info = info
        self._tracker = tracker

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[Chunk, None]:
        """Yield what the engine makes of it. Raises the errors of `errors.py`; closing the iterator aborts it."""
        with self._tracker.track(context, len(request.token_ids)) as call:
            can = self._engine.capabilities
            work = build_work(request, call.request_id, self._info, can, context.trace_headers, LocalProbe())
            async with aclosing(relay(self._engine, work, call, self._tracker.limits)) as chunks:
                async for chunk in chunks:
                    yield chunk
