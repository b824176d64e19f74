"""Turns settings into a click command: one option per setting, loaded and checked before the command runs."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import click

from baton.cli.completions import complete_models
from baton.cli.exit_codes import EXIT_CONFIG, EXIT_FAILED, report_error
from baton.cli.grouped_help import GroupedHelp, HelpContent, help_all_option, param_name, settings_help
from baton.config.disk_space import full_disk
from baton.config.environment import process_name
from baton.config.load import ENGINE_ARGS, Option, load, options
from baton.config.settings import Settings
from baton.errors import BatonError, ConfigError
from baton.process.logs import start_logging
from baton.runtimes.dynamo.addresses import with_addresses
from baton.runtimes.dynamo.environment import environment, environment_defaults

Run = Callable[[Settings], int]


def settings_command(
    name: str,
    summary: str,
    run: Run,
    *,
    process: str | None = None,
    starts_engines: bool = True,
    as_json: Run | None = None,
    examples: Sequence[tuple[str, str]] = (),
) -> click.Command:
    """Return a command that loads the settings of a `process` (`name` if not given), calls `run` and exits.

    With `starts_engines`, the arguments after `--`, which `main` puts into the context, are the engine's. Its help
    begins with `examples`: command lines, each with what it does. With `as_json`, which is called instead of `run`,
    there is a flag `--json`.
    """
    table = [option for option in options() if (process or name) in option.commands and option.kind != ENGINE_ARGS]
    by_name = {param_name(option): option for option in table}

    @click.pass_obj
    def callback(
        engine_args: tuple[str, ...],
        /,
        config: str | None,
        help_engine: bool = False,
        json: bool = False,
        model_argument: str | None = None,
        **flags: object,
    ) -> None:
        if engine_args and not starts_engines:
            raise click.UsageError(f"`baton {name}` starts no engine, so it takes no arguments after --")
        given = _given(by_name, flags, model_argument, engine_args)
        chosen = _help_engine if help_engine else as_json if json and as_json is not None else run
        sys.exit(_run(chosen, given, Path(config) if config else None))

    params = [
        *([_model_argument()] if starts_engines else []),
        *(_click_option(option) for option in table),
        *_other_options(starts_engines, as_json is not None),
    ]
    kind = _EngineCommand if starts_engines else GroupedHelp
    command = kind(name, callback=callback, params=params, help=summary)
    command.help_content = HelpContent("router run" if process == "router" else name, examples, by_name)
    return command


def _given(
    settings: Mapping[str, Option], flags: Mapping[str, object], model: str | None, engine_args: tuple[str, ...]
) -> dict[str, object]:
    """Return the settings of a command line by key, None where they are not given."""
    given = {settings[name].key: _joined(settings[name], value) for name, value in flags.items()}
    if model is not None:
        given["model"] = _one_model(model, given["model"])
    if engine_args:
        given["engine_args"] = engine_args
    return given


def _other_options(starts_engines: bool, has_json: bool) -> list[click.Option]:
    options = [click.Option(["--config"], metavar="FILE", help="YAML file with settings", envvar=None)]
    if has_json:
        options.append(click.Option(["--json"], is_flag=True, help="print JSON"))
    options.append(help_all_option())
    if starts_engines:
        options.append(click.Option(["--help-engine"], is_flag=True, help="show the engine's own arguments, and exit"))
    return options


class _EngineCommand(GroupedHelp):
    """A command with the engine's arguments at its end, which `main` cuts off."""

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """See click."""
        return [*super().collect_usage_pieces(ctx), "[-- ENGINE ARGS]"]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See click. An unknown option may be one of the engine's, as --tp is."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            text = error.format_message().rstrip(".")
            raise click.UsageError(f"{text}; arguments of the engine follow `--`", ctx) from None


def _model_argument() -> click.Argument:
    return click.Argument(["model_argument"], required=False, metavar="[MODEL]", shell_complete=complete_models)


def _joined(option: Option, value: object) -> object:
    """Return the value of a flag, None if it is not given; a repeated one is a list."""
    if not option.repeated:
        return value
    return ",".join(value) or None if isinstance(value, tuple) else value


def _one_model(argument: str, flag: object) -> str:
    if flag is not None and flag != argument:
        raise click.UsageError(f"the model is given twice: {argument} and --model {flag}; drop one of them")
    return argument


def prepare_runtime(settings: Settings) -> Settings:
    """Return `settings` with the addresses of this process, and set the runtime's environment. Raises ConfigError.

    The runtime reads its environment while it is imported, so call this before the import.
    """
    settings = with_addresses(settings)
    os.environ.update(environment_defaults(settings.runtime) | dict(os.environ) | environment(settings.runtime))
    return settings


def _click_option(option: Option) -> click.Option:
    flag = option.flag
    default = option.default if option.default not in ("", None) else None
    text = option.description + (f"  [default: {default}]" if default is not None else "")
    name = param_name(option)
    if option.kind == "bool":
        return click.Option([name, f"{flag}/--no-{flag[2:]}"], default=None, help=text)
    kind = click.Choice(option.choices) if option.choices else None
    return click.Option(
        [name, flag, *option.aliases],
        default=None,
        help=text,
        type=kind,
        metavar=None if kind else option.kind,
        multiple=option.repeated,
    )


def _help_engine(settings: Settings) -> int:
    from baton.engines.registry import engine_args_help

    text = engine_args_help(settings)
    click.echo(text if text is not None else settings_help(click.get_current_context(), settings.engine))
    return 0


def _process_name(settings: Settings) -> str:
    """Return the name of this process in its log: what its supervisor calls it, or else its role or command."""
    if (name := process_name()) is not None:
        return name.rpartition("/")[2]
    command = click.get_current_context().info_name or "baton"
    return settings.role if command == "worker" and settings.role != "auto" else command


def _run(run: Run, flags: dict[str, object], file: Path | None) -> int:
    try:
        settings = load(flags, os.environ, file)
        start_logging(settings.log_level, settings.log_format, _process_name(settings))
        return run(settings)
    except ConfigError as error:
        return report_error(error.message, EXIT_CONFIG)
    except BatonError as error:
        return report_error(error.message, EXIT_FAILED)
    except OSError as error:
        if (full := full_disk(error)) is None:
            raise
        where = f"the disk of {full.filename}" if full.filename else "a disk"
        return report_error(f"{where} is full: {full.strerror}; free some space", EXIT_FAILED)
