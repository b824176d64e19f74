"""sd_notify, systemd's notification protocol: reports readiness, status and heartbeats to the supervisor.

The supervisor is `baton serve`, or systemd for a unit with Type=notify.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable

from baton.config.environment import notify_socket, supervisor_pid, watchdog_s

log = logging.getLogger(__name__)

RUNNING_REQUESTS = "X_RUNNING_REQUESTS"
"""The key under which a process that stops reports how many requests it waits for. systemd ignores it."""
SYSTEM_URL = "X_SYSTEM_URL"
"""The key under which a process that is ready reports the URL of its system server. systemd ignores it."""


def notify(message: str) -> None:
    """Send `message` to the supervisor, if there is one. Never blocks; a message that cannot be sent is dropped."""
    address = notify_socket()
    if address is None:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
        try:
            sock.sendto(message.encode(), "\0" + address[1:] if address.startswith("@") else address)
        except OSError as error:  # no supervisor, or one that does not read: the process runs on without it
            log.debug("cannot notify the supervisor at %s: %r", address, error)


async def send_heartbeats(on_orphaned: Callable[[], None]) -> None:
    """Send heartbeats from the event loop at the interval that the supervisor set; call `on_orphaned` if it exits.

    Returns at once if there is no supervisor or it expects no heartbeats. `baton serve` passes its process id, so that
    its exit is noticed even if it happened before this call.
    """
    interval_s = watchdog_s()
    if notify_socket() is None or interval_s is None:
        return
    parent = supervisor_pid() or os.getppid()
    while os.getppid() == parent:
        notify("WATCHDOG=1")
        await asyncio.sleep(interval_s / 4)
    on_orphaned()
