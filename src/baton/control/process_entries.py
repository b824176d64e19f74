"""The processes of this user on this machine, by name, each in a file: `baton ctl` and the views find them there."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from baton.config.private_files import make_private_directory, open_private, refuse_shared

log = logging.getLogger(__name__)


class ProcessEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One process with a control API. A process of a `baton serve` is named after the port of its endpoint too.

    `discovery` is the directory of file discovery, "" with other discovery. A frontend takes no commands.
    """

    name: str
    url: str
    pid: int
    host: str
    discovery: str = ""
    is_frontend: bool = False

    @property
    def short_name(self) -> str:
        """The name without that of its `baton serve`."""
        return self.name.rpartition("/")[2]


@contextmanager
def published_entry(
    directory: Path, name: str, url: str, *, discovery: str = "", is_frontend: bool = False
) -> Iterator[None]:
    """Keep the entry of this process in `directory` within the block. A failure is logged.

    It replaces what a killed process of the same name has left.
    """
    entry = ProcessEntry(
        name=name,
        url=url,
        pid=os.getpid(),
        host=socket.gethostname(),
        discovery=discovery,
        is_frontend=is_frontend,
    )
    path = directory / f"{entry.pid}.json"
    try:
        make_private_directory(directory)
        fresh = path.with_suffix(".tmp")
        with open_private(fresh, os.O_TRUNC) as file:
            file.write(msgspec.json.encode(entry))
        fresh.replace(path)
        remove_ended(directory, name)
    except OSError as error:
        log.warning("`baton ctl` will not find this process by its name: %s", error)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def read_entries(directory: Path) -> list[ProcessEntry]:
    """Return the entries of the processes that run, by name. Those that killed processes have left stay: monitoring
    reads them (`read_all_entries`).
    """
    return sorted((entry for _, entry in _read(directory) if _runs(entry.pid)), key=lambda entry: entry.name)


def remove_ended(directory: Path, name: str | None = None) -> None:
    """Remove the entries that killed processes have left, or those of this name."""
    for file, entry in _read(directory):
        if name in (None, entry.name) and not _runs(entry.pid):
            with suppress(OSError):
                file.unlink(missing_ok=True)


def read_all_entries(directory: Path) -> list[ProcessEntry]:
    """Return one entry for each name: of the process that runs, or else of the one that was killed last."""
    entries: dict[str, ProcessEntry] = {}
    for _, entry in sorted(_read(directory), key=lambda found: (_runs(found[1].pid), _modified(found[0]))):
        entries[entry.name] = entry
    return sorted(entries.values(), key=lambda entry: entry.name)


def _read(directory: Path) -> list[tuple[Path, ProcessEntry]]:
    """Return the entries of this host with their files."""
    try:
        refuse_shared(directory)
        files = list(directory.glob("*.json"))
    except OSError:
        return []
    entries = []
    for file in files:
        with suppress(OSError, msgspec.DecodeError):
            entry = msgspec.json.decode(file.read_bytes(), type=ProcessEntry)
            if entry.host == socket.gethostname():
                entries.append((file, entry))
    return entries


def _modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
