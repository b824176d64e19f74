"""The user behind a connection on loopback.

A control token is in a file that only its user can read. A view on loopback has no token, so it asks the kernel whose
connection it is: other users of the machine must not give commands through it.
"""

import ipaddress
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
ROOT = 0
_CLOSED = "0"  # the inode of a socket that no process has open; the kernel shows it as root's


class Endpoint(NamedTuple):
    """One end of a connection. An IPv4 address that is mapped into IPv6 is the same as the IPv4 address."""

    host: str
    port: int


def is_other_user(peer: Endpoint, own: Endpoint, tables: Iterable[Path] = TABLES) -> bool:
    """Whether the connection from `peer` on this machine is of another user, root excepted.

    True also if the client has closed it already: nobody knows then whose it was. False where the kernel has no tables
    of connections, as on other systems than Linux.
    """
    wanted = (_normal(peer), _normal(own))
    known = [lines for lines in map(_lines, tables) if lines is not None]
    found = [_user(line, wanted) for lines in known for line in lines]
    users = [user for user in found if user is not None]
    return bool(known) and not (users and all(user in (ROOT, os.geteuid()) for user in users))


def _lines(table: Path) -> list[str] | None:
    """Return the connections in a table, None if there is no such table."""
    try:
        return table.read_text().splitlines()[1:]
    except OSError:
        return None


def _user(line: str, wanted: tuple[Endpoint, Endpoint]) -> int | None:
    """Return the user of a socket if it is the one that is wanted, and is open."""
    _, local, remote, *rest = line.split()
    # Ports first: few sockets have them, and addresses take longer to parse.
    if (_port(local), _port(remote)) != (wanted[0].port, wanted[1].port):
        return None
    if (_endpoint(local), _endpoint(remote)) != wanted or rest[6] == _CLOSED:
        return None
    return int(rest[4])


def _port(text: str) -> int:
    return int(text.rpartition(":")[2], 16)


def _endpoint(text: str) -> Endpoint:
    """Return an address of the kernel's tables: words of 32 bits in the byte order of the machine, in hexadecimal."""
    host, _, port = text.rpartition(":")
    words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return _normal(Endpoint(str(ipaddress.ip_address(packed)), int(port, 16)))


def _normal(endpoint: Endpoint) -> Endpoint:
    address = ipaddress.ip_address(endpoint.host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return Endpoint(str(mapped or address), endpoint.port)
