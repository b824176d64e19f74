"""Generated control tokens: each is in a file that only the user of the worker can read, named by the server's address.

`baton ctl` of the same user finds it there.
"""

import ipaddress
import logging
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from baton.config.private_files import make_private_directory, open_private, refuse_shared

log = logging.getLogger(__name__)

TOKEN_BYTES = 32
WILDCARDS = ("0.0.0.0", "::")


def generate_token() -> str:
    """Return a new token that cannot be guessed."""
    return secrets.token_urlsafe(TOKEN_BYTES)


@contextmanager
def published_token(directory: Path, address: str, port: int, token: str) -> Iterator[None]:
    """Keep `token` in a file within the block. A failure is logged: without the file, no command is accepted."""
    path = _path(directory, address, port)
    try:
        _write(path, token)
    except OSError as error:
        log.warning(
            "cannot write the control token (%s): commands are refused; give one with --control-token-file", error
        )
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def find_token(directory: Path, host: str, port: int) -> str | None:
    """Return the token of this user's worker at `host`:`port`, None if there is none.

    Only for loopback addresses: a token is not sent to other machines, where somebody else may listen.
    """
    try:
        address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
        if not ipaddress.ip_address(address).is_loopback:
            return None
        refuse_shared(directory)
    except OSError:
        return None
    for each in (address, *WILDCARDS):
        with suppress(OSError):
            return _path(directory, each, port).read_text().strip()
    return None


def remove_token(directory: Path, url: str) -> None:
    """Remove the token of a worker that was killed, if it has one."""
    address = urlsplit(url)
    if address.hostname and address.port:
        with suppress(OSError):
            _path(directory, address.hostname, address.port).unlink(missing_ok=True)


def _path(directory: Path, address: str, port: int) -> Path:
    return directory / f"{address}-{port}"


def _write(path: Path, token: str) -> None:
    make_private_directory(path.parent)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    with open_private(fresh, os.O_TRUNC) as file:
        file.write(token.encode())
    fresh.replace(path)
