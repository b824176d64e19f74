"""A group of commands that are imported when they are used: a completion or an error should not wait for the others."""

import importlib
from collections.abc import Mapping
from typing import NamedTuple, cast

import click


class LazyCommand(NamedTuple):
    """Where a command is, and its line in the help of the group."""

    module: str
    attribute: str
    summary: str


class LazyGroup(click.Group):
    """Shows its commands in sections, and imports one when it is called."""

    sections: Mapping[str, Mapping[str, LazyCommand]]

    def list_commands(self, ctx: click.Context) -> list[str]:
        """See click."""
        return [name for section in self.sections.values() for name in section]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """See click."""
        for section in self.sections.values():
            if (found := section.get(cmd_name)) is not None:
                return cast(click.Command, getattr(importlib.import_module(found.module), found.attribute))
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See click."""
        for title, section in self.sections.items():
            with formatter.section(title):
                formatter.write_dl([(name, command.summary) for name, command in section.items()])
