"""Help of the commands that take settings: examples and the common settings, or all settings, by group."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import click

from baton.config.groups import COMMON, grouped
from baton.config.load import Option


class HelpContent(NamedTuple):
    """What help shows besides click's own: examples, and the settings by the names of their click options."""

    command: str
    examples: Sequence[tuple[str, str]]
    settings: Mapping[str, Option]


class GroupedHelp(click.Command):
    """A command whose help has its settings in groups. `--help` shows the common ones and `--help-all` all."""

    help_content: HelpContent

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See click."""
        every, content = bool(ctx.meta.get(SHOW_ALL)), self.help_content
        shown = _shown(content.settings, every)
        params = {param.name or "": param for param in self.get_params(ctx)}
        _write_examples(formatter, content.examples)
        for title, settings in grouped(list(shown.values())):
            _write_section(formatter, title, ctx, [params.pop(param_name(option)) for option in settings])
        _write_section(formatter, "Other options", ctx, _others(params, content.settings))
        if not every:
            _write_more(formatter, content, len(shown))


SHOW_ALL = "baton.help_all"


def param_name(option: Option) -> str:
    """Return the name of the click option of a setting."""
    return option.key.replace(".", "_")


def _others(params: Mapping[str, click.Parameter], settings: Mapping[str, Option]) -> list[click.Parameter]:
    return [param for name, param in params.items() if name not in settings]


def _shown(settings: Mapping[str, Option], every: bool) -> dict[str, Option]:
    return {name: option for name, option in settings.items() if every or option.key in COMMON}


def help_all_option() -> click.Option:
    """Return the option `--help-all`."""

    def show(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
        if wanted and not ctx.resilient_parsing:
            ctx.meta[SHOW_ALL] = True
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()

    return click.Option(
        ["--help-all"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="show all settings, and exit",
    )


def settings_help(ctx: click.Context, engine: str) -> str:
    """Return the help of an engine that is built in: its settings, since it takes no arguments after `--`."""
    formatter = ctx.make_formatter()
    formatter.write(f"The engine {engine} takes no arguments after `--`. Its settings:\n")
    prefix = f"{engine}_"
    own = [param for param in ctx.command.get_params(ctx) if (param.name or "").startswith(prefix)]
    _write_section(formatter, f"Engine {engine}", ctx, own)
    return formatter.getvalue().rstrip("\n")


def _write_examples(formatter: click.HelpFormatter, examples: Sequence[tuple[str, str]]) -> None:
    if examples:
        with formatter.section("Examples"):
            width = max(len(command) for command, _ in examples)
            for command, meaning in examples:
                formatter.write(f"  {command.ljust(width)}  # {meaning}\n")


def _write_section(
    formatter: click.HelpFormatter, title: str, ctx: click.Context, params: Sequence[click.Parameter]
) -> None:
    rows = [row for param in params if (row := param.get_help_record(ctx)) is not None]
    if rows:
        with formatter.section(title):
            formatter.write_dl(rows)


def _write_more(formatter: click.HelpFormatter, content: HelpContent, shown: int) -> None:
    formatter.write(
        f"\n`baton {content.command} --help-all` shows all {len(content.settings)} settings; these are {shown} of them."
        "\nEach can also be set by a variable (--log-level: BATON_LOG_LEVEL) or in the YAML file of --config.\n"
    )
