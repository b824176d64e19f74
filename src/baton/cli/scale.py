"""`baton scale` and `baton drain`: change the workers of a running `baton serve`."""

import sys
from collections.abc import Sequence

import click

from baton.cli.completions import complete_groups, complete_workers
from baton.cli.running_serve import fail, find_serve, port_option
from baton.topology.control_client import send
from baton.topology.control_messages import Counts, Done, DrainRequest, OperationError, Progress, Request, ScaleRequest

FLAG_NAMES = {"workers": "worker"}  # as in `baton serve --workers 2`


@click.command()
@click.argument("counts", nargs=-1, required=True, metavar="ROLE=COUNT...", shell_complete=complete_groups)
@port_option
def scale(counts: tuple[str, ...], port: int | None) -> None:
    """Change the number of workers of a running `baton serve`: `baton scale decode=3`.

    ROLE is worker, prefill, decode, encode or process, or the name of a pool: those that the `baton serve` was started
    with. New workers are ready when the command returns. Workers that are no longer needed leave discovery, finish
    their requests (for up to --drain-timeout-s) and exit; those that are not ready go first, then the highest numbers.
    """
    _carry_out(ScaleRequest(counts=_counts(counts)), port)


@click.command()
@click.argument("worker", shell_complete=complete_workers)
@click.option("--restart", is_flag=True, help="start it again when it has stopped")
@port_option
def drain(worker: str, restart: bool, port: int | None) -> None:
    """Take a WORKER of a running `baton serve` out of service: `baton drain decode-1`.

    It leaves discovery, finishes its requests (for up to --drain-timeout-s) and exits. Without --restart there is one
    worker less of its role from then on; `baton scale` starts another one.
    """
    _carry_out(DrainRequest(worker=worker, restart=restart), port)


def _counts(texts: Sequence[str]) -> Counts:
    counts: Counts = {}
    for role, number in map(_parse, texts):
        if role in counts:
            raise click.UsageError(f"{role} is given twice: drop one of {role}={counts[role]} and {role}={number}")
        counts[role] = number
    return counts


def _parse(text: str) -> tuple[str, int]:
    role, equals, number = text.partition("=")
    if not equals or not number.isdecimal():
        raise click.UsageError(f"{text!r} is not ROLE=COUNT, as in decode=3")
    return FLAG_NAMES.get(role, role), int(number)


def _carry_out(request: Request, port: int | None) -> None:
    try:
        for reply in send(find_serve(port).url, request):
            match reply:
                case Progress(message=message):
                    click.echo(message)
                case Done(counts=counts):
                    click.echo(_summary(counts))
                    return
    except OperationError as error:
        sys.exit(fail(error))
    sys.exit(fail(OperationError("not_serving", "`baton serve` has ended")))


def _summary(counts: Counts) -> str:
    return "now " + ", ".join(f"{role}={number}" for role, number in counts.items())
