"""Producer and borrower over real connections: every way a room can end, told to both sides, with nothing left over."""

import asyncio
import fcntl
import mmap
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from baton.config.transfer import KvTransferOptions
from baton.errors import BatonError, Cancelled, EngineFailed, InvalidRequest, PeerLost
from baton.ports.transfer import KvMemory, KvShape
from baton.protocol.handoff import Ticket
from baton.protocol.outputs import KvComputed, KvWanted
from baton.testing import eventually, run_bounded
from baton.transfer import wire
from baton.transfer.room_client import RoomClaim, RoomClient, open_room_client
from baton.transfer.room_server import RoomServer, open_room_server

SHAPE = KvShape(model="m", dtype="bfloat16", layers=2, kv_heads=1, head_dim=16, block_size=16)
PLANES, BLOCK_BYTES, BLOCKS = 4, 512, 32
SECRET = b"sixteen bytes ok"
QUICK = KvTransferOptions(claim_timeout_s=5.0, heartbeat_s=0.05, peer_timeout_s=1.0)


class Cache:
    """A KV cache without an engine."""

    def __init__(self, blocks: int = BLOCKS, fill: bool = False, shape: KvShape = SHAPE) -> None:
        plane_bytes = blocks * BLOCK_BYTES
        self.descriptor = os.memfd_create("cache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, PLANES * plane_bytes)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._pages = mmap.mmap(self.descriptor, PLANES * plane_bytes)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._pages, np.uint8).reshape(PLANES, blocks, BLOCK_BYTES)
        if fill:
            self.bytes[:] = np.random.default_rng(0).integers(0, 255, self.bytes.shape, np.uint8)
        self.memory = KvMemory(
            shape=shape,
            address=self.bytes.ctypes.data,
            planes=PLANES,
            plane_bytes=plane_bytes,
            block_bytes=BLOCK_BYTES,
            blocks=blocks,
            descriptor=self.descriptor,
        )

    def close(self) -> None:
        os.close(self.descriptor)


class Pair:
    """A lender and a borrower, with what the borrower's loans said."""

    def __init__(self, producer: RoomServer, consumer: RoomClient, theirs: Cache, mine: Cache) -> None:
        self.producer, self.consumer, self.theirs, self.mine = producer, consumer, theirs, mine
        self.arrived = 0
        self.lost: list[BatonError] = []

    def ticket(self, room: int = 0, secret: bytes = SECRET) -> Ticket:
        host, port = self.producer.address
        return Ticket(host=host, port=port, room=room, secret=secret)

    def claim(self, room: int = 0, secret: bytes = SECRET) -> RoomClaim:
        return self.consumer.claim(self.ticket(room, secret), self._count, self.lost.append)

    def _count(self) -> None:
        self.arrived += 1

    async def claimed(self) -> None:
        await eventually(lambda: self.producer.rooms.open["claimed"] == 1)

    async def ended(self, state: str, count: int = 1) -> None:
        await eventually(lambda: self.producer.rooms.ended[state] == count)

    async def told(self, error: type[BatonError], words: str) -> None:
        await eventually(lambda: bool(self.lost))
        [lost] = self.lost
        assert type(lost) is error
        assert words in lost.message
        assert self.arrived == 0


@asynccontextmanager
async def pair(
    options: KvTransferOptions = QUICK, shape: KvShape = SHAPE, host: str = "127.0.0.1"
) -> AsyncIterator[Pair]:
    theirs, mine = Cache(fill=True), Cache(blocks=40, shape=shape)
    producer = await open_room_server(options, theirs.memory, host)
    consumer = open_room_client(options, mine.memory)
    made = Pair(producer, consumer, theirs, mine)
    try:
        yield made
        await eventually(lambda: not producer._visits and not producer._waiting and not consumer._loans)
        assert sum(producer.rooms.open.values()) == 0
    finally:
        await consumer.close()
        await producer.close()
        assert not producer._tasks
        assert not consumer._declining
        theirs.close()
        mine.close()


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
            assert (it.mine.bytes[:, [10, 30, 11]] == it.theirs.bytes[:, [4, 9, 0]]).all()
            untouched = np.delete(it.mine.bytes, [10, 30, 11], axis=1)
            assert not untouched.any()
            assert it.producer.rooms.ended["done"] == 1
            await claim.close()

    run_bounded(body())


def test_one_who_comes_before_the_prefill_waits_for_it() -> None:
    async def body() -> None:
        async with pair() as it:
            claim = it.claim()
            claim.place(KvWanted(0, (1,)))
            await eventually(lambda: bool(it.producer._waiting))
            lease = it.producer.offer(it.ticket(), 16)
            lease.computed(KvComputed((5,), True))
            await eventually(lambda: it.arrived == 1)
            assert (it.mine.bytes[:, 1] == it.theirs.bytes[:, 5]).all()

    run_bounded(body())


def test_many_rooms_at_once_and_room_zero_again_and_again() -> None:
    async def body() -> None:
        async with pair() as it:
            for turn in range(3):
                for room in range(20):
                    it.producer.offer(it.ticket(room), 16).computed(KvComputed((room,), True))
                    it.claim(room).place(KvWanted(0, (room + 10,)))
                await eventually(lambda turn=turn: it.arrived == 20 * (turn + 1))
                assert (it.mine.bytes[:, 10:30] == it.theirs.bytes[:, :20]).all()
            assert it.lost == []

    run_bounded(body())


def test_ipv6() -> None:
    async def body() -> None:
        async with pair(msgspec.structs.replace(QUICK, transports="tcp"), host="::1") as it:
            assert it.producer.address[0] == "::1"
            it.producer.offer(it.ticket(), 16).computed(KvComputed((5,), True))
            it.claim().place(KvWanted(0, (1,)))
            await eventually(lambda: it.arrived == 1)

    run_bounded(body())


def test_a_wrong_secret_gets_nothing_and_harms_nothing() -> None:
    async def body() -> None:
        async with pair(msgspec.structs.replace(QUICK, claim_timeout_s=0.5)) as it:
            lease = it.producer.offer(it.ticket(), 16)
            it.claim(secret=b"sixteen other by")
            await it.told(PeerLost, "wrong secret")
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
            await it.told(PeerLost, "claimed by somebody else")
            first.place(KvWanted(0, (1,)))
            lease.computed(KvComputed((5,), True))
            await eventually(lambda: it.arrived == 1)

    run_bounded(body())


def test_kv_that_nobody_claims_expires() -> None:
    async def body() -> None:
        async with pair(msgspec.structs.replace(QUICK, claim_timeout_s=0.1)) as it:
            lost: list[BatonError] = []
            lease = it.producer.offer(it.ticket(), 16)
            lease.on_lost(lost.append)
            with pytest.raises(PeerLost, match="nobody has come"):
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


def test_a_claim_for_a_prefill_that_never_begins_ends() -> None:
    async def body() -> None:
        async with pair(msgspec.structs.replace(QUICK, claim_timeout_s=0.2)) as it:
            it.claim()
            await it.told(PeerLost, "has not begun within 0.2 s")

    run_bounded(body())


@pytest.mark.parametrize("when", ["before the claim", "while it waits", "claimed"])
@pytest.mark.parametrize("error", [InvalidRequest("too long"), EngineFailed("a step failed"), PeerLost("gone")])
def test_who_borrows_is_told_why_a_prefill_failed(when: str, error: BatonError) -> None:
    async def body() -> None:
        async with pair() as it:
            if when == "before the claim":
                it.producer.refuse(it.ticket(), error)
                it.claim()
            elif when == "while it waits":
                it.claim()
                await eventually(lambda: bool(it.producer._waiting))
                it.producer.refuse(it.ticket(), error)
            else:
                lease = it.producer.offer(it.ticket(), 16)
                it.claim()
                await it.claimed()
                lease.fail(error)
                assert it.producer.rooms.ended["failed"] == 1
            await it.told(type(error), error.message)

    run_bounded(body())


def test_a_prefill_that_was_cancelled_is_no_cancellation_of_the_decode() -> None:
    async def body() -> None:
        async with pair() as it:
            lease = it.producer.offer(it.ticket(), 16)
            it.claim()
            await it.claimed()
            lease.fail(Cancelled("the client left"))
            await it.told(PeerLost, "the client left")
            assert it.producer.rooms.ended["cancelled"] == 1

    run_bounded(body())


@pytest.mark.parametrize("when", ["at once", "while it waits", "claimed", "placed"])
def test_a_loan_that_is_closed_frees_the_lender(when: str) -> None:
    async def body() -> None:
        async with pair() as it:
            lost: list[BatonError] = []
            early = when in ("at once", "while it waits")
            if not early:
                lease = it.producer.offer(it.ticket(), 16)
                lease.on_lost(lost.append)
            claim = it.claim()
            if when == "while it waits":
                await eventually(lambda: bool(it.producer._waiting))
            elif not early:
                await it.claimed()
            if when == "placed":
                claim.place(KvWanted(0, (1, 2)))
                lease.computed(KvComputed((1,)))
                await eventually(lambda: sum(it.consumer.bytes_by_transport.values()) > 0)
            await claim.close()
            if early:
                await eventually(lambda: bool(it.producer.rooms._ended))
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


def test_the_last_words_of_a_borrower_that_hangs_up_are_heard() -> None:
    """They are said in one breath with the claim, and the lender answers the claim before it reads on."""

    async def body() -> None:
        async with pair() as it:
            for room in range(50):
                lease = it.producer.offer(it.ticket(room), 16)
                lease.computed(KvComputed(tuple(range(BLOCKS)), True))
                claim = it.claim(room)
                await eventually(lambda claim=claim: claim._claimed, every_s=0)
                await claim.close()
                with pytest.raises(Cancelled):
                    await lease.ended()
            assert it.producer.rooms.ended == {"done": 0, "failed": 0, "expired": 0, "cancelled": 50}

    run_bounded(body())


def test_a_lender_that_leaves_is_noticed() -> None:
    async def body() -> None:
        async with pair() as it:
            it.producer.offer(it.ticket(), 16)
            it.claim()
            await it.claimed()
            await it.producer.close()
            await it.told(PeerLost, "shutting down")
            it.lost.clear()
            it.claim()
            await it.told(PeerLost, "cannot reach the prefill worker")

    run_bounded(body())


def test_a_lender_that_falls_silent_is_lost() -> None:
    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as deaf:
            async with pair(msgspec.structs.replace(QUICK, peer_timeout_s=0.2)) as it:
                ticket = msgspec.structs.replace(it.ticket(), port=deaf.getsockname()[1])
                it.consumer.claim(ticket, it._count, it.lost.append)
                await it.told(PeerLost, "nothing was heard")

    run_bounded(body())


def claim_by_hand(it: Pair, *frames: bytes) -> socket.socket:
    caller = socket.create_connection(it.producer.address)
    caller.sendall(wire.LINE + b"".join(frames))
    return caller


def test_a_borrower_that_falls_silent_loses_its_room() -> None:
    async def body() -> None:
        async with pair(msgspec.structs.replace(QUICK, peer_timeout_s=0.2)) as it:
            lease = it.producer.offer(it.ticket(), 16)
            with claim_by_hand(it, wire.encode(wire.Claim(0, SECRET, it.mine.memory))):
                with pytest.raises(PeerLost, match="nothing was heard"):
                    await lease.ended()
                assert it.producer.rooms.ended["failed"] == 1

    run_bounded(body())


def test_a_borrower_that_dies_loses_its_room() -> None:
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
        wire.LINE + b"\0\0\0\0\1\1\1\1",
        wire.LINE + wire.HEAD.pack(2**31, 0),
        wire.LINE + wire.encode(wire.Taken()),
        wire.LINE + wire.encode(wire.Open("shm")),
        wire.DATA + bytes(64),
        wire.LINE[:5],
        b"",
    ],
)
def test_whoever_talks_nonsense_is_hung_up_on_and_harms_nobody(garbage: bytes) -> None:
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


def test_a_corrupt_frame_after_the_claim_ends_that_room_alone() -> None:
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


def test_taken_before_it_is_complete_is_no_end() -> None:
    async def body() -> None:
        async with pair() as it:
            lease = it.producer.offer(it.ticket(), 16)
            claim = wire.encode(wire.Claim(0, SECRET, it.mine.memory))
            with claim_by_hand(it, claim, wire.encode(wire.Taken())), pytest.raises(PeerLost, match="not expected"):
                await lease.ended()

    run_bounded(body())


def test_kv_that_was_given_up_while_it_was_read_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with pair(msgspec.structs.replace(QUICK, transports="shm")) as it:
            lease = it.producer.offer(it.ticket(), 16)
            lease.computed(KvComputed((5,), True))
            monkeypatch.setattr(it.producer.rooms, "check", lambda *_: None)
            claim = it.claim()
            await it.claimed()
            lease.fail(PeerLost("the block is needed"))  # on its way while the borrower reads
            claim.place(KvWanted(0, (1,)))
            await it.told(PeerLost, "the block is needed")

    run_bounded(body())


def test_caches_that_do_not_fit_are_refused_with_the_difference() -> None:
    async def body() -> None:
        async with pair(shape=msgspec.structs.replace(SHAPE, block_size=32)) as it:
            lease = it.producer.offer(it.ticket(), 16)
            it.claim()
            await it.told(PeerLost, "block_size")
            assert it.producer.rooms.open["offered"] == 1
            lease.fail(PeerLost("enough"))

    run_bounded(body())


def test_a_prefill_with_fewer_blocks_than_needed_is_refused() -> None:
    async def body() -> None:
        async with pair() as it:
            lease = it.producer.offer(it.ticket(), 16)
            it.claim().place(KvWanted(0, (1, 2, 3)))
            lease.computed(KvComputed((5, 6), True))
            await it.told(PeerLost, "2 blocks of this prompt, and 3 are needed")
            await it.ended("failed")

    run_bounded(body())


def test_more_blocks_than_wanted_are_left_alone() -> None:
    async def body() -> None:
        async with pair() as it:
            lease = it.producer.offer(it.ticket(), 16)
            it.claim().place(KvWanted(1, (1,)))
            lease.computed(KvComputed((5,)))
            lease.computed(KvComputed((6, 7), True))
            await eventually(lambda: it.arrived == 1)
            assert (it.mine.bytes[:, 1] == it.theirs.bytes[:, 6]).all()
            assert not np.delete(it.mine.bytes, [1], axis=1).any()

    run_bounded(body())


def test_a_way_that_does_not_work_is_followed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with pair(msgspec.structs.replace(QUICK, transports="shm,tcp")) as it:

            async def fail(*_: object) -> None:
                raise PeerLost("another host")

            monkeypatch.setattr(it.consumer._reaches[0], "connect", fail)
            it.producer.offer(it.ticket(), 16).computed(KvComputed((5,), True))
            it.claim().place(KvWanted(0, (1,)))
            await eventually(lambda: it.arrived == 1)
            assert set(it.consumer.bytes_by_transport) == {"tcp"}

    run_bounded(body())


def test_sides_without_a_way_in_common_say_so() -> None:
    async def body() -> None:
        async with pair(msgspec.structs.replace(QUICK, transports="tcp")) as it:
            shm_only = open_room_client(msgspec.structs.replace(QUICK, transports="shm"), it.mine.memory)
            lease = it.producer.offer(it.ticket(), 16)
            shm_only.claim(it.ticket(), it._count, it.lost.append)
            await it.told(PeerLost, "no way to read the prefill worker's memory (it offers tcp)")
            with pytest.raises(PeerLost):
                await lease.ended()
            await shm_only.close()

    run_bounded(body())


def test_draining_waits_for_the_rooms() -> None:
    async def body() -> None:
        async with pair() as it:
            assert await it.producer.drain(0.01)
            lease = it.producer.offer(it.ticket(), 16)
            assert not await it.producer.drain(0.05)
            draining = asyncio.create_task(it.producer.drain(5))
            lease.fail(PeerLost("enough"))
            assert await draining

    run_bounded(body())
