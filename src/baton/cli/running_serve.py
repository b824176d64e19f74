"""Finds a running `baton serve` of this user on this machine, for the commands that act on one."""

import sys
from collections.abc import Callable
from typing import TypeVar

import click

from baton.cli.exit_codes import EXIT_CONFIG, EXIT_FAILED, report_error
from baton.control.process_entries import ProcessEntry
from baton.topology.control_client import read_status
from baton.topology.control_messages import OperationError, Status
from baton.topology.instances import running_instances

Command = TypeVar("Command", bound=Callable[..., object])


def port_option(command: Command) -> Command:
    """Add the option that selects one of several `baton serve`."""
    text = "port of the endpoint of the `baton serve`; needed if several run"
    return click.option("--port", type=click.IntRange(0, 65535), help=text)(command)


def find_serve(port: int | None) -> ProcessEntry:
    """Return the `baton serve` with that port, or the only one. Raises UsageError if there is not exactly one."""
    entries = running_instances()
    found = [entry for entry in entries if port is None or entry.name.rpartition(":")[2] == str(port)]
    if len(found) == 1:
        return found[0]
    if found:
        raise click.UsageError(f"several `baton serve` run ({', '.join(each.name for each in found)}): give --port")
    if entries:
        names = ", ".join(entry.name for entry in entries)
        raise click.UsageError(f"no `baton serve` of this user has port {port}; there are: {names}")
    raise click.UsageError("no `baton serve` of this user runs on this machine: start one with `baton serve`")


def status_of(entry: ProcessEntry) -> Status:
    """Return the status of a running `baton serve`; print the problem and exit if it cannot be reached."""
    try:
        return read_status(entry.url)
    except OperationError as error:
        sys.exit(fail(error))


def fail(error: OperationError) -> int:
    """Print what went wrong and return the exit code: 2 for a request that cannot succeed as it is, else 1."""
    wrong = error.code in ("invalid_request", "unknown_group", "unknown_worker", "out_of_range", "last_worker")
    return report_error(error.message, EXIT_CONFIG if wrong else EXIT_FAILED)
