"""`baton top`: the processes of a deployment in the terminal, live or once."""

import asyncio
import os
import shutil
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager

import click
import msgspec

from baton.cli.exit_codes import EXIT_FAILED, report_error
from baton.cli.top_samples import FleetSampler, Row, now_unix_s
from baton.cli.top_table import render
from baton.views.deployment import GivenProcesses, LocalProcesses, ProcessFinder

ALTERNATE_SCREEN, NORMAL_SCREEN = "\033[?1049h\033[?25l", "\033[?25h\033[?1049l"
HOME, CLEAR_LINE, CLEAR_BELOW = "\033[H", "\033[K", "\033[J"


@click.command()
@click.option("--once", is_flag=True, help="print the table once, and exit; so it is without a terminal")
@click.option("--json", "as_json", is_flag=True, help="print JSON: one line for each reading")
@click.option(
    "--interval-s", type=click.FloatRange(0.2, 3600), default=1.0, show_default=True, help="time between readings"
)
@click.option("--port", type=click.IntRange(0, 65535), help="port of the endpoint of one of several `baton serve`")
@click.option("--url", "urls", multiple=True, help="system server of a process; repeat it for each. For other machines")
@click.option("--token", envvar="BATON_CONTROL_TOKEN", default="", help="token of processes that were given one")
def top(once: bool, as_json: bool, interval_s: float, port: int | None, urls: tuple[str, ...], token: str) -> None:
    """Show the processes of a deployment: state, requests, KV use, throughput and latency.

    Without --url, all processes of this user on this machine. Rates and latencies are of the last ten seconds. Quit
    with q or Ctrl-C.
    """
    finder: ProcessFinder = (
        GivenProcesses(urls, token) if urls else LocalProcesses("" if port is None else str(port), token)
    )
    live = not once and (as_json or sys.stdout.isatty())
    try:
        sys.exit(asyncio.run(_run(finder, as_json, interval_s if live else None)))
    except KeyboardInterrupt:
        sys.exit(0)


async def _run(finder: ProcessFinder, as_json: bool, interval_s: float | None) -> int:
    from baton.views.process_client import ProcessClient

    client = ProcessClient()
    try:
        sampler = FleetSampler(finder, client)
        rows = await sampler.sample()
        if not rows:
            return report_error("no process of this user runs on this machine: start `baton serve`", EXIT_FAILED)
        if interval_s is None:
            size = shutil.get_terminal_size((160, 1000)) if sys.stdout.isatty() else os.terminal_size((400, 10_000))
            click.echo(_json(rows) if as_json else render(rows, size.columns, 10_000, time.strftime("%H:%M:%S")))
            return _exit_code(rows)
        await (_stream(sampler, rows, interval_s) if as_json else _watch(sampler, rows, interval_s))
        return 0
    except OSError as error:
        return report_error(f"processes cannot be found: {error}", EXIT_FAILED)
    finally:
        await client.aclose()


def _exit_code(rows: list[Row]) -> int:
    """Return the exit code of one reading, which fails if it has no process."""
    if all(row.problem is not None for row in rows):
        return report_error(f"no process can be read ({rows[0].name}: {rows[0].problem})", EXIT_FAILED)
    return 0


async def _stream(sampler: FleetSampler, rows: list[Row], interval_s: float) -> None:
    """Print a line of JSON for each reading, until Ctrl-C."""
    while True:
        click.echo(_json(rows))
        sys.stdout.flush()
        await asyncio.sleep(interval_s)
        rows = await sampler.sample()


async def _watch(sampler: FleetSampler, rows: list[Row], interval_s: float) -> None:
    """Draw the table again and again on a screen of its own, until q is pressed."""
    with _screen() as quitting:
        while not quitting.is_set():
            size = shutil.get_terminal_size()
            lines = render(rows, size.columns, size.lines - 1, time.strftime("%H:%M:%S")).splitlines()
            lines.append(click.style("q: quit", dim=True))
            sys.stdout.write(HOME + "".join(f"{line}{CLEAR_LINE}\r\n" for line in lines[:-1]) + lines[-1] + CLEAR_BELOW)
            sys.stdout.flush()
            try:
                async with asyncio.timeout(interval_s):
                    await quitting.wait()
            except TimeoutError:
                rows = await sampler.sample()


@contextmanager
def _screen() -> Iterator[asyncio.Event]:
    """Take the terminal within the block; the event is set when q is pressed."""
    quitting = asyncio.Event()
    loop = asyncio.get_running_loop()
    keyboard = sys.stdin.fileno() if sys.stdin.isatty() else None

    def read_key() -> None:
        if keyboard is not None and os.read(keyboard, 32)[:1] in (b"q", b"Q", b""):
            quitting.set()

    before = termios.tcgetattr(keyboard) if keyboard is not None else None
    sys.stdout.write(ALTERNATE_SCREEN)
    if keyboard is not None:
        tty.setcbreak(keyboard)
        loop.add_reader(keyboard, read_key)
    try:
        yield quitting
    finally:
        if keyboard is not None and before is not None:
            loop.remove_reader(keyboard)
            termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
        sys.stdout.write(NORMAL_SCREEN)
        sys.stdout.flush()


def _json(rows: list[Row]) -> str:
    return msgspec.json.encode({"now_unix_s": now_unix_s(), "processes": rows}).decode()
