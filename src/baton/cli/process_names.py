"""The names of the processes of this user on this machine: `baton ctl list`, and from a name to a system server."""

import urllib.error
import urllib.request
from collections.abc import Sequence

import click
import msgspec

from baton.config.directories import process_directory
from baton.control.http.schemas import Health
from baton.control.process_entries import ProcessEntry, read_entries

HEALTH_TIMEOUT_S = 2.0
COLUMNS = ("NAME", "ROLE", "MODEL", "STATE", "REQUESTS", "ADDRESS")


def find_url(name: str) -> str:
    """Return the URL of the process with that name. Raises UsageError if there is none, or more than one."""
    entries = _entries()
    found = [entry for entry in entries if name in (entry.name, entry.short_name)]
    if len(found) > 1:
        raise click.UsageError(f"{name} is one of several: give {' or '.join(entry.name for entry in found)}")
    if not found:
        names = ", ".join(entry.name for entry in entries) or "none"
        raise click.UsageError(
            f"no worker of this user on this machine is named {name!r} (there are: {names}); give one of these names,"
            " a system port, host:port or a URL"
        )
    return found[0].url


def list_processes() -> str:
    """Return a table of all processes, with what each reports about itself."""
    entries = _entries()
    if not entries:
        return "no worker of this user runs on this machine"
    return _table([COLUMNS, *((entry.name, *_health(entry.url), entry.url) for entry in entries)])


def _entries() -> list[ProcessEntry]:
    """Return the processes that take commands."""
    return [entry for entry in read_entries(process_directory()) if not entry.is_frontend]


def _health(url: str) -> tuple[str, ...]:
    """Return role, model, state and running requests of a process."""
    try:
        health = msgspec.json.decode(_get(f"{url}/health"), type=Health)
    except OSError:
        return "-", "-", "unreachable", "-"
    except msgspec.DecodeError:
        return "-", "-", "unknown", "-"
    return health.role or "-", health.model or "-", health.state, str(health.in_flight)


def _get(url: str) -> bytes:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=HEALTH_TIMEOUT_S) as response:
            body: bytes = response.read()
    except urllib.error.HTTPError as error:  # not ready: the body says why
        with error:
            body = error.read()
    return body


def _table(lines: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
