"""How many connections a port may have, and which one is closed when there are too many. Plain and synchronous.

Whoever reaches the port can open connections. Those that have not proved a secret are closed first: the oldest one of
the host that has the most of them, so that one host cannot displace the others.
"""

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

WARNING_INTERVAL_S = 60.0


class ConnectionSlot:
    """The place of one connection within the limit."""

    __slots__ = ("_limit", "disconnect", "host")

    def __init__(self, limit: "ConnectionLimit", host: str, disconnect: Callable[[], None]) -> None:
        self.host = host
        self.disconnect = disconnect
        self._limit = limit

    def verify(self) -> None:
        """The peer has proved a secret: its connection is not closed for another one. Idempotent."""
        self._limit.verify(self)

    def release(self) -> None:
        """The connection has ended. Idempotent."""
        self._limit.release(self)


class ConnectionLimit:
    """The connections of one port, `limit` at most. Event-loop thread only."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._slots: set[ConnectionSlot] = set()
        self._unverified: dict[str, dict[ConnectionSlot, None]] = {}  # by host, oldest first
        self._warned_at = -WARNING_INTERVAL_S

    @property
    def connections(self) -> int:
        """How many connections there are."""
        return len(self._slots)

    def admit(self, host: str, disconnect: Callable[[], None]) -> ConnectionSlot | None:
        """Return a slot for a connection from `host`; `disconnect` closes it before its time.

        If all are taken, a connection without a verified peer is closed for it. None if there is no such connection.
        """
        if self.connections >= self._limit:
            self._warn()
            if not self._unverified:
                return None
            self._close_one()
        slot = ConnectionSlot(self, host, disconnect)
        self._slots.add(slot)
        self._unverified.setdefault(host, {})[slot] = None
        return slot

    def verify(self, slot: ConnectionSlot) -> None:
        """See `ConnectionSlot.verify`."""
        slots = self._unverified.get(slot.host, {})
        slots.pop(slot, None)
        if not slots:
            self._unverified.pop(slot.host, None)

    def release(self, slot: ConnectionSlot) -> None:
        """See `ConnectionSlot.release`."""
        self.verify(slot)
        self._slots.discard(slot)

    def _close_one(self) -> None:
        host = max(self._unverified, key=lambda each: len(self._unverified[each]))
        slot = next(iter(self._unverified[host]))
        self.release(slot)
        slot.disconnect()

    def _warn(self) -> None:
        now = time.monotonic()
        if now - self._warned_at >= WARNING_INTERVAL_S:
            self._warned_at = now
            log.warning("the KV port has %d connections, its limit (kv.max_connections)", self._limit)
