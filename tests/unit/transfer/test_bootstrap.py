"""Rooms of engines that move KV themselves, over real connections."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.config.transfer import KvTransferOptions
from baton.errors import BatonError, Cancelled, EngineFailed, PeerLost
from baton.protocol.handoff import Ticket
from baton.testing import eventually, run_bounded
from baton.transfer.room_client import RoomClaim, RoomClient, open_room_client
from baton.transfer.room_server import RoomServer, open_room_server
from tests.unit.transfer.test_rooms_end_to_end import Cache

SECRET = b"sixteen bytes ok"
BOOTSTRAP = ("10.0.0.9", 8998)
QUICK = KvTransferOptions(claim_timeout_s=2.0, heartbeat_s=0.05, peer_timeout_s=1.0)


class Pair:
    """A producer and a consumer without memory, and the errors of the consumer's claims."""

    def __init__(self, producer: RoomServer, consumer: RoomClient) -> None:
        self.producer, self.consumer = producer, consumer
        self.lost: list[BatonError] = []

    def ticket(self, room: int = 0) -> Ticket:
        host, port = self.producer.address
        return Ticket(host=host, port=port, room=room, secret=SECRET)

    def claim(self, room: int = 0) -> RoomClaim:
        return self.consumer.claim(self.ticket(room), lambda: None, self.lost.append)


@asynccontextmanager
async def pair(options: KvTransferOptions = QUICK) -> AsyncIterator[Pair]:
    producer = await open_room_server(options, None, "127.0.0.1", BOOTSTRAP)
    consumer = open_room_client(options, None)
    try:
        yield Pair(producer, consumer)
        await eventually(lambda: sum(producer.rooms.open.values()) == 0)
    finally:
        await consumer.close()
        await producer.close()


@pytest.mark.parametrize("first", ["producer", "consumer"])
def test_a_claim_gets_the_bootstrap_address_and_taken_ends_the_room(first: str) -> None:
    async def body() -> None:
        async with pair() as it:
            claim = it.claim() if first == "consumer" else None
            await asyncio.sleep(0.05)
            lease = it.producer.offer(it.ticket(), 3)
            claim = claim or it.claim()
            assert await claim.bootstrap_address() == BOOTSTRAP
            claim.taken()
            claim.taken()
            await claim.close()
            await lease.ended()
            assert it.producer.rooms.ended["done"] == 1
            assert it.lost == []

    run_bounded(body())


@pytest.mark.parametrize("when", ["before the claim", "after the claim"])
def test_a_failed_prefill_fails_its_claim(when: str) -> None:
    async def body() -> None:
        async with pair() as it:
            lease = it.producer.offer(it.ticket(), 3)
            if when == "before the claim":
                lease.fail(EngineFailed("out of memory"))
            claim = it.claim()
            if when == "after the claim":
                assert await claim.bootstrap_address() == BOOTSTRAP
                lease.fail(EngineFailed("out of memory"))
            else:
                with pytest.raises(EngineFailed, match="out of memory"):
                    await claim.bootstrap_address()
            await eventually(lambda: [type(error) for error in it.lost] == [EngineFailed])
            await claim.close()

    run_bounded(body())


@pytest.mark.parametrize("claimed", [False, True])
def test_closing_a_claim_cancels_the_lease(claimed: bool) -> None:
    async def body() -> None:
        async with pair() as it:
            lease = it.producer.offer(it.ticket(), 3)
            claim = it.claim()
            if claimed:
                await claim.bootstrap_address()
            await claim.close()
            with pytest.raises(Cancelled):
                await lease.ended()

    run_bounded(body())


def test_claims_at_a_producer_that_shuts_down_are_lost() -> None:
    async def body() -> None:
        async with pair() as it:
            it.producer.offer(it.ticket(), 3).on_lost(lambda _: None)
            claim = it.claim()
            await claim.bootstrap_address()
            await it.producer.close()
            await eventually(lambda: [type(error) for error in it.lost] == [PeerLost])

    run_bounded(body())


def test_a_claim_for_a_prefill_that_never_begins_times_out() -> None:
    async def body() -> None:
        async with pair(KvTransferOptions(claim_timeout_s=0.2, heartbeat_s=0.05, peer_timeout_s=1.0)) as it:
            with pytest.raises(PeerLost, match="has not begun"):
                await it.claim().bootstrap_address()

    run_bounded(body())


def test_engines_with_and_without_kv_memory_refuse_each_other() -> None:
    async def body() -> None:
        cache = Cache()
        async with pair() as it:
            other = open_room_client(QUICK, cache.memory)
            lost: list[BatonError] = []
            it.producer.offer(it.ticket(), 3)
            claim = other.claim(it.ticket(), lambda: None, lost.append)
            await eventually(lambda: bool(lost))
            assert "moves KV itself" in lost[0].message
            await claim.close()
            await other.close()
            await it.producer.close()
        cache.close()

    run_bounded(body())
