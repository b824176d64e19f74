"""Rooms of engines that move KV by themselves, over real connections."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.config.transfer import TransferOptions
from baton.errors import BatonError, Cancelled, EngineFailed, PeerLost
from baton.protocol.handoff import Ticket
from baton.testing import eventually, run_bounded
from baton.transfer.borrower import KvBorrower, KvLoan, open_borrower
from baton.transfer.lender import KvLender, open_lender
from tests.unit.transfer.test_lending import Cache

SECRET = b"sixteen bytes ok"
PLACE = ("10.0.0.9", 8998)
QUICK = TransferOptions(claim_s=2.0, beat_s=0.05, silence_s=1.0)


class Pair:
    """A lender and a borrower without memory, and what the borrower's loans said."""

    def __init__(self, lender: KvLender, borrower: KvBorrower) -> None:
        self.lender, self.borrower = lender, borrower
        self.lost: list[BatonError] = []

    def ticket(self, room: int = 0) -> Ticket:
        host, port = self.lender.address
        return Ticket(host=host, port=port, room=room, secret=SECRET)

    def borrow(self, room: int = 0) -> KvLoan:
        return self.borrower.borrow(self.ticket(room), lambda: None, self.lost.append)


@asynccontextmanager
async def pair(options: TransferOptions = QUICK) -> AsyncIterator[Pair]:
    lender = await open_lender(options, None, "127.0.0.1", PLACE)
    borrower = open_borrower(options, None)
    try:
        yield Pair(lender, borrower)
        await eventually(lambda: sum(lender.rooms.open.values()) == 0)
    finally:
        await borrower.close()
        await lender.close()


@pytest.mark.parametrize("first", ["lender", "borrower"])
def test_the_engines_learn_where_to_meet_and_the_room_ends_when_they_have(first: str) -> None:
    async def body() -> None:
        async with pair() as it:
            loan = it.borrow() if first == "borrower" else None
            await asyncio.sleep(0.05)
            lease = it.lender.lend(it.ticket(), 3)
            loan = loan or it.borrow()
            assert await loan.meeting() == PLACE
            loan.taken()
            loan.taken()
            await loan.close()
            await lease.ended()
            assert it.lender.rooms.ended["done"] == 1
            assert it.lost == []

    run_bounded(body())


@pytest.mark.parametrize("when", ["before the claim", "after the claim"])
def test_a_prefill_that_fails_is_told_to_the_decode(when: str) -> None:
    async def body() -> None:
        async with pair() as it:
            lease = it.lender.lend(it.ticket(), 3)
            if when == "before the claim":
                lease.fail(EngineFailed("out of memory"))
            loan = it.borrow()
            if when == "after the claim":
                assert await loan.meeting() == PLACE
                lease.fail(EngineFailed("out of memory"))
            else:
                with pytest.raises(EngineFailed, match="out of memory"):
                    await loan.meeting()
            await eventually(lambda: [type(error) for error in it.lost] == [EngineFailed])
            await loan.close()

    run_bounded(body())


@pytest.mark.parametrize("claimed", [False, True])
def test_a_decode_that_leaves_is_told_to_the_prefill(claimed: bool) -> None:
    async def body() -> None:
        async with pair() as it:
            lease = it.lender.lend(it.ticket(), 3)
            loan = it.borrow()
            if claimed:
                await loan.meeting()
            await loan.close()
            with pytest.raises(Cancelled):
                await lease.ended()

    run_bounded(body())


def test_a_lender_that_leaves_is_noticed() -> None:
    async def body() -> None:
        async with pair() as it:
            it.lender.lend(it.ticket(), 3).on_lost(lambda _: None)
            loan = it.borrow()
            await loan.meeting()
            await it.lender.close()
            await eventually(lambda: [type(error) for error in it.lost] == [PeerLost])

    run_bounded(body())


def test_a_prefill_that_never_begins_is_not_waited_for() -> None:
    async def body() -> None:
        async with pair(TransferOptions(claim_s=0.2, beat_s=0.05, silence_s=1.0)) as it:
            with pytest.raises(PeerLost, match="has not begun"):
                await it.borrow().meeting()

    run_bounded(body())


def test_an_engine_that_shows_its_memory_and_one_that_does_not_refuse_each_other() -> None:
    async def body() -> None:
        cache = Cache()
        async with pair() as it:
            other = open_borrower(QUICK, cache.memory)
            lost: list[BatonError] = []
            it.lender.lend(it.ticket(), 3)
            loan = other.borrow(it.ticket(), lambda: None, lost.append)
            await eventually(lambda: bool(lost))
            assert "moves KV by itself" in lost[0].message
            await loan.close()
            await other.close()
            await it.lender.close()
        cache.close()

    run_bounded(body())
