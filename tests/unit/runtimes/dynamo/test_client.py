"""Calls to other workers: what ends the wait for one."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from dynamo import _core

from baton.errors import PeerLost
from baton.runtimes.dynamo.client import OutgoingCall, read_replies
from baton.testing import run_bounded

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
