"""How a command ends that could not do what it was asked to do: one line, and an exit code."""

import click

from baton.status.sd_notify import notify

EXIT_FAILED = 1
EXIT_CONFIG = 2
"""The command or a setting must be changed before it can succeed."""


def report_error(message: str, exit_code: int) -> int:
    """Print `message`, pass it to the supervisor, and return `exit_code`."""
    click.echo(f"baton: {message}", err=True)
    notify(f"STATUS={message}")
    return exit_code
