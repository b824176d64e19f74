"""sd_notify, systemd's notification protocol: how a process tells its supervisor that it is ready and alive.

`baton serve` speaks the other end, and so does any systemd unit with Type=notify.
"""

import asyncio
import os
import socket
from collections.abc import Callable

from baton.config.environment import notify_socket, watchdog_s


def notify(message: str) -> None:
    """Tell the supervisor, if there is one."""
    address = notify_socket()
    if address is None:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
        try:
            sock.sendto(message.encode(), "\0" + address[1:] if address.startswith("@") else address)
        except OSError:  # the supervisor is gone or does not listen; nobody is left to tell
            return


async def beat(on_orphaned: Callable[[], None]) -> None:
    """Tell the supervisor for ever that the event loop turns, as often as it asks; call `on_orphaned` if it dies."""
    interval_s = watchdog_s()
    if notify_socket() is None or interval_s is None:
        return
    parent = os.getppid()
    while True:
        notify("WATCHDOG=1")
        await asyncio.sleep(interval_s / 4)
        if os.getppid() != parent:
            on_orphaned()
            return
