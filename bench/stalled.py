"""A client that requests a long stream and never reads it, and detects when the server has stopped computing it."""

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from bench.chat import HOST, chat_request

CONNECT_TIMEOUT_S = 15.0
POLL_INTERVAL_S = 0.3
STABLE_POLLS = 3
QUIET_SHARE = 0.2
"""Idle processes with timers and metrics use less than this share of a core."""
READ_TIMEOUT_S = 2.0


class StalledClient:
    def __init__(self, port: int, tokens: int) -> None:
        self._server_port = port
        self._socket = socket.socket()
        # With a small receive window, unread bytes accumulate at the server.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.settimeout(CONNECT_TIMEOUT_S)
        self._socket.connect((HOST, port))
        self._socket.sendall(chat_request(tokens))

    async def wait_until_stable(self, limit_s: float, server_pids: Sequence[int]) -> bool:
        """Whether the server has stopped within the limit: full buffers, or the end of the response.

        The client's own buffer is full first. Until those between the processes of the server are too, the stream
        costs as much as one that is read.
        """
        unread, quiet, cpu_s = 0, 0, processor_s(server_pids)
        for _ in range(int(limit_s / POLL_INTERVAL_S)):
            await asyncio.sleep(POLL_INTERVAL_S)
            before, unread = unread, self.unread_bytes()
            cpu_before, cpu_s = cpu_s, processor_s(server_pids)
            still = 0 < unread == before and cpu_s - cpu_before < QUIET_SHARE * POLL_INTERVAL_S
            quiet = quiet + 1 if still else 0
            if quiet == STABLE_POLLS:
                return True
        return False

    def unread_bytes(self) -> int:
        return queued_bytes(Path("/proc/net/tcp").read_text(), self._server_port, self._socket.getsockname()[1])

    def read_queued(self) -> bytes:
        """Read the bytes queued so far: the head of the response and its latest bytes."""
        waiting, parts = self.unread_bytes(), [b""]
        self._socket.settimeout(READ_TIMEOUT_S)
        with suppress(OSError):
            while waiting > 0 and (data := self._socket.recv(waiting)):
                waiting -= len(data)
                parts.append(data)
        return b"".join(parts)

    def close(self) -> None:
        self._socket.close()


def processor_s(pids: Sequence[int]) -> float:
    """The processor time of processes."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return float(sum(each.user + each.system for each in times))


def queued_bytes(table: str, server_port: int, client_port: int) -> int:
    """Bytes that the kernel buffers between a server and a client on this machine, from `/proc/net/tcp`.

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
