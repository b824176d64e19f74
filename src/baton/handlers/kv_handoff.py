"""KV handoff: what a role does, while its work runs, about KV that it produces for or consumes from another worker.

    ProduceEarly     prefill: the room is open before anything is computed; blocks are offered as they are computed
    ProduceLate      prefill: the room opens when all KV is computed
    ConsumeByImport  decode: KV is written into the engine's KV cache, block by block
    ConsumeByEngine  decode: the engine fetches the KV itself; the claim confirms it to the producer

`relay` calls them with the outputs of the engine.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from baton.errors import BatonError, Cancelled, PeerLost
from baton.handlers.tickets import bootstrap_params, params_of
from baton.ports.transfer import Claim, Lease, Producer
from baton.protocol.handoff import Ticket
from baton.protocol.media import PlacedItem
from baton.protocol.outputs import Chunk, Finished, HandoffReady, KvComputed, KvWanted, Output, PromptCached, TokenDelta
from baton.request.tracker import TrackedRequest


class KvHandoff(Protocol):
    """One request's handoff, on either side of it. Event-loop thread only."""

    def begin(self) -> list[Chunk]:
        """The work is submitted; return the chunks to send before its outputs. May raise, as the engine may."""

    def filter(self, outputs: list[Output]) -> list[Output]:
        """Act on the outputs that concern KV; return the others."""

    async def end(self) -> None:
        """Stop writing KV for this request; the engine frees its blocks next."""


class KvNotWanted(Cancelled):
    """The decode worker does not need the KV."""


class KvNotTaken(PeerLost):
    """The decode worker did not connect, failed, or was lost."""


class ProduceEarly:
    """A KvHandoff whose room is known before anything is computed: to both workers, if the ticket `is_given`.

    `media` are the encoded media of the prompt, once they are known; None if the request names none.
    """

    def __init__(self, producer: Producer, ticket: Ticket, tracked: TrackedRequest, is_given: bool) -> None:
        self.lease: Lease | None = None
        self.media: Sequence[PlacedItem] | None = None
        self._producer = producer
        self._ticket = ticket
        self._tracked = tracked
        self.is_given = is_given

    def open(self) -> Lease:
        """Open the room, unless it is open. Raises KvNotWanted if the decode worker has declined it."""
        if self.lease is None:
            try:
                self.lease = self._producer.offer(self._ticket, self._tracked.prompt_tokens)
            except Cancelled as error:
                raise KvNotWanted(error.message) from None
            self._tracked.timeline.mark("kv_offered", {"room": self._ticket.room})
            self.lease.on_lost(self._lost)
        return self.lease

    def begin(self) -> list[Chunk]:
        """See `KvHandoff.begin`: open the room. Raises KvNotWanted if the decode worker has declined it."""
        lease = self.open()
        if self.media is not None:
            lease.placed(self.media)
        # The frontend treats a prefill without parameters as failed, also if the decode worker has the ticket already.
        return [Chunk([], disaggregated_params={} if self.is_given else bootstrap_params(self._ticket))]

    def filter(self, outputs: list[Output]) -> list[Output]:
        """See `KvHandoff.filter`: offer the blocks that are computed."""
        assert self.lease is not None
        others: list[Output] = []
        for output in outputs:
            if isinstance(output, KvComputed):
                self.lease.computed(output)
            else:
                others.append(output)
        return others

    async def end(self) -> None:
        """See `KvHandoff.end`: a producer writes nothing for others."""

    async def taken(self) -> None:
        """Wait until the KV has been taken. Raises as `Lease.ended`."""
        assert self.lease is not None
        await self.lease.ended()

    def _lost(self, error: BatonError) -> None:
        reason = KvNotWanted if isinstance(error, Cancelled) else KvNotTaken
        self._tracked.scope.fire(reason(error.message))


class ProduceLate:
    """A KvHandoff whose room opens when all KV is computed, or the engine reports how it can be fetched.

    `media` are the encoded media of the prompt; None if the request names none.
    """

    def __init__(
        self, producer: Producer, ticket: Ticket, tracked: TrackedRequest, media: Sequence[PlacedItem] | None
    ) -> None:
        self.lease: Lease | None = None
        self._media = media
        self._producer = producer
        self._ticket = ticket
        self._tracked = tracked
        self._blocks: tuple[int, ...] = ()

    def begin(self) -> list[Chunk]:
        """See `KvHandoff.begin`: there is no room yet."""
        return []

    def filter(self, outputs: list[Output]) -> list[Output]:
        """See `KvHandoff.filter`: collect the blocks; open the room after the last one."""
        others: list[Output] = []
        for output in outputs:
            match output:
                case KvComputed():
                    self._blocks += output.blocks
                    if output.complete:
                        self._open().computed(KvComputed(self._blocks, True, output.cached_tokens))
                        others.append(HandoffReady(params_of(self._ticket)))
                case HandoffReady():
                    self._open()
                    others.append(HandoffReady(params_of(self._ticket, output.params)))
                case _:
                    others.append(output)
        return others

    async def end(self) -> None:
        """See `KvHandoff.end`: a producer writes nothing for others."""

    def _open(self) -> Lease:
        self.lease = self._producer.offer(self._ticket, self._tracked.prompt_tokens)
        self._tracked.timeline.mark("kv_offered", {"room": self._ticket.room})
        if self._media is not None:
            self.lease.placed(self._media)
        return self.lease


class ConsumeByImport:
    """A KvHandoff into an engine whose KV cache other workers' KV is written into."""

    def __init__(self, claim: Claim) -> None:
        self._claim = claim
        self._settled = False  # whether the KV has a place, or is not needed

    def begin(self) -> list[Chunk]:
        """See `KvHandoff.begin`: the room is claimed already."""
        return []

    def filter(self, outputs: list[Output]) -> list[Output]:
        """See `KvHandoff.filter`: fetch the KV into the blocks that the engine names."""
        others: list[Output] = []
        for output in outputs:
            match output:
                case KvWanted():
                    self._settled = True
                    self._claim.place(output)
                    continue
                case TokenDelta() if not self._settled:
                    self._settled = True
                    self._claim.give_up()  # the engine had all of it in its prefix cache
                case PromptCached() if self._claim.cached_tokens is not None:
                    output = PromptCached(self._claim.cached_tokens, output.prompt_tokens)
                case Finished() if self._claim.cached_tokens is not None:
                    output = msgspec.structs.replace(output, cached_tokens=self._claim.cached_tokens)
            others.append(output)
        return others

    async def end(self) -> None:
        """See `KvHandoff.end`."""
        await self._claim.close()


class ConsumeByEngine:
    """A KvHandoff into an engine that fetches KV itself: the claim carries the confirmation, and each side's errors.

    `cached_tokens` is what the prefill reported, if it has: the engine here cannot know what was computed there.
    """

    def __init__(self, claim: Claim, cached_tokens: int | None, tracked: TrackedRequest) -> None:
        self._claim = claim
        self._cached_tokens = cached_tokens
        self._tracked = tracked
        self._is_taken = False

    def begin(self) -> list[Chunk]:
        """See `KvHandoff.begin`: the room is claimed already."""
        return []

    def filter(self, outputs: list[Output]) -> list[Output]:
        """See `KvHandoff.filter`: the first output proves that the KV has been fetched."""
        if outputs and not self._is_taken:
            self._is_taken = True
            self._tracked.timeline.mark("kv_moved", {"transport": "engine"})
            self._claim.taken()
        return outputs if self._cached_tokens is None else [self._with_cached_tokens(output) for output in outputs]

    def _with_cached_tokens(self, output: Output) -> Output:
        if not isinstance(output, Finished):
            return output
        return msgspec.structs.replace(output, cached_tokens=self._cached_tokens)

    async def end(self) -> None:
        """See `KvHandoff.end`."""
        await self._claim.close()


def moved_by(claim: Claim) -> dict[str, object]:
    """Return the detail of a timeline about KV or rows that have arrived; nothing is moved of what is cached here."""
    return {"transport": claim.transport or "none", "bytes": claim.moved_bytes}
