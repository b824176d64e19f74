"""The decode role: go on from KV that a prefill worker has computed."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from baton.errors import Unsupported
from baton.handlers._call import Call, Desk
from baton.handlers._stream import relay
from baton.handlers._tickets import ticket_of
from baton.handlers._work import build_work
from baton.ports.engine import Engine, EngineInfo
from baton.ports.runtime import Context
from baton.ports.transfer import Borrower, Loan
from baton.protocol.handoff import Consume, Ticket
from baton.protocol.outputs import Chunk, Finished, FinishReason, KvWanted, Output, TokenDelta, Usage
from baton.protocol.requests import GenerateRequest


class DecodeHandler:
    """Generates tokens on one engine, from KV of others; a request that comes without any is computed here."""

    def __init__(self, engine: Engine, info: EngineInfo, desk: Desk, borrower: Borrower) -> None:
        self._engine = engine
        self._info = info
        self._desk = desk
        self._borrower = borrower

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[Chunk, None]:
        """Yield the answer in chunks. Raises the errors of `errors.py`; closing the iterator aborts the request."""
        ticket = ticket_of(request)
        borrowing: _Borrowing | None = None
        try:
            with self._desk.open(context, len(request.token_ids)) as call:
                if request.stop.max_tokens == 0:
                    # The frontend asks so when it moves a request here that had made its last token elsewhere.
                    yield Chunk([], finish_reason=FinishReason.LENGTH, usage=Usage(call.prompt_tokens, 0))
                    return
                _refuse_what_gets_lost(request)
                source = request.bootstrap or request.prefill_result
                handoff = Consume(source=source) if source is not None else None
                can = self._engine.capabilities
                work = build_work(request, call.request_id, self._info, can, context.trace_headers, handoff)
                if ticket is not None:
                    borrowing = _Borrowing(self._borrower, ticket, self._engine, call)
                async with aclosing(relay(self._engine, work, call, self._desk.limits, borrowing)) as chunks:
                    async for chunk in chunks:
                        yield chunk
        finally:
            if ticket is not None and (borrowing is None or borrowing.loan is None):
                self._borrower.decline(ticket)


class _Borrowing:
    """A Handover from a prefill worker."""

    def __init__(self, borrower: Borrower, ticket: Ticket, engine: Engine, call: Call) -> None:
        self.loan: Loan | None = None
        self._borrower = borrower
        self._ticket = ticket
        self._engine = engine
        self._call = call
        self._placed = False

    def begin(self) -> list[Chunk]:
        """Claim the room."""
        request_id = self._call.request_id
        self.loan = self._borrower.borrow(
            self._ticket, lambda: self._engine.received(request_id), self._call.scope.fire
        )
        return []

    def take(self, outputs: list[Output]) -> list[Output]:
        """Have the KV fetched where the engine wants it; count what the prefill found in its cache."""
        assert self.loan is not None
        rest: list[Output] = []
        for output in outputs:
            match output:
                case KvWanted():
                    self._placed = True
                    self.loan.place(output)
                    continue
                case TokenDelta() if not self._placed:
                    self._placed = True
                    self.loan.give_up()  # the engine had all of it, and the prefill may do something else
                case Finished() if self.loan.cached_tokens is not None:
                    output = msgspec.structs.replace(output, cached_tokens=self.loan.cached_tokens)
            rest.append(output)
        return rest

    async def end(self) -> None:
        """See that nothing is written for this request any more."""
        assert self.loan is not None
        await self.loan.close()


def _refuse_what_gets_lost(request: GenerateRequest) -> None:
    """Raise Unsupported for what the frontend does not carry: with early hand-off it may stop reading after the first
    choice that ends."""
    if request.bootstrap is not None and request.choices > 1:
        raise Unsupported(
            "n: the frontend loses choices of an answer whose prefill runs elsewhere; ask for one at a time, or start"
            " the prefill workers with --transfer-handoff late"
        )
