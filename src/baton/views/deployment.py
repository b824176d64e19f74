"""The processes of a deployment: where their system servers are, and the tokens that their control API takes."""

import asyncio
from collections.abc import Sequence
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

from baton.config.directories import control_directory, process_directory
from baton.control.http.token_file import find_token
from baton.control.process_entries import ProcessEntry, read_entries
from baton.errors import ConfigError


class ProcessAddress(msgspec.Struct, frozen=True, kw_only=True):
    """A process as it is found. `name` is unique in a deployment; without a `token` it takes no commands."""

    name: str
    url: str
    token: str | None = None

    @property
    def deployment(self) -> str:
        """The port of the endpoint of the `baton serve` that started the process; "" if none did."""
        return self.name.rpartition("/")[0]


class ProcessFinder(Protocol):
    """Finds the processes of one deployment."""

    async def find(self) -> Sequence[ProcessAddress]:
        """Return the processes that run now, within seconds. Raises OSError or BatonError."""


class LocalProcesses:
    """The processes of this user on this machine, all of them or those of one `baton serve`."""

    def __init__(self, deployment: str = "", token: str = "", discovery: str = "") -> None:
        """Prepare; see `find_local_processes`."""
        self._deployment = deployment
        self._token = token
        self._discovery = discovery

    async def find(self) -> Sequence[ProcessAddress]:
        """See `ProcessFinder.find`."""
        return await asyncio.to_thread(find_local_processes, self._deployment, self._token, self._discovery)


class GivenProcesses:
    """Processes whose addresses are known beforehand."""

    def __init__(self, urls: Sequence[str], token: str = "") -> None:
        self._addresses = [
            ProcessAddress(name=urlsplit(url).netloc or url, url=url.rstrip("/"), token=token or generated_token(url))
            for url in urls
        ]

    async def find(self) -> Sequence[ProcessAddress]:
        """See `ProcessFinder.find`."""
        return self._addresses


def find_local_processes(deployment: str = "", token: str = "", discovery: str = "") -> list[ProcessAddress]:
    """Return the processes of this user on this machine, by name. Reads files.

    `deployment` is the port of an endpoint, "" for all processes; workers that were added to it by hand have the same
    directory of file discovery, `discovery`. A process that was started without a control token has a generated one
    in a file; the others get `token`. Raises ConfigError if this user has no home directory.
    """
    entries = read_entries(process_directory())
    found = [
        entry
        for entry in entries
        if not deployment or entry.name.startswith(f"{deployment}/") or (discovery and entry.discovery == discovery)
    ]
    names = [entry.name for entry in found]
    return [
        ProcessAddress(
            name=entry.name if names.count(entry.name) == 1 else f"{entry.name}-{entry.pid}",
            url=entry.url,
            token=_token(entry, token),
        )
        for entry in found
    ]


def generated_token(url: str) -> str | None:
    """Return the token that the process at `url` has generated, None if it is not one of this user and machine."""
    try:
        parts = urlsplit(url)
        return find_token(control_directory(), parts.hostname or "", parts.port or 80)
    except (ValueError, ConfigError):  # not a URL, or no home directory
        return None


def _token(entry: ProcessEntry, given: str) -> str | None:
    return generated_token(entry.url) or given or None
