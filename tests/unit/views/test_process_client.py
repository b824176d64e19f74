"""Replies of processes are read to their end, and up to a limit."""

import asyncio

import pytest
from aiohttp import web

from baton.testing import run_bounded
from baton.views.deployment import ProcessAddress
from baton.views.process_client import MAX_REPLY_BYTES, CommandReply, ProcessClient, ProcessUnreachable

PIECE = b"x" * 100_000


async def reply_to_command(pieces: int) -> CommandReply:
    """Return what the client reads of a process that replies in so many pieces, each a moment after the other."""

    async def reply(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(pieces):
            await response.write(PIECE)
            await asyncio.sleep(0)
        return response

    app = web.Application()
    app.router.add_post("/control/status", reply)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = ProcessClient()
    try:
        address = ProcessAddress(name="worker-0", url=f"http://127.0.0.1:{runner.addresses[0][1]}")
        return await client.execute(address, "status", b"{}")
    finally:
        await client.aclose()
        await runner.cleanup()


def test_a_reply_in_pieces_is_read_whole() -> None:
    assert len(run_bounded(reply_to_command(20), 30).body) == 20 * len(PIECE)


def test_a_reply_without_end_is_given_up() -> None:
    with pytest.raises(ProcessUnreachable, match="more than 32 MiB"):
        run_bounded(reply_to_command(2 * MAX_REPLY_BYTES // len(PIECE)), 30)
