"""Probes: the smallest request of each role, which the canary sends through a handler of its own."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from baton.handlers.admission import admit
from baton.handlers.relay import relay
from baton.ports.engine import EngineInfo, GenerateEngine
from baton.ports.runtime import Context
from baton.protocol.embeddings import EmbedRequest, TokenLists
from baton.protocol.handoff import LocalProbe
from baton.protocol.outputs import Chunk
from baton.protocol.requests import GenerateRequest, StopConditions
from baton.request.tracker import RequestTracker

ONE_TOKEN = GenerateRequest(token_ids=(1,), stop=StopConditions(max_tokens=1, ignore_eos=True))
ONE_VECTOR = EmbedRequest(model="", source=TokenLists(((1,),)))


class ProbeContext:
    """The Context (see `ports/runtime.py`) of a probe, which is never cancelled by a client."""

    id = "canary"
    trace_headers: dict[str, str] = {}

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """See `Context.on_cancel`."""


class ProbeHandler:
    """Probes an engine whose role needs another worker: the engine does alone what it can of its part."""

    def __init__(self, engine: GenerateEngine, info: EngineInfo, tracker: RequestTracker) -> None:
        self._engine = engine
        self._info = info
        self._tracker = tracker

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[Chunk, None]:
        """Yield what the engine generates. Raises the errors of `errors.py`; closing the iterator aborts it."""
        with self._tracker.track(context, len(request.token_ids)) as tracked:
            can = self._engine.capabilities
            work = admit(request, tracked.request_id, self._info, can, tracked.trace_headers, LocalProbe())
            async with aclosing(relay(self._engine, work, tracked, self._tracker.limits)) as chunks:
                async for chunk in chunks:
                    yield chunk


async def read_to_end(replies: AsyncGenerator[object, None]) -> None:
    """Read every reply and drop it. Raises what the handler raises."""
    async with aclosing(replies):
        async for _ in replies:
            pass
