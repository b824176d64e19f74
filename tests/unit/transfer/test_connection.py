"""One connection of a room: what it does with bytes after its end."""

import asyncio
import tracemalloc

from baton.testing import run_bounded
from baton.transfer import wire
from baton.transfer.connection import RoomConnection, incoming_connection

PIECE = wire.HEAD.pack(2**31, 0) + bytes(1 << 20)


def test_bytes_that_arrive_after_the_end_are_not_kept() -> None:
    async def body() -> None:
        accepted: asyncio.Future[RoomConnection] = asyncio.get_running_loop().create_future()

        def accept() -> RoomConnection:
            connection = incoming_connection(60, 60)
            accepted.set_result(connection)
            return connection

        server = await asyncio.get_running_loop().create_server(accept, "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        connection = await accepted
        connection.close()  # the other side is still open, and may go on sending
        tracemalloc.start()
        for _ in range(32):
            connection.data_received(PIECE)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        writer.close()
        await connection.wait_closed()
        server.close()
        assert held < len(PIECE)

    run_bounded(body())
