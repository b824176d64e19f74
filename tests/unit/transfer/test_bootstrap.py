"""Rooms of engines that move KV themselves, over real connections."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from baton.config.transfer import KvTransferOptions
from baton.errors import BatonError, Cancelled, EngineFailed, PeerLost
from baton.protocol.handoff import Ticket
from baton.testing import eventually, run_bounded
from baton.transfer.room_client import RoomClaim, RoomClient, open_room_client
from baton.transfer.room_server import RoomServer, open_room_server
from tests.unit.transfer.kv_caches import SECRET, Cache

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
        cache = Cache(1)
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

    run_bounded(body())


async def complete_one_claim(it: Pair, room: int) -> None:
    """Offer and claim a room: afterwards the consumer knows the bootstrap address."""
    lease = it.producer.offer(it.ticket(room), 3)
    claim = it.claim(room)
    assert await claim.bootstrap_address() == BOOTSTRAP
    await claim.claimed()
    claim.taken()
    await claim.close()
    await lease.ended()


def returns_at_once(coroutine: Coroutine[Any, Any, object]) -> bool:
    """Run one step of `coroutine`; return whether it ended without waiting."""
    try:
        coroutine.send(None)
    except StopIteration:
        return True
    coroutine.close()
    return False


def test_only_the_first_claim_at_a_producer_waits_for_the_bootstrap_address() -> None:
    async def body() -> None:
        async with pair() as it:
            first = it.claim(7)
            assert not returns_at_once(first.bootstrap_address())
            await first.close()
            await complete_one_claim(it, 1)
            second = it.claim(2)  # before its prefill has begun
            assert returns_at_once(second.bootstrap_address())
            lease = it.producer.offer(it.ticket(2), 3)
            await second.claimed()
            second.taken()
            await lease.ended()
            assert it.lost == []

    run_bounded(body())


def test_a_known_bootstrap_address_does_not_hide_a_failed_prefill() -> None:
    async def body() -> None:
        async with pair() as it:
            await complete_one_claim(it, 1)
            it.producer.refuse(it.ticket(2), EngineFailed("out of memory"))
            assert await it.claim(2).bootstrap_address() == BOOTSTRAP
            await eventually(lambda: [type(error) for error in it.lost] == [EngineFailed])

    run_bounded(body())


def test_taken_before_the_connection_is_established_still_ends_the_room() -> None:
    async def body() -> None:
        async with pair() as it:
            await complete_one_claim(it, 1)
            lease = it.producer.offer(it.ticket(2), 3)
            claim = it.claim(2)
            await claim.bootstrap_address()
            claim.taken()
            await claim.close()
            await lease.ended()
            assert it.producer.rooms.ended["done"] == 2

    run_bounded(body())


def test_taken_at_any_moment_of_connecting_ends_the_room() -> None:
    async def body() -> None:
        async with pair() as it:
            await complete_one_claim(it, 0)
            for moments in range(1, 21):
                lease = it.producer.offer(it.ticket(moments), 3)
                claim = it.claim(moments)
                await claim.bootstrap_address()
                for _ in range(moments):
                    await asyncio.sleep(0)
                claim.taken()
                await lease.ended()
                await claim.close()
            assert it.lost == []

    run_bounded(body())


@pytest.mark.parametrize("address", [BOOTSTRAP, ("10.0.0.9", 9001)], ids=["same address", "another address"])
def test_after_a_restart_on_the_same_port_a_claim_never_keeps_a_stale_bootstrap_address(
    address: tuple[str, int],
) -> None:
    async def body() -> None:
        async with pair() as it:
            await complete_one_claim(it, 1)
            await it.producer.close()
            options = msgspec.structs.replace(QUICK, port=it.producer.address[1])
            restarted = await open_room_server(options, None, "127.0.0.1", address)
            it.producer = restarted
            lease = restarted.offer(it.ticket(2), 3)
            claim = it.claim(2)
            assert await claim.bootstrap_address() == BOOTSTRAP, "the restart is not known yet"
            if address == BOOTSTRAP:
                await claim.claimed()
                claim.taken()
                await lease.ended()
                assert it.lost == []
            else:
                await eventually(lambda: [type(error) for error in it.lost] == [PeerLost])
                assert "restarted" in it.lost[0].message
            lease = restarted.offer(it.ticket(3), 3)
            claim = it.claim(3)
            assert await claim.bootstrap_address() == address
            await claim.close()
            await restarted.close()

    run_bounded(body())


def test_a_lost_producer_is_asked_for_its_bootstrap_address_again() -> None:
    async def body() -> None:
        async with pair() as it:
            await complete_one_claim(it, 1)
            await it.producer.close()
            refused = it.claim(2)
            with pytest.raises(PeerLost, match="cannot connect"):
                await refused.claimed()
            options = msgspec.structs.replace(QUICK, port=it.producer.address[1])
            it.producer = await open_room_server(options, None, "127.0.0.1", ("10.0.0.9", 9001))
            claim = it.claim(3)
            assert not returns_at_once(claim.bootstrap_address())
            it.producer.offer(it.ticket(3), 3)
            assert await claim.bootstrap_address() == ("10.0.0.9", 9001)
            await claim.close()
            await it.producer.close()

    run_bounded(body())
