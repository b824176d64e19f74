"""The decode role: go on from KV that a prefill worker has computed."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from baton.errors import Unsupported
from baton.handlers.build_work import build_work
from baton.handlers.media import LoadedMedia, MediaInput
from baton.handlers.relay import relay
from baton.handlers.tickets import for_engine, ticket_of
from baton.ports.engine import Engine, EngineInfo
from baton.ports.runtime import Context
from baton.ports.transfer import Claim, Consumer
from baton.protocol.handoff import Bootstrap, Consume, PrefillResult, Ticket
from baton.protocol.outputs import Chunk, Finished, FinishReason, KvWanted, Output, TokenDelta, Usage
from baton.protocol.requests import GenerateRequest
from baton.request.tracker import RequestTracker, TrackedRequest


class DecodeHandler:
    """Generates tokens on one engine, from KV of others; a request that comes without any is computed here."""

    def __init__(
        self,
        engine: Engine,
        info: EngineInfo,
        tracker: RequestTracker,
        consumer: Consumer,
        media_input: MediaInput | None = None,
    ) -> None:
        self._engine = engine
        self._info = info
        self._tracker = tracker
        self._consumer = consumer
        self._media_input = media_input or MediaInput()

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[Chunk, None]:
        """Yield the answer in chunks. Raises the errors of `errors.py`; closing the iterator aborts the request."""
        ticket = ticket_of(request)
        kv: _Borrowing | _Claim | None = None
        media = LoadedMedia()
        try:
            with self._tracker.track(context, len(request.token_ids)) as tracked:
                if request.stop.max_tokens == 0:
                    # The frontend asks so when it moves a request here that had made its last token elsewhere.
                    yield Chunk([], finish_reason=FinishReason.LENGTH, usage=Usage(tracked.prompt_tokens, 0))
                    return
                self._refuse_impossible(request)
                handoff: Consume | None = None
                if ticket is not None:
                    kv = (_Borrowing if self._info.kv is not None else _Claim)(
                        self._consumer, ticket, self._engine, tracked
                    )
                    handoff = Consume(source=await kv.source(request))
                can = self._engine.capabilities
                if handoff is None or request.encoder_result is None:
                    # Otherwise they are in the KV already, and the prefill worker has claimed them.
                    media = await self._media_input.load(request, tracked, can)
                work = build_work(
                    request, tracked.request_id, self._info, can, context.trace_headers, handoff, media.items
                )
                async with aclosing(relay(self._engine, work, tracked, self._tracker.limits, kv)) as chunks:
                    async for chunk in chunks:
                        media.used()
                        yield chunk
        finally:
            await media.close()
            if kv is not None and kv.claim is not None:
                await kv.claim.close()
            elif ticket is not None:
                self._consumer.decline(ticket)

    def _refuse_impossible(self, request: GenerateRequest) -> None:
        if request.bootstrap is None and request.prefill_result is None and self._engine.capabilities.needs_kv:
            raise Unsupported("this worker only goes on from KV of prefill workers, and the request names none")
        if request.bootstrap is not None and request.choices > 1:
            # With early hand-off the frontend may stop reading after the first choice that ends.
            raise Unsupported(
                "n: the frontend loses choices of an answer whose prefill runs elsewhere; ask for one at a time, or"
                " start the prefill workers with --kv-handoff late"
            )


class _Borrowing:
    """A Handover from a prefill worker."""

    def __init__(self, consumer: Consumer, ticket: Ticket, engine: Engine, tracked: TrackedRequest) -> None:
        self.claim: Claim | None = None
        self._consumer = consumer
        self._ticket = ticket
        self._engine = engine
        self._tracked = tracked
        self._placed = False

    async def source(self, request: GenerateRequest) -> Bootstrap | PrefillResult:
        """Return where the KV comes from; the engine need not know more of it."""
        if request.prefill_result is not None:
            return for_engine(request.prefill_result)
        assert request.bootstrap is not None
        return request.bootstrap

    def begin(self) -> list[Chunk]:
        """Claim the room."""
        request_id = self._tracked.request_id
        self.claim = self._consumer.claim(
            self._ticket, lambda: self._engine.received(request_id), self._tracked.scope.fire
        )
        return []

    def take(self, outputs: list[Output]) -> list[Output]:
        """Have the KV fetched where the engine wants it; count what the prefill found in its cache."""
        assert self.claim is not None
        rest: list[Output] = []
        for output in outputs:
            match output:
                case KvWanted():
                    self._placed = True
                    self.claim.place(output)
                    continue
                case TokenDelta() if not self._placed:
                    self._placed = True
                    self.claim.give_up()  # the engine had all of it, and the prefill may do something else
                case Finished() if self.claim.cached_tokens is not None:
                    output = msgspec.structs.replace(output, cached_tokens=self.claim.cached_tokens)
            rest.append(output)
        return rest

    async def end(self) -> None:
        """See that nothing is written for this request any more."""
        assert self.claim is not None
        await self.claim.close()


class _Claim:
    """A Handover to an engine that fetches KV by itself: what is said about it goes through the room all the same."""

    def __init__(self, consumer: Consumer, ticket: Ticket, engine: Engine, tracked: TrackedRequest) -> None:
        self.claim: Claim | None = None
        self._consumer = consumer
        self._ticket = ticket
        self._tracked = tracked

    async def source(self, request: GenerateRequest) -> Bootstrap | PrefillResult:
        """Claim the room; return what the engine needs. Raises what the call is cancelled with, or PeerLost."""
        self.claim = self._consumer.claim(self._ticket, lambda: None, self._tracked.scope.fire)
        if request.prefill_result is not None:
            return for_engine(request.prefill_result)
        host, port = await self._tracked.scope.wait(self.claim.bootstrap_address())
        return Bootstrap(host=host, port=port, room=self._ticket.room)

    def begin(self) -> list[Chunk]:
        """The room is claimed already."""
        return []

    def take(self, outputs: list[Output]) -> list[Output]:
        """A first token is proof that the KV is here."""
        assert self.claim is not None
        if outputs:
            self.claim.taken()
        return outputs

    async def end(self) -> None:
        """Tell the lender that nothing more is wanted, if it is still to hear so."""
        assert self.claim is not None
        await self.claim.close()
