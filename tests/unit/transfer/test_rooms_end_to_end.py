"""Producer and consumer over real connections: every end of a room reaches both sides and leaves nothing behind."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest
import uvloop

from baton.config.transfer import KvTransferOptions
from baton.errors import BatonError, Cancelled, EngineFailed, InvalidRequest, PeerLost
from baton.ports.transfer import BlockMemory, KvShape, TransportClient
from baton.protocol.handoff import Ticket
from baton.protocol.media import EncodedItem, PlacedItem
from baton.protocol.outputs import KvComputed, KvWanted
from baton.testing import eventually, run_bounded
from baton.transfer import wire
from baton.transfer.room_client import RoomClaim, RoomClient, open_room_client
from baton.transfer.room_server import RoomServer, open_room_server
from baton.transfer.tcp import ANSWER_HEAD, REQUEST_HEAD, Request, TcpClient
from tests.unit.transfer.kv_caches import SECRET, SHAPE, Cache

pytestmark = pytest.mark.process  # the compiler, for the copy of blocks in shared memory

PLANES, BLOCK_BYTES, BLOCKS = 4, 512, 32
ITEM = EncodedItem(modality="image", content_hash="ab", expansion=((7, 2),), embed_token=7, rows=2)
MEDIA = (PlacedItem(item=ITEM, index=3),)
QUICK = KvTransferOptions(claim_timeout_s=5.0, heartbeat_s=0.05, peer_timeout_s=1.0)
QUICK_UNANSWERED = KvTransferOptions(heartbeat_s=0.05, peer_timeout_s=20.0)  # the other side sends no heartbeats


class Pair:
    """A producer and a consumer, and the results of the consumer's claims."""

    def __init__(self, producer: RoomServer, consumer: RoomClient, theirs: Cache, mine: Cache) -> None:
        self.producer, self.consumer, self.theirs, self.mine = producer, consumer, theirs, mine
        self.arrived = 0
        self.lost: list[BatonError] = []

    def ticket(self, room: int = 0, secret: bytes = SECRET) -> Ticket:
        host, port = self.producer.address
        return Ticket(host=host, port=port, room=room, secret=secret)

    def claim(self, room: int = 0, secret: bytes = SECRET) -> RoomClaim:
        return self.consumer.claim(self.ticket(room, secret), self.count, self.lost.append)

    def count(self) -> None:
        self.arrived += 1

    async def waiting(self) -> None:
        await eventually(lambda: self.producer.waiting_claims == 1)

    async def claimed(self) -> None:
        await eventually(lambda: self.producer.rooms.open["claimed"] == 1)

    async def ended(self, state: str, count: int = 1) -> None:
        await eventually(lambda: self.producer.rooms.ended[state] == count)

    async def lost_with(self, error: type[BatonError], message: str) -> None:
        await eventually(lambda: bool(self.lost))
        [lost] = self.lost
        assert type(lost) is error
        assert message in lost.message
        assert self.arrived == 0


@asynccontextmanager
async def pair(
    options: KvTransferOptions = QUICK,
    shape: KvShape = SHAPE,
    host: str = "127.0.0.1",
    transports: Callable[[BlockMemory], Sequence[TransportClient]] | None = None,
) -> AsyncIterator[Pair]:
    theirs, mine = Cache(1, PLANES, BLOCKS, BLOCK_BYTES), Cache(2, PLANES, 40, BLOCK_BYTES, shape=shape)
    mine.bytes[:] = 0
    tasks = asyncio.all_tasks()
    producer = await open_room_server(options, theirs.memory, host)
    if transports is None:
        consumer = open_room_client(options, mine.memory)
    else:
        consumer = RoomClient(options, mine.memory, transports(mine.memory))
    try:
        yield Pair(producer, consumer, theirs, mine)
        await eventually(lambda: producer.open_sessions + producer.waiting_claims + consumer.open_claims == 0)
        assert sum(producer.rooms.open.values()) == 0
    finally:
        await consumer.close()
        await producer.close()
        assert asyncio.all_tasks() == tasks


@pytest.mark.parametrize("transport", ["shm", "tcp", "tcp with checksums", "auto"])
def test_blocks_arrive_where_they_are_wanted_and_the_room_is_done(transport: str) -> None:
    async def body() -> None:
        options = msgspec.structs.replace(QUICK, transports=transport.split()[0], checksum="checksum" in transport)
        async with pair(options) as it:
            lease = it.producer.offer(it.ticket(), 64)
            claim = it.claim()
            await it.claimed()
            lease.computed(KvComputed((3, 4)))
            claim.place(KvWanted(1, (10, 30, 11)))
            lease.computed(KvComputed((9,)))
            await eventually(lambda: sum(it.consumer.bytes_by_transport.values()) == 2 * PLANES * BLOCK_BYTES)
            assert it.arrived == 0
            lease.computed(KvComputed((0,), True, 32))
            await lease.ended()
            await eventually(lambda: it.arrived == 1)
            assert it.lost == []
            assert claim.cached_tokens == 32
            assert (it.mine.blocks[:, [10, 30, 11]] == it.theirs.blocks[:, [4, 9, 0]]).all()
            untouched = np.delete(it.mine.blocks, [10, 30, 11], axis=1)
            assert not untouched.any()
            assert it.producer.rooms.ended["done"] == 1
            await claim.close()

    run_bounded(body())


def test_a_claim_that_arrives_before_its_prefill_waits_for_it() -> None:
    async def body() -> None:
        async with pair() as it:
            claim = it.claim()
            claim.place(KvWanted(0, (1,)))
            await it.waiting()
            lease = it.producer.offer(it.ticket(), 16)
            lease.computed(KvComputed((5,), True))
            await eventually(lambda: it.arrived == 1)
            assert (it.mine.blocks[:, 1] == it.theirs.blocks[:, 5]).all()

    run_bounded(body())


def test_many_rooms_are_open_at_once_and_their_numbers_are_used_again() -> None:
    async def body() -> None:
        async with pair() as it:
            for round_ in range(3):
                for room in range(20):
                    it.producer.offer(it.ticket(room), 16).computed(KvComputed((room,), True))
                    it.claim(room).place(KvWanted(0, (room + 10,)))
                await eventually(lambda round_=round_: it.arrived == 20 * (round_ + 1))
                assert (it.mine.blocks[:, 10:30] == it.theirs.blocks[:, :20]).all()
            assert it.lost == []

    run_bounded(body())


def test_kv_moves_over_ipv6() -> None:
    async def body() -> None:
        async with pair(msgspec.structs.replace(QUICK, transports="tcp"), host="::1") as it:
            assert it.producer.address[0] == "::1"
            it.producer.offer(it.ticket(), 16).computed(KvComputed((5,), True))
            it.claim().place(KvWanted(0, (1,)))
            await eventually(lambda: it.arrived == 1)

    run_bounded(body())


def test_a_claim_with_a_wrong_secret_is_refused_and_leaves_the_room_open() -> None:
    async def body() -> None:
        async with pair(msgspec.structs.replace(QUICK, claim_timeout_s=0.5)) as it:
            lease = it.producer.offer(it.ticket(), 16)
            it.claim(secret=b"sixteen other by")
            await it.lost_with(PeerLost, "wrong secret")
            assert it.producer.rooms.open["offered"] == 1
            it.claim().place(KvWanted(0, (1,)))
            lease.computed(KvComputed((5,), True))
            await eventually(lambda: it.arrived == 1)

    run_bounded(body())


def test_a_room_is_claimed_once() -> None:
    async def body() -> None:
        async with pair() as it:
            lease = it.producer.offer(it.ticket(), 16)
            first = it.claim()
            await it.claimed()
            it.claim()
            await it.lost_with(PeerLost, "already claimed")
            first.place(KvWanted(0, (1,)))
            lease.computed(KvComputed((5,), True))
            await eventually(lambda: it.arrived == 1)

    run_bounded(body())


@pytest.mark.parametrize("claimed", [False, True])
def test_a_second_prefill_with_the_same_ticket_leaves_the_lease_of_the_first(claimed: bool) -> None:
    async def body() -> None:
        async with pair() as it:
            lease = it.producer.offer(it.ticket(), 16)
            if claimed:
                it.claim().place(KvWanted(0, (1,)))
                await it.claimed()
            with pytest.raises(PeerLost, match="bootstrap_room: 0 is in use") as refused:
                it.producer.offer(it.ticket(), 16)
            it.producer.refuse(it.ticket(), refused.value)
            if not claimed:
                it.claim().place(KvWanted(0, (1,)))
            lease.computed(KvComputed((5,), True))
            await lease.ended()
            await eventually(lambda: it.arrived == 1)
            assert it.lost == []

    run_bounded(body())


def test_an_unclaimed_lease_expires() -> None:
    async def body() -> None:
        async with pair(msgspec.structs.replace(QUICK, claim_timeout_s=0.1)) as it:
            lost: list[BatonError] = []
            lease = it.producer.offer(it.ticket(), 16)
            lease.on_lost(lost.append)
            with pytest.raises(PeerLost, match="no worker has claimed it"):
                await lease.ended()
            assert len(lost) == 1
            assert it.producer.rooms.ended["expired"] == 1
            lease.computed(KvComputed((1,)))  # too late, and no error

    run_bounded(body())


def test_a_claimed_lease_does_not_expire() -> None:
    async def body() -> None:
        async with pair(msgspec.structs.replace(QUICK, claim_timeout_s=0.1)) as it:
            lease = it.producer.offer(it.ticket(), 16)
            claim = it.claim()
            await it.claimed()
            await asyncio.sleep(0.3)
            claim.place(KvWanted(0, (1,)))
            lease.computed(KvComputed((5,), True))
            await eventually(lambda: it.arrived == 1)

    run_bounded(body())


def test_a_claim_for_a_prefill_that_never_begins_times_out() -> None:
    async def body() -> None:
        async with pair(msgspec.structs.replace(QUICK, claim_timeout_s=0.2)) as it:
            it.claim()
            await it.lost_with(PeerLost, "has not begun within 0.2 s")

    run_bounded(body())


@pytest.mark.parametrize("when", ["before the claim", "while it waits", "claimed"])
@pytest.mark.parametrize("error", [InvalidRequest("too long"), EngineFailed("a step failed"), PeerLost("gone")])
def test_a_failed_prefill_fails_its_claim_with_the_same_error(when: str, error: BatonError) -> None:
    async def body() -> None:
        async with pair() as it:
            if when == "before the claim":
                it.producer.refuse(it.ticket(), error)
                it.claim()
            elif when == "while it waits":
                it.claim()
                await it.waiting()
                it.producer.refuse(it.ticket(), error)
            else:
                lease = it.producer.offer(it.ticket(), 16)
                it.claim()
                await it.claimed()
                lease.fail(error)
                assert it.producer.rooms.ended["failed"] == 1
            await it.lost_with(type(error), error.message)

    run_bounded(body())


def test_a_cancelled_prefill_is_a_lost_peer_to_its_decode() -> None:
    async def body() -> None:
        async with pair() as it:
            lease = it.producer.offer(it.ticket(), 16)
            it.claim()
            await it.claimed()
            lease.fail(Cancelled("the client left"))
            await it.lost_with(PeerLost, "the client left")
            assert it.producer.rooms.ended["cancelled"] == 1

    run_bounded(body())


@pytest.mark.parametrize("when", ["at once", "while it waits", "claimed", "placed"])
def test_closing_a_claim_ends_the_lease(when: str) -> None:
    async def body() -> None:
        async with pair() as it:
            lost: list[BatonError] = []
            early = when in ("at once", "while it waits")
            if not early:
                lease = it.producer.offer(it.ticket(), 16)
                lease.on_lost(lost.append)
            claim = it.claim()
            if when == "while it waits":
                await it.waiting()
            elif not early:
                await it.claimed()
            if when == "placed":
                claim.place(KvWanted(0, (1, 2)))
                lease.computed(KvComputed((1,)))
                await eventually(lambda: sum(it.consumer.bytes_by_transport.values()) > 0)
            await claim.close()
            if early:
                await eventually(lambda: it.producer.rooms.remembered == 1)
                with pytest.raises(Cancelled):
                    it.producer.offer(it.ticket(), 16)
            else:
                await eventually(lambda: [type(error) for error in lost] == [Cancelled])
                assert it.producer.rooms.ended["cancelled"] == 1
            assert (it.arrived, it.lost) == (0, [])

    run_bounded(body())


def test_a_ticket_can_be_declined_after_the_prefill_has_begun() -> None:
    async def body() -> None:
        async with pair() as it:
            lease = it.producer.offer(it.ticket(), 16)
            it.consumer.decline(it.ticket())
            with pytest.raises(Cancelled):
                await lease.ended()

    run_bounded(body())


def test_a_worker_whose_kv_cache_is_not_compatible_can_decline() -> None:
    async def body() -> None:
        async with pair(shape=msgspec.structs.replace(SHAPE, block_size=32)) as it:
            lease = it.producer.offer(it.ticket(), 16)
            it.consumer.decline(it.ticket())
            with pytest.raises(Cancelled):
                await asyncio.wait_for(lease.ended(), QUICK.claim_timeout_s / 2)
            assert it.producer.rooms.ended["cancelled"] == 1

    run_bounded(body())


@pytest.mark.parametrize("then", ["it is claimed", "it ends"])
def test_a_late_decline_leaves_a_room_alone_that_is_no_longer_offered(then: str) -> None:
    async def body() -> None:
        async with pair() as it:
            lease = it.producer.offer(it.ticket(), 16)
            other = msgspec.structs.replace(it.mine.memory, shape=msgspec.structs.replace(SHAPE, block_size=32))
            with claim_by_hand(it, wire.encode(wire.Claim(0, SECRET, other))) as refused:
                await asyncio.get_running_loop().run_in_executor(None, refused.recv, 1)
                if then == "it is claimed":
                    claim = it.claim()
                    await it.claimed()
                else:
                    lease.fail(PeerLost("enough"))
                refused.sendall(wire.encode(wire.encode_error(Cancelled("given up"))))
                await eventually(lambda: it.producer.open_sessions == (then == "it is claimed"))
            assert it.producer.rooms.ended["cancelled"] == 0
            if then == "it is claimed":
                assert it.producer.rooms.open["claimed"] == 1
                await claim.close()

    run_bounded(body())


def test_a_claim_closed_at_any_moment_cancels_its_lease() -> None:
    """Even when Claim and Failed arrive in one packet: the producer answers the first before it reads the second."""

    async def body() -> None:
        async with pair() as it:
            for room in range(50):
                lease = it.producer.offer(it.ticket(room), 16)
                lease.computed(KvComputed(tuple(range(BLOCKS)), True))
                claim = it.claim(room)
                for _ in range(room // 2):
                    await asyncio.sleep(0)
                await claim.close()
                with pytest.raises(Cancelled):
                    await lease.ended()
            assert it.producer.rooms.ended == {"done": 0, "failed": 0, "expired": 0, "cancelled": 50}

    run_bounded(body())


def test_claims_at_a_producer_that_shuts_down_are_lost() -> None:
    async def body() -> None:
        async with pair() as it:
            it.producer.offer(it.ticket(), 16)
            it.claim()
            await it.claimed()
            await it.producer.close()
            await it.lost_with(PeerLost, "shutting down")
            it.lost.clear()
            it.claim()
            await it.lost_with(PeerLost, "cannot connect to the worker")

    run_bounded(body())


def test_a_producer_without_heartbeats_is_lost() -> None:
    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            async with pair(msgspec.structs.replace(QUICK, peer_timeout_s=0.2)) as it:
                ticket = msgspec.structs.replace(it.ticket(), port=silent.getsockname()[1])
                it.consumer.claim(ticket, it.count, it.lost.append)
                await it.lost_with(PeerLost, "has sent nothing for")

    run_bounded(body())


def claim_by_hand(it: Pair, *frames: bytes) -> socket.socket:
    caller = socket.create_connection(it.producer.address)
    caller.sendall(wire.ROOM_PREAMBLE + b"".join(frames))
    return caller


def test_a_consumer_without_heartbeats_loses_its_room() -> None:
    async def body() -> None:
        async with pair(msgspec.structs.replace(QUICK, peer_timeout_s=0.2)) as it:
            lease = it.producer.offer(it.ticket(), 16)
            with claim_by_hand(it, wire.encode(wire.Claim(0, SECRET, it.mine.memory))):
                with pytest.raises(PeerLost, match="has sent nothing for"):
                    await lease.ended()
                assert it.producer.rooms.ended["failed"] == 1

    run_bounded(body())


def test_a_consumer_that_disconnects_loses_its_room() -> None:
    async def body() -> None:
        async with pair() as it:
            lease = it.producer.offer(it.ticket(), 16)
            with claim_by_hand(it, wire.encode(wire.Claim(0, SECRET, it.mine.memory))):
                await it.claimed()
            with pytest.raises(PeerLost):
                await lease.ended()

    run_bounded(body())


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        wire.ROOM_PREAMBLE + b"\0\0\0\0\1\1\1\1",
        wire.ROOM_PREAMBLE + wire.HEAD.pack(2**31, 0),
        wire.ROOM_PREAMBLE + wire.encode(wire.Taken()),
        wire.ROOM_PREAMBLE + wire.encode(wire.Open("shm")),
        wire.DATA_PREAMBLE + bytes(64),
        wire.ROOM_PREAMBLE[:5],
        b"",
    ],
)
def test_invalid_bytes_close_their_own_connection_only(garbage: bytes) -> None:
    async def body() -> None:
        async with pair() as it:
            lease = it.producer.offer(it.ticket(), 16)
            claim = it.claim()
            await it.claimed()
            with socket.create_connection(it.producer.address) as caller:
                caller.sendall(garbage)
                if len(garbage) >= wire.PREAMBLE_BYTES:
                    caller.setblocking(False)
                    loop = asyncio.get_running_loop()
                    async with asyncio.timeout(8):
                        try:
                            while await loop.sock_recv(caller, 4096):
                                pass
                        except ConnectionError:
                            pass
            claim.place(KvWanted(0, (1,)))
            lease.computed(KvComputed((5,), True))
            await eventually(lambda: it.arrived == 1)

    run_bounded(body(), limit_s=30)


async def until_closed(caller: socket.socket) -> None:
    """Read until the producer has closed the connection."""
    caller.setblocking(False)
    try:
        while await asyncio.get_running_loop().sock_recv(caller, 4096):
            pass
    except ConnectionError:
        pass


LONG_MODEL = msgspec.structs.replace(SHAPE, model="m" * 1_000_000)
LONG_MEMORY = BlockMemory(shape=LONG_MODEL, address=0, planes=4, plane_bytes=1, block_bytes=1, blocks=1)


@pytest.mark.parametrize(
    "messages",
    [
        (wire.Claim(5, b"s" * 1_000_000, None), wire.Failed("cancelled", "")),
        (wire.Claim(5, SECRET, LONG_MEMORY), wire.Failed("cancelled", "")),
        (wire.Claim(5, SECRET, None), wire.Failed("cancelled", "m" * 1_000_000)),
        (wire.Claim(5, SECRET, None), wire.Failed("peer_lost", "m")),
    ],
    ids=["secret", "memory", "reason", "not a decline"],
)
def test_nothing_that_is_sent_without_a_secret_is_remembered_but_declines(messages: Sequence[wire.Message]) -> None:
    async def body() -> None:
        async with pair() as it:
            with claim_by_hand(it, *map(wire.encode, messages)) as caller:
                await until_closed(caller)
            assert it.producer.rooms.remembered == 0

    run_bounded(body())


def test_declined_tickets_are_forgotten_without_a_further_claim() -> None:
    async def body() -> None:
        async with pair(msgspec.structs.replace(QUICK, claim_timeout_s=0.3)) as it:
            it.consumer.decline(it.ticket())
            await eventually(lambda: it.producer.rooms.remembered == 1)
            await eventually(lambda: it.producer.rooms.remembered == 0)

    run_bounded(body())


def test_connections_without_a_secret_are_limited_and_do_not_displace_claims() -> None:
    async def body() -> None:
        options = msgspec.structs.replace(QUICK, transports="tcp", max_connections=4, peer_timeout_s=10.0)
        async with pair(options) as it:
            lease = it.producer.offer(it.ticket(), 16)
            claim = it.claim()
            await it.claimed()
            waits = wire.encode(wire.Claim(99, SECRET, it.mine.memory))
            sent = [b"", b"Bat", wire.ROOM_PREAMBLE, wire.ROOM_PREAMBLE + waits, wire.DATA_PREAMBLE]
            callers = [socket.create_connection(it.producer.address) for _ in range(20)]
            for number, caller in enumerate(callers):
                caller.sendall(sent[number % len(sent)])
            for caller in callers[:-3]:
                await until_closed(caller)
            assert it.producer.connections <= 4
            claim.place(KvWanted(0, (1,)))
            lease.computed(KvComputed((5,), True))
            await eventually(lambda: it.arrived == 1)
            assert it.lost == []
            for caller in callers:
                caller.close()

    run_bounded(body())


def test_a_connection_beyond_the_limit_is_refused_if_all_others_are_verified() -> None:
    async def body() -> None:
        async with pair(msgspec.structs.replace(QUICK, max_connections=2)) as it:
            leases = [it.producer.offer(it.ticket(room), 16) for room in range(2)]
            claims = [it.claim(room) for room in range(2)]
            await eventually(lambda: it.producer.rooms.open["claimed"] == 2)
            it.claim(99)
            await it.lost_with(PeerLost, "")
            assert it.producer.rooms.open["claimed"] == 2
            for lease, claim in zip(leases, claims, strict=True):
                await claim.close()
                with pytest.raises(Cancelled):
                    await lease.ended()

    run_bounded(body())


def test_a_corrupt_frame_after_the_claim_ends_that_room_only() -> None:
    async def body() -> None:
        async with pair() as it:
            broken, sound = it.producer.offer(it.ticket(1), 16), it.producer.offer(it.ticket(2), 16)
            corrupt = bytearray(wire.encode(wire.Taken()))
            corrupt[-1] ^= 1
            claim = wire.encode(wire.Claim(1, SECRET, it.mine.memory))
            with claim_by_hand(it, claim, bytes(corrupt)), pytest.raises(PeerLost, match="corrupt"):
                await broken.ended()
            it.claim(2).place(KvWanted(0, (1,)))
            sound.computed(KvComputed((5,), True))
            await eventually(lambda: it.arrived == 1)

    run_bounded(body())


def test_taken_before_the_last_block_is_refused() -> None:
    async def body() -> None:
        async with pair() as it:
            lease = it.producer.offer(it.ticket(), 16)
            claim = wire.encode(wire.Claim(0, SECRET, it.mine.memory))
            with (
                claim_by_hand(it, claim, wire.encode(wire.Taken())),
                pytest.raises(PeerLost, match="unexpected message Taken"),
            ):
                await lease.ended()

    run_bounded(body())


class StalledChannel:
    """A Channel whose fetch never ends."""

    def __init__(self) -> None:
        self.is_fetching = False

    async def fetch(self, ticket: Ticket, theirs: Sequence[int], mine: Sequence[int]) -> None:
        self.is_fetching = True
        await asyncio.Event().wait()

    def close(self) -> None:
        pass


class ScriptedClient:
    """A TransportClient called shm that returns `channel`, or fails to connect."""

    name = "shm"

    def __init__(self, channel: StalledChannel | None = None) -> None:
        self._channel = channel

    async def connect(self, ticket: Ticket, memory: BlockMemory, details: dict[str, object]) -> StalledChannel:
        if self._channel is None:
            raise PeerLost("another host")
        return self._channel

    async def close(self) -> None:
        pass


def test_a_lease_that_fails_while_its_kv_is_read_loses_the_claim() -> None:
    async def body() -> None:
        channel = StalledChannel()
        async with pair(transports=lambda _: [ScriptedClient(channel)]) as it:
            lease = it.producer.offer(it.ticket(), 16)
            lease.computed(KvComputed((5,), True))
            it.claim().place(KvWanted(0, (1,)))
            await eventually(lambda: channel.is_fetching)
            lease.fail(PeerLost("the block is needed"))
            await it.lost_with(PeerLost, "the block is needed")

    run_bounded(body())


class SharedChannel:
    """A Channel that fails the fetches of room 1, and completes the others when `may_end` is set."""

    def __init__(self) -> None:
        self.fetching = 0
        self.closed = 0
        self.may_end = asyncio.Event()

    async def fetch(self, ticket: Ticket, theirs: Sequence[int], mine: Sequence[int]) -> None:
        if ticket.room == 1:
            raise PeerLost("room 1 is not open")
        self.fetching += 1
        await self.may_end.wait()
        self.fetching -= 1

    def close(self) -> None:
        assert not self.fetching, "a channel is closed when no fetch is running"
        self.closed += 1


def test_a_failed_fetch_leaves_the_channel_to_the_handoffs_that_use_it() -> None:
    async def body() -> None:
        channels: list[SharedChannel] = []

        class Client(ScriptedClient):
            async def connect(self, ticket: Ticket, memory: BlockMemory, details: dict[str, object]) -> SharedChannel:  # type: ignore[override]
                channels.append(SharedChannel())
                return channels[-1]

        async with pair(transports=lambda _: [Client()]) as it:
            for room in (1, 2):
                it.producer.offer(it.ticket(room), 16).computed(KvComputed((5,), True))
            it.claim(2).place(KvWanted(0, (1,)))
            await eventually(lambda: bool(channels) and channels[0].fetching == 1)
            it.claim(1).place(KvWanted(0, (2,)))
            await it.lost_with(PeerLost, "room 1 is not open")
            assert channels[0].closed == 0
            it.producer.offer(it.ticket(3), 16).computed(KvComputed((5,), True))
            it.claim(3).place(KvWanted(0, (3,)))
            await eventually(lambda: len(channels) == 2 and channels[1].fetching == 1)
            for channel in channels:
                channel.may_end.set()
            await eventually(lambda: it.arrived == 2)
            assert [channel.closed for channel in channels] == [1, 0], "new handoffs use a new channel"
            assert len(it.lost) == 1
        assert [channel.closed for channel in channels] == [1, 1]

    run_bounded(body())


class BrokenChannel(StalledChannel):
    """A Channel with a fault in its own code."""

    async def fetch(self, ticket: Ticket, theirs: Sequence[int], mine: Sequence[int]) -> None:
        raise ZeroDivisionError("a fault")


def test_an_unexpected_exception_while_kv_is_fetched_loses_the_claim_on_both_sides() -> None:
    async def body() -> None:
        async with pair(transports=lambda _: [ScriptedClient(BrokenChannel())]) as it:
            lease = it.producer.offer(it.ticket(), 16)
            lease.computed(KvComputed((5,), True))
            it.claim().place(KvWanted(0, (1,)))
            await it.lost_with(PeerLost, "unexpected error")
            with pytest.raises(PeerLost, match="unexpected error"):
                await lease.ended()

    run_bounded(body())


@pytest.mark.parametrize("error", [ZeroDivisionError("a fault"), EngineFailed("cannot continue")])
def test_an_engine_that_refuses_the_kv_that_arrived_fails_its_request(error: Exception) -> None:
    async def body() -> None:
        async with pair() as it:

            def refuse() -> None:
                raise error

            it.producer.offer(it.ticket(), 16).computed(KvComputed((5,), True))
            claim = it.consumer.claim(it.ticket(), refuse, it.lost.append)
            claim.place(KvWanted(0, (1,)))
            await it.lost_with(EngineFailed if isinstance(error, EngineFailed) else PeerLost, "")

    run_bounded(body())


def test_an_offer_that_fails_unexpectedly_leaves_no_room_and_loses_its_claim() -> None:
    async def body() -> None:
        async with pair() as it:
            it.claim()
            await it.waiting()
            with pytest.raises(TypeError):
                it.producer.offer(it.ticket(), object())  # type: ignore[arg-type]
            await it.lost_with(PeerLost, "unexpected error")
            assert sum(it.producer.rooms.open.values()) == 0

    run_bounded(body())


def test_a_transport_that_fails_to_open_unexpectedly_is_followed_by_the_next() -> None:
    async def body() -> None:
        theirs, mine = Cache(1), Cache(2)
        # No descriptor of a file can be negative: the check of its seals raises ValueError.
        memory = msgspec.structs.replace(theirs.memory, descriptor=-1)
        producer = await open_room_server(QUICK, memory, "127.0.0.1")
        consumer = RoomClient(QUICK, mine.memory, [ScriptedClient(), TcpClient(mine.memory)])
        it = Pair(producer, consumer, theirs, mine)
        producer.offer(it.ticket(), 16).computed(KvComputed((5,), True))
        it.claim().place(KvWanted(0, (1,)))
        await eventually(lambda: it.arrived == 1)
        await consumer.close()
        await producer.close()

    run_bounded(body())


@pytest.mark.parametrize("end", ["failed", "taken"])
def test_blocks_are_not_sent_after_their_room_has_ended(end: str) -> None:
    """The engine may write the KV of another request into them at once."""

    async def body() -> None:
        cache = Cache(1, planes=2, blocks=64, block_bytes=1 << 20)  # more than the buffers of a socket
        options = msgspec.structs.replace(QUICK, transports="tcp", peer_timeout_s=10.0)
        producer = await open_room_server(options, cache.memory, "127.0.0.1")
        it = Pair(producer, open_room_client(options, cache.memory), cache, cache)
        lease = producer.offer(it.ticket(), 16)
        lease.computed(KvComputed(tuple(range(64)), True))
        loop = asyncio.get_running_loop()
        with (
            claim_by_hand(it, wire.encode(wire.Claim(0, SECRET, cache.memory))) as room,
            socket.create_connection(producer.address) as data,
        ):
            await it.claimed()
            request = msgspec.msgpack.encode(Request(0, SECRET, np.arange(64, dtype="<u4").tobytes(), False))
            proof = msgspec.msgpack.encode(Request(0, SECRET, b"", False))
            data.sendall(wire.DATA_PREAMBLE + REQUEST_HEAD.pack(len(proof)) + proof)
            data.setblocking(False)
            received = len(await loop.sock_recv(data, ANSWER_HEAD.size))
            await loop.sock_sendall(data, REQUEST_HEAD.pack(len(request)) + request)
            received += len(await loop.sock_recv(data, 1))  # the answer has begun
            if end == "failed":
                lease.fail(PeerLost("enough"))
            else:
                room.sendall(wire.encode(wire.Taken()))
                await lease.ended()
            while received < cache.memory.nbytes and (part := await loop.sock_recv(data, 1 << 20)):
                received += len(part)
            assert received < cache.memory.nbytes
        await it.consumer.close()
        await producer.close()

    run_bounded(body())


def test_incompatible_caches_are_refused_with_the_difference() -> None:
    async def body() -> None:
        async with pair(shape=msgspec.structs.replace(SHAPE, block_size=32)) as it:
            lease = it.producer.offer(it.ticket(), 16)
            it.claim()
            await it.lost_with(PeerLost, "block_size")
            assert it.producer.rooms.open["offered"] == 1
            lease.fail(PeerLost("enough"))

    run_bounded(body())


def test_a_claim_without_the_secret_learns_nothing_of_the_model_and_the_kv_shape() -> None:
    async def body() -> None:
        async with pair(shape=msgspec.structs.replace(SHAPE, model="another", block_size=32)) as it:
            lease = it.producer.offer(it.ticket(1), 16)
            it.claim(1, secret=b"sixteen other by")
            await it.lost_with(PeerLost, "wrong secret")
            it.lost.clear()
            it.claim(2)
            await it.waiting()
            it.producer.refuse(it.ticket(2), PeerLost("gone"))
            await it.lost_with(PeerLost, "gone")
            lease.fail(PeerLost("enough"))

    run_bounded(body())


def test_a_prefill_with_fewer_blocks_than_needed_is_refused() -> None:
    async def body() -> None:
        async with pair() as it:
            lease = it.producer.offer(it.ticket(), 16)
            it.claim().place(KvWanted(0, (1, 2, 3)))
            lease.computed(KvComputed((5, 6), True))
            await it.lost_with(PeerLost, "2 blocks for this request, and 3 are needed")
            await it.ended("failed")

    run_bounded(body())


def test_blocks_that_are_not_wanted_are_not_fetched() -> None:
    async def body() -> None:
        async with pair() as it:
            lease = it.producer.offer(it.ticket(), 16)
            it.claim().place(KvWanted(1, (1,)))
            lease.computed(KvComputed((5,)))
            lease.computed(KvComputed((6, 7), True))
            await eventually(lambda: it.arrived == 1)
            assert (it.mine.blocks[:, 1] == it.theirs.blocks[:, 6]).all()
            assert not np.delete(it.mine.blocks, [1], axis=1).any()

    run_bounded(body())


def test_parts_of_what_is_offered_are_fetched_each_to_its_place() -> None:
    async def body() -> None:
        async with pair() as it:
            lease = it.producer.offer(it.ticket(), 16)
            it.claim().place(KvWanted(0, (1, 2)), KvWanted(3, (8, 9)))
            lease.computed(KvComputed((5,)))
            lease.computed(KvComputed((6, 7, 20, 21, 22), True))
            await eventually(lambda: it.arrived == 1)
            assert (it.mine.blocks[:, [1, 2, 8, 9]] == it.theirs.blocks[:, [5, 6, 20, 21]]).all()
            assert not np.delete(it.mine.blocks, [1, 2, 8, 9], axis=1).any()
            again = it.producer.offer(it.ticket(1), 16)
            it.claim(1).place()
            again.computed(KvComputed((5,), True))
            await again.ended()
            await eventually(lambda: it.arrived == 2)

    run_bounded(body())


@pytest.mark.parametrize("known", ["before the claim", "after the claim"])
def test_the_media_of_a_prompt_reach_the_consumer(known: str) -> None:
    async def body() -> None:
        async with pair() as it:
            lease = it.producer.offer(it.ticket(), 16)
            if known == "before the claim":
                lease.placed(MEDIA)
            claim = it.claim()
            await it.claimed()
            waiting = asyncio.create_task(claim.media())
            if known == "after the claim":
                await asyncio.sleep(0)
                assert not waiting.done()
                lease.placed(MEDIA)
            assert await waiting == MEDIA
            lease.fail(PeerLost("enough"))
            await it.lost_with(PeerLost, "enough")

    run_bounded(body())


def test_a_claim_that_is_lost_before_the_media_are_known_raises_the_reason() -> None:
    async def body() -> None:
        async with pair() as it:
            lease = it.producer.offer(it.ticket(), 16)
            claim = it.claim()
            await it.claimed()
            lease.fail(InvalidRequest("not an image"))
            with pytest.raises(InvalidRequest, match="not an image"):
                await claim.media()

    run_bounded(body())


def test_a_transport_that_cannot_connect_is_followed_by_the_next() -> None:
    async def body() -> None:
        async with pair(transports=lambda memory: [ScriptedClient(), TcpClient(memory)]) as it:
            it.producer.offer(it.ticket(), 16).computed(KvComputed((5,), True))
            it.claim().place(KvWanted(0, (1,)))
            await eventually(lambda: it.arrived == 1)
            assert set(it.consumer.bytes_by_transport) == {"tcp"}

    run_bounded(body())


class ConnectingClient(ScriptedClient):
    """A TransportClient called shm whose connects end, in turn, when a test sets their result."""

    def __init__(self) -> None:
        super().__init__()
        self.connects: list[asyncio.Future[StalledChannel]] = []

    async def connect(self, ticket: Ticket, memory: BlockMemory, details: dict[str, object]) -> StalledChannel:
        self.connects.append(asyncio.get_running_loop().create_future())
        return await self.connects[-1]


def test_claims_that_wait_for_a_negotiation_share_its_failure() -> None:
    async def body() -> None:
        client = ConnectingClient()
        async with pair(transports=lambda _: [client]) as it:
            for room in range(4):
                it.producer.offer(it.ticket(room), 16)
                it.claim(room)
            await eventually(lambda: it.producer.rooms.open["claimed"] == 4 and len(client.connects) == 1)
            await asyncio.sleep(0.05)  # until all of them wait
            client.connects[0].set_exception(PeerLost("unreachable"))
            await eventually(lambda: len(it.lost) == 4)
            assert len(client.connects) == 1
            assert all("unreachable" in error.message for error in it.lost)
            it.producer.offer(it.ticket(4), 16)
            claim = it.claim(4)
            await eventually(lambda: len(client.connects) == 2)  # a later claim negotiates again
            await claim.close()

    run_bounded(body())


def test_a_claim_that_is_closed_while_it_negotiates_leaves_that_to_the_next() -> None:
    async def body() -> None:
        client = ConnectingClient()
        channel = StalledChannel()
        async with pair(transports=lambda _: [client]) as it:
            claims = []
            for room in range(2):
                it.producer.offer(it.ticket(room), 16).computed(KvComputed((5,), True))
                claims.append(it.claim(room))
                claims[-1].place(KvWanted(0, (1,)))
                await eventually(lambda: len(client.connects) == 1)
            await eventually(lambda: it.producer.rooms.open["claimed"] == 2)
            await asyncio.sleep(0.05)
            await claims[0].close()
            await eventually(lambda: len(client.connects) == 2)
            client.connects[1].set_result(channel)
            await eventually(lambda: channel.is_fetching)
            assert it.lost == []
            await claims[1].close()

    run_bounded(body())


def test_a_transport_that_is_not_opened_in_time_is_followed_by_the_next() -> None:
    """The details of the first one arrive after those of the second were requested."""
    connected: list[tuple[str, dict[str, object]]] = []

    class Client(ScriptedClient):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        async def connect(self, ticket: Ticket, memory: BlockMemory, details: dict[str, object]) -> StalledChannel:
            connected.append((self.name, details))
            raise PeerLost("seen")

    async def produce(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(wire.PREAMBLE_BYTES)
        frames, opening = wire.Frames(), 0
        while data := await reader.read(4096):
            for message in frames.feed(data):
                if isinstance(message, wire.Claim):
                    writer.write(wire.encode(wire.Accepted("p", message.memory, ("slow", "quick"), 1)))
                elif isinstance(message, wire.Open):
                    opening += 1
                if isinstance(message, wire.Open) and opening == 2:
                    writer.write(wire.encode(wire.Opened("slow", {"of": "slow"})))
                    writer.write(wire.encode(wire.Opened("quick", {"of": "quick"})))
        writer.close()

    async def body() -> None:
        mine = Cache(2)
        server = await asyncio.start_server(produce, "127.0.0.1", 0)
        ticket = Ticket(host="127.0.0.1", port=server.sockets[0].getsockname()[1], room=0, secret=SECRET)
        consumer = RoomClient(QUICK_UNANSWERED, mine.memory, [Client("slow"), Client("quick")], answer_timeout_s=0.1)
        lost: list[BatonError] = []
        consumer.claim(ticket, lambda: None, lost.append)
        await eventually(lambda: bool(lost))
        assert connected == [("quick", {"of": "quick"})]
        assert "did not open transport slow within" in lost[0].message
        await consumer.close()
        server.close()

    run_bounded(body())


def test_a_claim_is_lost_when_an_answer_and_the_end_arrive_together() -> None:
    """As in a worker that was frozen, and reads both when it continues."""

    async def produce(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(wire.PREAMBLE_BYTES)
        frames = wire.Frames()
        while data := await reader.read(4096):
            for message in frames.feed(data):
                if isinstance(message, wire.Claim):
                    writer.write(wire.encode(wire.Accepted("p", message.memory, ("shm",), 1)))
                elif isinstance(message, wire.Open):
                    end = wire.encode(wire.encode_error(PeerLost("the other worker was silent")))
                    writer.write(wire.encode(wire.Opened("shm", {})) + end)
        writer.close()

    async def body() -> None:
        server = await asyncio.start_server(produce, "127.0.0.1", 0)
        ticket = Ticket(host="127.0.0.1", port=server.sockets[0].getsockname()[1], room=0, secret=SECRET)
        consumer = RoomClient(QUICK_UNANSWERED, Cache(2).memory, [ScriptedClient(StalledChannel())])
        lost: list[BatonError] = []
        consumer.claim(ticket, lambda: None, lost.append)
        await eventually(lambda: bool(lost))
        assert lost[0].message == "the other worker was silent"
        await consumer.close()
        server.close()

    run_bounded(body())


def test_a_claim_is_lost_when_its_connection_is_made_as_its_time_ends() -> None:
    """As in a worker that was frozen meanwhile. The transport of uvloop is closed then, and raises when it is used."""

    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
            host, port = listener.getsockname()
            consumer = RoomClient(msgspec.structs.replace(QUICK, connect_timeout_s=0.05), None, ())
            lost: list[BatonError] = []
            for room in range(20):
                ticket = Ticket(host=host, port=port, room=room, secret=SECRET)
                consumer.claim(ticket, lambda: None, lost.append)
                await asyncio.sleep(0)
                freeze(0.06)
            await eventually(lambda: len(lost) == 20)
            await consumer.close()

    def freeze(seconds: float) -> None:
        time.sleep(seconds)

    uvloop.run(body())


def test_workers_without_a_common_transport_fail_with_the_offered_ones() -> None:
    async def body() -> None:
        async with pair(msgspec.structs.replace(QUICK, transports="tcp")) as it:
            shm_only = open_room_client(msgspec.structs.replace(QUICK, transports="shm"), it.mine.memory)
            lease = it.producer.offer(it.ticket(), 16)
            shm_only.claim(it.ticket(), it.count, it.lost.append)
            await it.lost_with(PeerLost, "no transport reads the other worker's memory (it offers tcp)")
            with pytest.raises(PeerLost):
                await lease.ended()
            await shm_only.close()

    run_bounded(body())


def test_drain_waits_until_every_room_has_ended() -> None:
    async def body() -> None:
        async with pair() as it:
            assert await it.producer.drain(0.01)
            lease = it.producer.offer(it.ticket(), 16)
            assert not await it.producer.drain(0.05)
            draining = asyncio.create_task(it.producer.drain(5))
            lease.fail(PeerLost("enough"))
            assert await draining

    run_bounded(body())
