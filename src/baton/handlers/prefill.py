"""The prefill role: compute the KV of a prompt and hold it until a decode worker has taken it.

Early handoff: the frontend chose a room and sends the request to both workers at once; the request lasts as long as the
lease. Behind a global router the frontend cannot choose; the room of an engine that needs one is then chosen here, and
the first chunk carries it to the frontend, which sends the decode request at once. Late handoff: the request names no
room; a chunk carries a ticket once all KV is computed, the request ends, and the lease outlives it.
"""

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from baton.handlers.admission import admit
from baton.handlers.kv_handoff import KvNotTaken, KvNotWanted, ProduceEarly, ProduceLate
from baton.handlers.leases import LeaseReaper, fail_lease, handoff_error
from baton.handlers.media import LoadedMedia, MediaInput, names_media
from baton.handlers.relay import abort, relay
from baton.handlers.tickets import new_ticket, ticket_from
from baton.ports.engine import EngineInfo, GenerateEngine, Work
from baton.ports.runtime import Context
from baton.ports.transfer import Producer
from baton.protocol.handoff import Bootstrap, Produce, Ticket
from baton.protocol.media import PlacedItem
from baton.protocol.outputs import Chunk, FinishReason, Usage
from baton.protocol.requests import GenerateRequest
from baton.request.tracker import RequestTracker, TrackedRequest


class PrefillHandler:
    """Computes prompts on one engine, for decode workers."""

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
        self._media_input = media_input or MediaInput(engine.capabilities, info)
        self._reaper = LeaseReaper(engine, tracker.limits)

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[Chunk, None]:
        """Yield the room first and one token last. Raises the errors of `errors.py`; closing it aborts the prefill."""
        given = ticket_from(request.bootstrap) if request.bootstrap is not None else None
        ticket = given or self._choose_room(request)
        prompt_tokens = len(request.token_ids)
        try:
            with self._tracker.track(context, prompt_tokens, request.model) as tracked:
                early = ProduceEarly(self._producer, ticket, tracked, ticket is given) if ticket is not None else None
                async with aclosing(self._compute(request, tracked, ticket, early)) as chunks:
                    async for chunk in chunks:
                        yield chunk
        except (KvNotWanted, KvNotTaken):
            # The decode worker knows the reason, or is lost, and the frontend acts on that. An error here too would
            # fail the next attempt, which may run at this worker already.
            usage = Usage(prompt_tokens, 0)
            yield Chunk([], disaggregated_params={}, finish_reason=FinishReason.LENGTH, usage=usage)
        except BaseException as error:
            if given is not None:
                self._producer.refuse(given, handoff_error(error))
            raise

    async def _compute(
        self,
        request: GenerateRequest,
        tracked: TrackedRequest,
        ticket: Ticket | None,
        early: ProduceEarly | None,
    ) -> AsyncGenerator[Chunk, None]:
        def admitted(token_ids: tuple[int, ...]) -> Work:
            return self._admit(request.with_prompt(token_ids), tracked, ticket)

        self._media_input.check(request)
        work = admitted(request.token_ids)
        has_media = names_media(request)
        try:
            if early is not None and early.is_given and has_media:
                early.open()  # the decode worker waits in the room while media are fetched and encoded
            async with await self._media_input.load(request, tracked) as media:
                work = media.attach(work, tracked, admitted)
                placed = media.placed if has_media else None
                async with aclosing(self._produce(work, tracked, early, media, placed)) as chunks:
                    async for chunk in chunks:
                        yield chunk
        except BaseException as error:
            fail_lease(early.lease if early is not None else None, error)
            raise

    def _choose_room(self, request: GenerateRequest) -> Ticket | None:
        """Return a new room if this engine must know its own before it computes."""
        if self._info.handoff_host is None:
            return None
        dp_size = self._engine.capabilities.dp_size
        asked = request.routing.dp_rank if request.routing is not None else None
        return new_ticket(self._producer.address, secrets.randbelow(dp_size) if asked is None else asked, dp_size)

    def _admit(self, request: GenerateRequest, tracked: TrackedRequest, ticket: Ticket | None) -> Work:
        can = self._engine.capabilities
        handoff = Produce(bootstrap=self._bootstrap(ticket))
        work = admit(request.for_prefill(), tracked.request_id, self._info, can, tracked.trace_headers, handoff)
        if ticket is None or can.dp_size == 1:
            return work
        return msgspec.structs.replace(work, dp_rank=ticket.room % can.dp_size)

    def _bootstrap(self, ticket: Ticket | None) -> Bootstrap | None:
        """Return the address of an engine that moves KV itself, if decode workers need it before the KV is computed."""
        if ticket is None or self._info.handoff_host is None or self._info.handoff_port is None:
            return None
        return Bootstrap(host=self._info.handoff_host, port=self._info.handoff_port, room=ticket.room)

    def _produce(
        self,
        work: Work,
        tracked: TrackedRequest,
        early: ProduceEarly | None,
        media: LoadedMedia,
        placed: Sequence[PlacedItem] | None,
    ) -> AsyncGenerator[Chunk, None]:
        """Handles of an encode worker stay claimed as long as the KV is held: the decode may need some of them too."""
        if early is None:
            return self._produce_late(work, tracked, media, placed)
        early.media = placed
        return self._produce_early(work, tracked, early, media)

    async def _produce_early(
        self, work: Work, tracked: TrackedRequest, handoff: ProduceEarly, media: LoadedMedia
    ) -> AsyncGenerator[Chunk, None]:
        """The request lasts until the KV has been taken. What ends the request or the lease ends the other too."""
        try:
            async with aclosing(
                relay(self._engine, work, tracked, self._tracker.limits, handoff, media=media)
            ) as chunks:
                async for chunk in chunks:
                    if chunk.finish_reason is None:
                        yield chunk
                    else:
                        last = chunk
            await tracked.scope.wait(handoff.taken())
            media.used()
        except BaseException as error:
            fail_lease(handoff.lease, error)  # before the engine frees the blocks
            raise
        finally:
            await abort(self._engine, work.request_id, self._tracker.limits.abort_timeout_s)
        yield _with_length(last)

    async def _produce_late(
        self, work: Work, tracked: TrackedRequest, media: LoadedMedia, placed: Sequence[PlacedItem] | None
    ) -> AsyncGenerator[Chunk, None]:
        """The request ends with the prefill; the engine frees the KV when the lease ends."""
        ticket = new_ticket(self._producer.address, work.dp_rank or 0, self._engine.capabilities.dp_size)
        handoff = ProduceLate(self._producer, ticket, tracked, placed)
        try:
            async with aclosing(
                relay(self._engine, work, tracked, self._tracker.limits, handoff, media=media)
            ) as chunks:
                async for chunk in chunks:
                    yield _with_length(chunk)
        except BaseException as error:
            fail_lease(handoff.lease, error)
            raise
        finally:
            if handoff.lease is not None:
                self._reaper.watch(work.request_id, handoff.lease, media.transfer())


def _with_length(chunk: Chunk) -> Chunk:
    """Return the chunk with a finish reason that does not end the request: decode generates this token again."""
    if chunk.finish_reason is None:
        return chunk
    return msgspec.structs.replace(chunk, finish_reason=FinishReason.LENGTH)
