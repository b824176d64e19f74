"""The browsers that get updates: each has a bounded queue of server-sent events."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

MAX_WAITING = 32

Queue = asyncio.Queue[bytes | None]


class Subscribers:
    """Sends events to all browsers that are connected. Used in one event loop."""

    def __init__(self) -> None:
        self._queues: set[Queue] = set()

    def __len__(self) -> int:
        return len(self._queues)

    @contextmanager
    def subscribed(self) -> Iterator[Queue]:
        """Within the block, the queue gets all events. None is the last: the browser has not read fast enough."""
        queue: Queue = asyncio.Queue(MAX_WAITING)
        self._queues.add(queue)
        try:
            yield queue
        finally:
            self._queues.discard(queue)

    def send(self, name: str, data: bytes) -> None:
        """Send an event. A browser with a full queue is disconnected, and gets everything when it connects again."""
        event = event_bytes(name, data)
        for queue in list(self._queues):
            if queue.full():
                self._queues.discard(queue)
                queue.get_nowait()
                queue.put_nowait(None)
            else:
                queue.put_nowait(event)


def event_bytes(name: str, data: bytes) -> bytes:
    """Return a server-sent event; `data` is JSON, which has no line breaks."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)
