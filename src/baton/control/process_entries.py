"""The processes of this user on this machine, by name, each in a file: `baton ctl` finds their system servers there."""

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
    """One process with a system server. A process of a `baton serve` is named after the port of its endpoint too."""

    name: str
    url: str
    pid: int
    host: str

    @property
    def short_name(self) -> str:
        """The name without that of its `baton serve`."""
        return self.name.rpartition("/")[2]


@contextmanager
def published_entry(directory: Path, name: str, url: str) -> Iterator[None]:
    """Keep the entry of this process in `directory` within the block. A failure is logged."""
    entry = ProcessEntry(name=name, url=url, pid=os.getpid(), host=socket.gethostname())
    path = directory / f"{entry.pid}.json"
    try:
        make_private_directory(directory)
        fresh = path.with_suffix(".tmp")
        with open_private(fresh, os.O_TRUNC) as file:
            file.write(msgspec.json.encode(entry))
        fresh.replace(path)
    except OSError as error:
        log.warning("`baton ctl` will not find this process by its name: %s", error)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def read_entries(directory: Path) -> list[ProcessEntry]:
    """Return the entries of the processes that run, by name. Those that a killed process has left are removed."""
    try:
        refuse_shared(directory)
        files = list(directory.glob("*.json"))
    except OSError:
        return []
    entries = []
    for file in files:
        with suppress(OSError, msgspec.DecodeError):
            entry = msgspec.json.decode(file.read_bytes(), type=ProcessEntry)
            if entry.host != socket.gethostname():
                continue
            if _runs(entry.pid):
                entries.append(entry)
            else:
                file.unlink(missing_ok=True)
    return sorted(entries, key=lambda entry: entry.name)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
