"""How long the runtime may take for what it does in discovery. Its own calls wait for ever when a server is silent."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.errors import PeerLost

TIMEOUT_S = 30.0


@asynccontextmanager
async def in_time(what: str) -> AsyncIterator[None]:
    """Raise PeerLost if the block, which is to do `what`, takes longer than `TIMEOUT_S`. A restart may help."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield
    except TimeoutError:
        raise PeerLost(f"discovery took longer than {TIMEOUT_S:g} s to {what}") from None
