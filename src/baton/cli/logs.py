"""`baton logs`: the logs of the processes of a `baton serve`, which may have ended."""

import sys
from pathlib import Path

import click

from baton.cli.completions import complete_logs
from baton.cli.exit_codes import EXIT_CONFIG, report_error
from baton.cli.log_lines import Follower, Line, last_lines
from baton.cli.running_serve import find_serve, port_option, status_of
from baton.config.environment import user_cache
from baton.topology.control_client import read_status
from baton.topology.control_messages import OperationError, Status
from baton.topology.instances import running_instances
from baton.topology.log_file import LOG_NAME

FIRST_LINES = 100
COLORS = ("cyan", "green", "yellow", "magenta", "blue", "red")

Logs = dict[str, Path]


@click.command()
@click.argument("role", required=False, metavar="[ROLE]", shell_complete=complete_logs)
@click.option("-f", "--follow", is_flag=True, help="show new lines as they are written, until Ctrl-C")
@click.option(
    "-n", "--lines", type=click.IntRange(0), default=FIRST_LINES, show_default=True, help="lines to begin with"
)
@click.option("--log-dir", type=click.Path(path_type=Path), help="log directory of a `baton serve` that has ended")
@port_option
def logs(role: str | None, follow: bool, lines: int, log_dir: Path | None, port: int | None) -> None:
    """Show the logs of a `baton serve`: of all its processes, of a ROLE (decode), or of one (decode-1).

    Without a running `baton serve`, or one with that port, the logs of the last one.
    """
    entry = None if log_dir is not None or not _runs(port) else find_serve(port)
    found = _of_running(status_of(entry)) if entry else _of_ended(log_dir or user_cache() / "logs", port)
    chosen = _chosen(found, role)
    if not chosen:
        sys.exit(report_error(_missing(found, role, entry is not None), EXIT_CONFIG))
    _show(last_lines(chosen, lines), len(chosen) > 1)
    if follow:
        _follow(chosen, role, entry.url if entry is not None else None)


def _runs(port: int | None) -> bool:
    """Whether a `baton serve` runs, with that port if it is given."""
    return any(port is None or entry.name.rpartition(":")[2] == str(port) for entry in running_instances())


def _missing(found: Logs, role: str | None, runs: bool) -> str:
    if runs and not found:
        return "this `baton serve` writes its logs to standard error (--log-dir -)"
    return f"there is no log of {role or 'any process'}; there are: {', '.join(sorted(found)) or 'none'}"


def _follow(logs: Logs, role: str | None, socket: str | None) -> None:
    """Show new lines until Ctrl-C, or until `baton serve` has ended. Workers that are added are followed too."""
    several = len(logs) > 1 or role not in logs
    follower = Follower(logs)
    while True:
        try:
            _show(follower.poll(), several)
            if socket is not None:
                follower.update(_chosen(_of_running(read_status(socket)), role))
        except KeyboardInterrupt:
            return
        except OperationError:
            _show(follower.poll(), several)
            click.echo("baton: `baton serve` has ended", err=True)
            return


def _of_running(status: Status) -> Logs:
    return {process.name: Path(process.log) for process in status.processes if process.log}


def _of_ended(directory: Path, port: int | None) -> Logs:
    """Return the logs in `directory` of the `baton serve` that wrote last, of those with that port if it is given."""
    matches = [
        (match, path)
        for path in directory.glob("*.log")
        if (match := LOG_NAME.fullmatch(path.name)) and port in (None, int(match["port"]))
    ]
    if not matches:
        return {}
    newest = max(matches, key=lambda found: found[1].stat().st_mtime)[0]
    address = newest["host"], newest["port"]
    return {match["process"]: path for match, path in matches if (match["host"], match["port"]) == address}


def _chosen(logs: Logs, role: str | None) -> Logs:
    """Return the log of the process with that name, or those of a role."""
    if role is None or role in logs:
        return {role: logs[role]} if role is not None else logs
    return {name: path for name, path in logs.items() if name.rpartition("-")[0] == role}


def _show(lines: list[Line], several: bool) -> None:
    for line in lines:
        click.echo((_label(line.source) if several else "") + line.text)
    sys.stdout.flush()


def _label(source: str) -> str:
    return click.style(f"{source:<10} | ", fg=COLORS[sum(source.encode()) % len(COLORS)])
