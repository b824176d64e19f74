"""The prefill role: compute the KV of a prompt and hold it until a decode worker has taken it.

Early hand-off: the frontend has invented a room and calls both workers at once; the call lasts as long as the lease.
Late hand-off: the request names no room; the first chunk carries a ticket of ours once all is computed, the call ends,
and the lease lives on by itself.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from baton.errors import BatonError, Cancelled, PeerLost
from baton.handlers.admission import build_work
from baton.handlers.leases import LeaseReaper
from baton.handlers.media import LoadedMedia, MediaInput
from baton.handlers.relay import abort, relay
from baton.handlers.tickets import new_ticket, params_of, ticket_from
from baton.ports.engine import EngineInfo, GenerateEngine, Work
from baton.ports.runtime import Context
from baton.ports.transfer import Lease, Producer
from baton.protocol.handoff import Bootstrap, Produce, Ticket
from baton.protocol.outputs import Chunk, FinishReason, HandoffReady, KvComputed, Output, Usage
from baton.protocol.requests import GenerateRequest
from baton.request.tracker import RequestTracker, TrackedRequest


class PrefillHandler:
    """Computes prompts on one engine, for others."""

    def __init__(
        self,
        engine: GenerateEngine,
        info: EngineInfo,
        tracker: RequestTracker,
        producer: Producer,
        media_input: MediaInput | None = None,
    ) -> None:
        self._engine = engine
        self._info = info
        self._tracker = tracker
        self._producer = producer
        self._media_input = media_input or MediaInput()
        self._keeper = LeaseReaper(engine, tracker.limits.abort_timeout_s)

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[Chunk, None]:
        """Yield the room first and one token last. Raises the errors of `errors.py`; closing it aborts the prefill."""
        ticket = ticket_from(request.bootstrap) if request.bootstrap is not None else None
        prompt = len(request.token_ids)
        try:
            with self._tracker.track(context, prompt) as tracked:
                media = await self._media_input.load(request, tracked, self._engine.capabilities)
                try:
                    async with aclosing(self._offer(request, tracked, context, ticket, media)) as chunks:
                        async for chunk in chunks:
                            yield chunk
                finally:
                    await media.close()
        except (_NotWanted, _NotTaken):
            # The decode worker knows, or is gone, and the frontend acts on that. To fail here too would fail the next
            # attempt, which may be at this worker already.
            yield Chunk([], disaggregated_params={}, finish_reason=FinishReason.LENGTH, usage=Usage(prompt, 0))
        except BatonError as error:
            if ticket is not None:
                self._producer.refuse(ticket, error)
            raise

    def _offer(
        self,
        request: GenerateRequest,
        tracked: TrackedRequest,
        context: Context,
        ticket: Ticket | None,
        media: LoadedMedia,
    ) -> AsyncGenerator[Chunk, None]:
        """Media that another worker holds stay on loan as long as the KV: the decode may need some of them too."""
        work = self._work(request.for_prefill(), tracked, context, ticket, media)
        if ticket is None:
            return self._offer_late(work, tracked, media)
        return self._offer_early(work, tracked, ticket, media)

    async def _offer_early(
        self, work: Work, tracked: TrackedRequest, ticket: Ticket, media: LoadedMedia
    ) -> AsyncGenerator[Chunk, None]:
        """The call lasts until the KV has been taken. What ends one of call and lease ends the other."""
        lending = _Early(self._producer, ticket, tracked)
        try:
            async with aclosing(relay(self._engine, work, tracked, self._tracker.limits, lending)) as chunks:
                async for chunk in chunks:
                    if chunk.finish_reason is None:
                        yield chunk
                    else:
                        last = chunk
            await tracked.scope.wait(lending.taken())
            media.used()
        except BaseException as error:
            lending.fail(error)
            raise
        finally:
            await abort(self._engine, work.request_id, self._tracker.limits.abort_timeout_s)
        yield _never_stop(last)

    async def _offer_late(self, work: Work, tracked: TrackedRequest, media: LoadedMedia) -> AsyncGenerator[Chunk, None]:
        """The call ends with the prefill; the lease goes on, and frees the KV when it ends."""
        lending = _Late(self._producer, self._new_ticket(work), tracked)
        try:
            async with aclosing(relay(self._engine, work, tracked, self._tracker.limits, lending)) as chunks:
                async for chunk in chunks:
                    yield _never_stop(chunk)
        except BaseException as error:
            lending.fail(error)
            raise
        finally:
            if lending.lease is not None:
                self._keeper.keep(work.request_id, lending.lease, media.passed_on())

    def _work(
        self,
        request: GenerateRequest,
        tracked: TrackedRequest,
        context: Context,
        ticket: Ticket | None,
        media: LoadedMedia,
    ) -> Work:
        can = self._engine.capabilities
        handoff = Produce(bootstrap=self._meeting(ticket) if ticket is not None else None)
        work = build_work(request, tracked.request_id, self._info, can, context.trace_headers, handoff, media.items)
        if ticket is None or can.dp_size == 1:
            return work
        return msgspec.structs.replace(work, dp_rank=ticket.room % can.dp_size)

    def _meeting(self, ticket: Ticket) -> Bootstrap | None:
        """Return where the engine meets the other one, if it moves KV by itself and tells before it computes."""
        if self._info.handoff_host is None or self._info.handoff_port is None:
            return None
        return Bootstrap(host=self._info.handoff_host, port=self._info.handoff_port, room=ticket.room)

    def _new_ticket(self, work: Work) -> Ticket:
        return new_ticket(self._producer.address, work.dp_rank or 0, self._engine.capabilities.dp_size)


class _NotWanted(Cancelled):
    """The decode worker has no use for the KV."""


class _NotTaken(PeerLost):
    """The decode worker has not come, has failed, or is gone."""


class _Lending:
    """A Handover (see `_stream.py`) into a room."""

    def __init__(self, producer: Producer, ticket: Ticket, tracked: TrackedRequest) -> None:
        self.lease: Lease | None = None
        self._producer = producer
        self._ticket = ticket
        self._tracked = tracked

    def fail(self, error: BaseException) -> None:
        """Tell who waits that nothing will come, or who has come that it is over."""
        if self.lease is not None:
            self.lease.fail(error if isinstance(error, BatonError) else PeerLost("the prefill was ended"))

    async def end(self) -> None:
        """Nothing is fetched for a prefill."""


class _Early(_Lending):
    """The room exists before anything is computed."""

    def begin(self) -> list[Chunk]:
        """Open the room."""
        try:
            self.lease = self._producer.offer(self._ticket, self._tracked.prompt_tokens)
        except Cancelled as error:
            raise _NotWanted(error.message) from None
        self.lease.on_lost(self._lost)
        # Both sides have the ticket already; a prefill without parameters would be a failure to the frontend.
        return [Chunk([], disaggregated_params={})]

    def take(self, outputs: list[Output]) -> list[Output]:
        """Pass on what is computed."""
        assert self.lease is not None
        for output in outputs:
            if isinstance(output, KvComputed):
                self.lease.computed(output)
        return [output for output in outputs if not isinstance(output, KvComputed)]

    async def taken(self) -> None:
        """Wait until the KV has been taken."""
        assert self.lease is not None
        await self.lease.ended()

    def _lost(self, error: BatonError) -> None:
        self._tracked.scope.fire((_NotWanted if isinstance(error, Cancelled) else _NotTaken)(error.message))


class _Late(_Lending):
    """The room is our own, and opens when everything is computed, or the engine says how it can be had."""

    def __init__(self, producer: Producer, ticket: Ticket, tracked: TrackedRequest) -> None:
        super().__init__(producer, ticket, tracked)
        self._blocks: tuple[int, ...] = ()

    def begin(self) -> list[Chunk]:
        """There is nothing to tell yet."""
        return []

    def take(self, outputs: list[Output]) -> list[Output]:
        """Gather what is computed; with the last of it the room opens."""
        rest: list[Output] = []
        for output in outputs:
            match output:
                case KvComputed():
                    self._blocks += output.blocks
                    if output.complete:
                        self.lease = self._producer.offer(self._ticket, self._tracked.prompt_tokens)
                        self.lease.computed(KvComputed(self._blocks, True, output.cached_tokens))
                        rest.append(HandoffReady(params_of(self._ticket)))
                case HandoffReady():
                    self.lease = self._producer.offer(self._ticket, self._tracked.prompt_tokens)
                    rest.append(HandoffReady(params_of(self._ticket, output.params)))
                case _:
                    rest.append(output)
        return rest


def _never_stop(chunk: Chunk) -> Chunk:
    """Return the chunk without a reason for the frontend to end the request: decode makes this token again."""
    if chunk.finish_reason is None:
        return chunk
    return msgspec.structs.replace(chunk, finish_reason=FinishReason.LENGTH)
