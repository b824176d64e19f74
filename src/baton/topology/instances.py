"""The `baton serve` processes of this user on this machine, and who has the port that a new one needs."""

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import msgspec

from baton.config.directories import supervisor_directory
from baton.config.settings import Settings, endpoint_url
from baton.control.process_entries import ProcessEntry, read_entries
from baton.errors import ConfigError
from baton.runtimes.dynamo.listener import refuse_unusable_address, reserved_port

CONNECT_TIMEOUT_S = 2.0


def running_instances() -> list[ProcessEntry]:
    """Return the `baton serve` processes that run: named by the URL of the endpoint, at the URL of the socket."""
    try:
        return [entry for entry in read_entries(supervisor_directory()) if _listens(entry.url)]
    except ConfigError:  # no home directory
        return []


def _listens(url: str) -> bool:
    """Whether there is a process behind a control socket: one that was killed leaves its entry and its socket."""
    with closing(socket.socket(socket.AF_UNIX)) as connection:
        connection.settimeout(CONNECT_TIMEOUT_S)
        try:
            connection.connect(url.removeprefix("unix:"))
        except OSError:
            return False
    return True


def refuse_taken_address(settings: Settings) -> None:
    """Raise ConfigError if the endpoint cannot listen where it should; the message says who listens there, if known."""
    port = endpoint_url(settings).rpartition(":")[2]
    for entry in running_instances():
        if settings.port and entry.name.rpartition(":")[2] == port and _same_host(entry.name, settings):
            raise ConfigError(
                f"another `baton serve` (pid {entry.pid}) has {entry.name}: use it (`baton chat`), stop it (`kill"
                f" {entry.pid}`), or start this one on another port with --port"
            )
    refuse_unusable_address(settings.host, settings.port, "--host", "--port")


@contextmanager
def endpoint_port(settings: Settings) -> Iterator[Settings]:
    """Yield `settings` with the port of this run. A free one is kept for the frontend, also when that starts again."""
    if settings.port:
        yield settings
        return
    with reserved_port(settings.host) as port:
        yield msgspec.structs.replace(settings, port=port)


def _same_host(url: str, settings: Settings) -> bool:
    """Whether an endpoint at `url` keeps one with these settings from listening on the same port."""
    return url.partition("://")[2].rpartition(":")[0] == endpoint_url(settings).partition("://")[2].rpartition(":")[0]
