"""Rows of encoded media from an encode worker: its room is claimed, and the rows that are not here are fetched.

encoder_result ──► shape compared ──► all rows here? ──yes──► room declined
                                           └──no──► room claimed ──► memory ──► rows fetched and confirmed
"""

import asyncio
import time
from collections.abc import Coroutine, Sequence

from baton.engine_kit.threads import resolve
from baton.errors import InvalidRequest, PeerLost
from baton.handlers.kv_handoff import moved_by
from baton.handlers.tickets import EncoderResult
from baton.media.embedding_store import EmbeddingStore, Hold, Wanted
from baton.ports.transfer import Claim, Consumer
from baton.protocol.handoff import Ticket
from baton.protocol.media import EncodedMedia, HeldItem
from baton.protocol.outputs import KvComputed, KvWanted
from baton.request.cancel_scope import CancelScope
from baton.timelines.timeline import UNRECORDED, Recorder


def describe(hold: Hold, store: EmbeddingStore, owner: tuple[str, int], claim_timeout_s: float) -> EncodedMedia:
    """Return the descriptor of the rows in `hold`, for the worker that computes the prompt."""
    host, port = owner
    return EncodedMedia(
        owner=f"{host}:{port}",
        expires_at=time.time() + claim_timeout_s,
        model=store.shape.model,
        dtype=store.shape.dtype,
        size=store.shape.size,
        items=tuple(
            HeldItem(item=slot.item, nbytes=slot.nbytes, blocks=slot.blocks)
            for slot in hold.slots
            if slot.item is not None
        ),
    )


def offered_blocks(hold: Hold) -> KvComputed:
    """Return the blocks of each different item, in order."""
    slots = {slot.content_hash: slot for slot in hold.slots}
    return KvComputed(tuple(number for slot in slots.values() for number in slot.numbers), complete=True)


async def wait_for_rows(scope: CancelScope, loading: Coroutine[None, None, Hold]) -> Hold:
    """Return the rows that `loading` returns. Raises its errors, and the one that the scope fires with.

    Rows that arrive when the caller is already cancelled are released.
    """
    task = asyncio.create_task(loading)
    try:
        return await scope.wait(task)
    except BaseException:
        task.add_done_callback(_release)
        raise


def _release(task: "asyncio.Task[Hold]") -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().release()


class RowsInput:
    """Fetches rows of encode workers into `store`. Event-loop thread only; calls may run concurrently."""

    def __init__(self, consumer: Consumer, store: EmbeddingStore) -> None:
        self._consumer = consumer
        self._store = store

    async def fetch(self, result: EncoderResult, timeline: Recorder = UNRECORDED) -> Hold:
        """Return the rows that `result` describes; the caller releases them. Cancelling the call frees everything.

        Raises PeerLost, or the error of the encode worker.
        """
        media = result.media
        if media is None:
            raise PeerLost("the encode worker's engine holds the media, and the engine here takes rows only")
        self._check(media)
        held = {each.item.content_hash: each for each in media.items}
        hashes = [each.item.content_hash for each in media.items]
        present = self._store.hold_present(hashes)
        if present is not None:
            self._consumer.decline(result.ticket)
            return present
        timeline.mark("kv_claimed", {"room": result.ticket.room, "kind": "media"})
        return await self._claim(result.ticket, hashes, held, timeline)

    def _check(self, media: EncodedMedia) -> None:
        """Raise PeerLost unless the rows are valid here: before memory is allocated or read."""
        shape = self._store.shape
        different = [
            f"{name} is {getattr(shape, name)} here and {getattr(media, name)} there"
            for name in ("model", "dtype", "size")
            if getattr(shape, name) != getattr(media, name)
        ]
        if different:
            raise PeerLost(
                f"the encode worker at {media.owner} and this worker do not run the same model: {', '.join(different)}"
            )
        if not media.items:
            raise InvalidRequest("encoder_result.media.items: the list is empty")
        for number, each in enumerate(media.items):
            nbytes = each.item.rows * self._store.row_bytes
            if each.nbytes != nbytes or each.blocks != max(1, self._store.blocks_of(nbytes)):
                raise PeerLost(
                    f"encoder_result.media.items[{number}]: {each.item.rows} rows are {nbytes} bytes here, and"
                    f" {each.nbytes} bytes in {each.blocks} blocks there"
                )

    async def _claim(
        self, ticket: Ticket, hashes: Sequence[str], held: dict[str, HeldItem], timeline: Recorder
    ) -> Hold:
        """Claim the room and fetch what is missing."""
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        scope = CancelScope()  # of the claim: it can be lost while the request waits for memory
        claim = self._consumer.claim(ticket, lambda: resolve(arrived, None), scope.fire)
        hold: Hold | None = None
        try:
            # A claimed room does not expire, however long this request waits for memory.
            await claim.claimed()
            hold = await wait_for_rows(scope, self._hold([Wanted(each, held[each].nbytes) for each in hashes]))
            claim.place(*_wanted(hold, held))
            await scope.wait(arrived)
            timeline.mark("kv_moved", {"kind": "media", **moved_by(claim)})
            for slot in hold.new:
                hold.filled(slot, held[slot.content_hash].item)
            return hold
        except BaseException:
            # A second cancellation ends the wait, not the clean-up.
            await asyncio.shield(_give_up(claim, hold))
            raise

    async def _hold(self, wanted: Sequence[Wanted]) -> Hold:
        """Return slots that are filled, or that only this request fills."""
        while True:
            await self._store.settled([each.content_hash for each in wanted])
            hold = await self._store.hold(wanted)
            assert hold is not None  # every size is known
            if hold.settled:
                return hold
            hold.release()


async def _give_up(claim: Claim, hold: Hold | None) -> None:
    """Close the claim, so that nothing is written any more, and then free the memory."""
    await claim.close()
    if hold is not None:
        hold.release()


def _wanted(hold: Hold, held: dict[str, HeldItem]) -> list[KvWanted]:
    """Return which of the blocks that the room offers go to which of the new slots."""
    firsts: dict[str, int] = {}
    position = 0
    for content_hash, each in held.items():
        firsts[content_hash] = position
        position += each.blocks
    new = sorted(hold.new, key=lambda slot: firsts[slot.content_hash])
    return [KvWanted(firsts[slot.content_hash], slot.numbers) for slot in new]
