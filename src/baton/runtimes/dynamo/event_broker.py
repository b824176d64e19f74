"""The event plane of one host: a ZMQ broker on Unix sockets in the discovery directory.

Without a broker every publisher of the runtime listens on a TCP port of every interface, whatever address it is given,
and anyone who reaches the port reads KV events and load. With a broker publishers and subscribers only connect. The
broker runs in a process that subscribes, a frontend or a global router: without one there is nobody to deliver to. Of
several the one that holds the lock runs it; when that process ends, another takes over and the sockets reconnect.
"""

import asyncio
import fcntl
import logging
import os
import threading

import zmq

from baton.runtimes.dynamo.event_sockets import EventSockets

log = logging.getLogger(__name__)

LOCK_INTERVAL_S = 0.2
# Messages that a slow subscriber may lag behind. A router that misses events reads the worker's blocks again.
QUEUE_LENGTH = 10_000


class EventBroker:
    """Forwards events while this process holds the lock."""

    def __init__(self, sockets: EventSockets) -> None:
        self._sockets = sockets
        self._context = zmq.Context()
        self._election: asyncio.Task[None] | None = None
        self._lock: int | None = None
        self._listens = False

    def start(self) -> None:
        """Forward events as soon as no other process does. Call from the event loop."""
        self._election = asyncio.get_running_loop().create_task(self._forward_when_elected(), name="event broker")

    async def stop(self) -> None:
        """Stop forwarding, so that another process can. A second call has no effect."""
        election, self._election = self._election, None
        if election is not None:
            election.cancel()
            await asyncio.wait([election])
            await asyncio.to_thread(self._context.term)
        if self._listens:
            self._sockets.remove()
            self._listens = False
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def _forward_when_elected(self) -> None:
        try:
            self._lock = os.open(self._sockets.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            while not _try_lock(self._lock):  # noqa: ASYNC110 - a lock of another process has no event
                await asyncio.sleep(LOCK_INTERVAL_S)
            incoming = self._listen(zmq.XSUB, self._sockets.publishers)
            outgoing = self._listen(zmq.XPUB, self._sockets.subscribers)
        except (OSError, zmq.ZMQError) as error:
            self._context.destroy(linger=0)  # a socket that stays open would keep `stop` waiting
            log.error(
                "KV events and load do not reach this process: cannot listen in %s: %s", self._sockets.directory, error
            )
        else:
            self._listens = True
            threading.Thread(target=_forward, args=(incoming, outgoing), name="event broker", daemon=True).start()

    def _listen(self, kind: int, endpoint: str) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.linger = 0
        socket.set_hwm(QUEUE_LENGTH)
        socket.bind(endpoint)
        return socket


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _forward(incoming: "zmq.Socket[bytes]", outgoing: "zmq.Socket[bytes]") -> None:
    """Forward until the context ends; the sockets belong to this thread."""
    try:
        zmq.proxy(incoming, outgoing)
    except zmq.ContextTerminated:
        incoming.close()
        outgoing.close()
