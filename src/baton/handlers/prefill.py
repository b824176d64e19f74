"""The prefill role: compute the KV of a prompt and hold it until a decode worker has taken it.

Early hand-off: the frontend has invented a room and calls both workers at once; the call lasts as long as the lease.
Late hand-off: the request names no room; the first chunk carries a ticket of ours once all is computed, the call ends,
and the lease lives on by itself.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from baton.errors import BatonError, Cancelled, PeerLost
from baton.handlers.build_work import build_work
from baton.handlers.lease_reaper import Keeper
from baton.handlers.media import Admitted, Intake
from baton.handlers.relay import abort, relay
from baton.handlers.tickets import new_ticket, params_of, ticket_from
from baton.ports.engine import Engine, EngineInfo, Work
from baton.ports.runtime import Context
from baton.ports.transfer import Lease, Lender
from baton.protocol.handoff import Bootstrap, Produce, Ticket
from baton.protocol.outputs import Chunk, FinishReason, HandoffReady, KvComputed, Output, Usage
from baton.protocol.requests import GenerateRequest
from baton.request.tracker import Call, Desk


class PrefillHandler:
    """Computes prompts on one engine, for others."""

    def __init__(
        self, engine: Engine, info: EngineInfo, desk: Desk, lender: Lender, intake: Intake | None = None
    ) -> None:
        self._engine = engine
        self._info = info
        self._desk = desk
        self._lender = lender
        self._intake = intake or Intake()
        self._keeper = Keeper(engine, desk.limits.abort_s)

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[Chunk, None]:
        """Yield the room first and one token last. Raises the errors of `errors.py`; closing it aborts the prefill."""
        ticket = ticket_from(request.bootstrap) if request.bootstrap is not None else None
        prompt = len(request.token_ids)
        try:
            with self._desk.open(context, prompt) as call:
                media = await self._intake.admit(request, call, self._engine.capabilities)
                try:
                    async with aclosing(self._lend(request, call, context, ticket, media)) as chunks:
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
                self._lender.refuse(ticket, error)
            raise

    def _lend(
        self, request: GenerateRequest, call: Call, context: Context, ticket: Ticket | None, media: Admitted
    ) -> AsyncGenerator[Chunk, None]:
        """Media that another worker holds stay on loan as long as the KV: the decode may need some of them too."""
        work = self._work(request.for_prefill(), call, context, ticket, media)
        if ticket is None:
            return self._lend_late(work, call, media)
        return self._lend_early(work, call, ticket, media)

    async def _lend_early(self, work: Work, call: Call, ticket: Ticket, media: Admitted) -> AsyncGenerator[Chunk, None]:
        """The call lasts until the KV has been taken. What ends one of call and lease ends the other."""
        lending = _Early(self._lender, ticket, call)
        try:
            async with aclosing(relay(self._engine, work, call, self._desk.limits, lending)) as chunks:
                async for chunk in chunks:
                    if chunk.finish_reason is None:
                        yield chunk
                    else:
                        last = chunk
            await call.scope.wait(lending.taken())
            media.used()
        except BaseException as error:
            lending.fail(error)
            raise
        finally:
            await abort(self._engine, work.request_id, self._desk.limits.abort_s)
        yield _never_stop(last)

    async def _lend_late(self, work: Work, call: Call, media: Admitted) -> AsyncGenerator[Chunk, None]:
        """The call ends with the prefill; the lease goes on, and frees the KV when it ends."""
        lending = _Late(self._lender, self._new_ticket(work), call)
        try:
            async with aclosing(relay(self._engine, work, call, self._desk.limits, lending)) as chunks:
                async for chunk in chunks:
                    yield _never_stop(chunk)
        except BaseException as error:
            lending.fail(error)
            raise
        finally:
            if lending.lease is not None:
                self._keeper.keep(work.request_id, lending.lease, media.passed_on())

    def _work(
        self, request: GenerateRequest, call: Call, context: Context, ticket: Ticket | None, media: Admitted
    ) -> Work:
        can = self._engine.capabilities
        handoff = Produce(bootstrap=self._meeting(ticket) if ticket is not None else None)
        work = build_work(request, call.request_id, self._info, can, context.trace_headers, handoff, media.items)
        if ticket is None or can.dp_size == 1:
            return work
        return msgspec.structs.replace(work, dp_rank=ticket.room % can.dp_size)

    def _meeting(self, ticket: Ticket) -> Bootstrap | None:
        """Return where the engine meets the other one, if it moves KV by itself and tells before it computes."""
        if self._info.handoff_host is None or self._info.handoff_port is None:
            return None
        return Bootstrap(host=self._info.handoff_host, port=self._info.handoff_port, room=ticket.room)

    def _new_ticket(self, work: Work) -> Ticket:
        return new_ticket(self._lender.address, work.dp_rank or 0, self._engine.capabilities.dp_size)


class _NotWanted(Cancelled):
    """The decode worker has no use for the KV."""


class _NotTaken(PeerLost):
    """The decode worker has not come, has failed, or is gone."""


class _Lending:
    """A Handover (see `_stream.py`) into a room."""

    def __init__(self, lender: Lender, ticket: Ticket, call: Call) -> None:
        self.lease: Lease | None = None
        self._lender = lender
        self._ticket = ticket
        self._call = call

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
            self.lease = self._lender.lend(self._ticket, self._call.prompt_tokens)
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
        self._call.scope.fire((_NotWanted if isinstance(error, Cancelled) else _NotTaken)(error.message))


class _Late(_Lending):
    """The room is our own, and opens when everything is computed, or the engine says how it can be had."""

    def __init__(self, lender: Lender, ticket: Ticket, call: Call) -> None:
        super().__init__(lender, ticket, call)
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
                        self.lease = self._lender.lend(self._ticket, self._call.prompt_tokens)
                        self.lease.computed(KvComputed(self._blocks, True, output.cached_tokens))
                        rest.append(HandoffReady(params_of(self._ticket)))
                case HandoffReady():
                    self.lease = self._lender.lend(self._ticket, self._call.prompt_tokens)
                    rest.append(HandoffReady(params_of(self._ticket, output.params)))
                case _:
                    rest.append(output)
        return rest


def _never_stop(chunk: Chunk) -> Chunk:
    """Return the chunk without a reason for the frontend to end the request: decode makes this token again."""
    if chunk.finish_reason is None:
        return chunk
    return msgspec.structs.replace(chunk, finish_reason=FinishReason.LENGTH)
