"""A client that asks for a long stream and never reads it, and knows when its server can send no more."""

import asyncio
import socket
from contextlib import suppress
from pathlib import Path

from bench.chat import HOST, chat_request

CONNECT_TIMEOUT_S = 15.0
LOOK_EVERY_S = 0.3
SAME_LOOKS = 3
READ_TIMEOUT_S = 2.0


class StalledClient:
    def __init__(self, port: int, tokens: int) -> None:
        self._server_port = port
        self._socket = socket.socket()
        # With a small window here, what nobody reads piles up at the server.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.settimeout(CONNECT_TIMEOUT_S)
        self._socket.connect((HOST, port))
        self._socket.sendall(chat_request(tokens))

    async def wait_until_quiet(self, limit_s: float) -> bool:
        """Whether, within the limit, the unread bytes stopped growing: no room for more, or no more to come."""
        looks = [0] * SAME_LOOKS
        for _ in range(int(limit_s / LOOK_EVERY_S)):
            await asyncio.sleep(LOOK_EVERY_S)
            looks = [*looks[1:], self.unread_bytes()]
            if looks[0] and len(set(looks)) == 1:
                return True
        return False

    def unread_bytes(self) -> int:
        return queued_bytes(Path("/proc/net/tcp").read_text(), self._server_port, self._socket.getsockname()[1])

    def read_at_last(self) -> bytes:
        """Read what had been queued by now, as far as it comes: the head of the answer and its latest bytes."""
        waiting, parts = self.unread_bytes(), [b""]
        self._socket.settimeout(READ_TIMEOUT_S)
        with suppress(OSError):
            while waiting > 0 and (data := self._socket.recv(waiting)):
                waiting -= len(data)
                parts.append(data)
        return b"".join(parts)

    def close(self) -> None:
        self._socket.close()


def queued_bytes(table: str, server_port: int, client_port: int) -> int:
    """What the kernel holds between a server and a client on this machine, by `/proc/net/tcp`.

    Each line has the local and the remote address, the state and `tx_queue:rx_queue`, all in hexadecimal. The
    bytes are in the send queue of the server's end and in the receive queue of the client's.
    """
    total = 0
    for line in table.splitlines()[1:]:
        _, local, remote, _, queues, *_ = line.split()
        ports = int(local.rpartition(":")[2], 16), int(remote.rpartition(":")[2], 16)
        sending, _, receiving = queues.partition(":")
        if ports == (server_port, client_port):
            total += int(sending, 16)
        elif ports == (client_port, server_port):
            total += int(receiving, 16)
    return total
