"""Calls to other workers: what ends the wait for one."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from dynamo import _core

from baton.errors import Cancelled, PeerLost
from baton.runtimes.dynamo.client import CANCEL_GRACE_S, OutgoingCall, read_replies
from baton.testing import run_bounded
from baton.testing.memory_runtime import MemoryContext

Replies = AsyncIterator[object]


def test_a_worker_that_dies_before_it_connects_is_lost() -> None:
    """The runtime has delivered the request, so it reports nothing."""

    async def body() -> None:
        sending: asyncio.Future[Replies] = asyncio.get_running_loop().create_future()
        call: OutgoingCall[object] = OutgoingCall(_core.Context("call", None), connect_timeout_s=0.05)
        replies = read_replies(call, None, lambda call: call.start(sending))
        with pytest.raises(PeerLost, match="no worker has connected"):
            await anext(replies)
        assert not sending.done()

    run_bounded(body())


def test_a_frozen_worker_is_not_waited_for_after_a_reply_that_was_read_late() -> None:
    """The grace period ends while the reader has the last reply and asks for no other."""

    async def frozen_after_one() -> Replies:
        yield "first"
        await asyncio.Event().wait()

    async def body() -> None:
        sending: asyncio.Future[Replies] = asyncio.get_running_loop().create_future()
        sending.set_result(frozen_after_one())
        parent = MemoryContext("r")
        call: OutgoingCall[object] = OutgoingCall(_core.Context("call", None))
        replies = read_replies(call, parent, lambda call: call.start(sending))
        assert await anext(replies) == "first"
        parent.cancel()
        await asyncio.sleep(CANCEL_GRACE_S + 0.1)
        reading = asyncio.ensure_future(anext(replies))
        await asyncio.wait([reading], timeout=5)
        assert reading.done()
        with pytest.raises(Cancelled):
            await reading

    run_bounded(body())
