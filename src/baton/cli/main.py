"""The `baton` command."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import click

from baton import __version__
from baton.cli.ctl import ctl
from baton.cli.experts import experts
from baton.cli.router import router
from baton.config.directories import log_directory
from baton.config.load import ENGINE_ARGS, Option, load, options
from baton.config.settings import Settings
from baton.errors import BatonError, ConfigError
from baton.process.logs import start_logging
from baton.runtimes.dynamo.environment import environment
from baton.status.sd_notify import notify

TAKE_SETTINGS = ("serve", "worker", "frontend")
EXIT_CONFIG = 2
EXIT_FAILED = 1

Command = Callable[[Settings], int]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="baton")
def cli() -> None:
    """Serve language models as distributed workers."""


def _serve(settings: Settings) -> int:
    from baton.topology.supervisor import run_supervisor

    return run_supervisor(settings, _announce)


def _announce(model: str, settings: Settings) -> None:
    from baton.engines.registry import embeds
    from baton.topology.process_specs import add_worker_command, describe_workers

    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"http://{host}:{settings.port}"
    if embeds(settings):
        path, body = "embeddings", f'{{"model": "{model}", "input": "Hello!"}}'
    else:
        path = "chat/completions"
        body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}], "max_tokens": 32}}'
    logs = log_directory(settings) or "standard error"
    click.echo(f"Serving {model} on {address} with {describe_workers(settings)}  (logs: {logs})\n\nTry it:\n")
    click.echo(f"  curl {address}/v1/{path} -H 'Content-Type: application/json' -d '{body}'\n")
    if settings.prefill:
        click.echo(f"Add a worker while it serves:\n\n  {add_worker_command(settings)}\n")
    sys.stdout.flush()


def _worker(settings: Settings) -> int:
    from baton.engines.registry import prepare_model

    settings = prepare_model(settings)  # before there is an event loop, and before the runtime keeps hubs away
    _prepare_runtime(settings)
    from baton.process.worker import run_worker

    return run_worker(settings)


def _frontend(settings: Settings) -> int:
    _prepare_runtime(settings)
    from baton.process.frontend import run_frontend

    return run_frontend(settings)


def _router(settings: Settings) -> int:
    from baton.engines.registry import prepare_tokenizer

    if not settings.topology:
        raise ConfigError("a router goes by a file: give --topology FILE (docs/router.md says what is in it)")
    settings = prepare_tokenizer(settings)
    _prepare_runtime(settings)
    from baton.process.router import run_router

    return run_router(settings)


def _prepare_runtime(settings: Settings) -> None:
    """The runtime sets up its logs and traces while it is imported, so it must find its environment before that."""
    os.environ.update(environment(settings.runtime))


def _click_option(option: Option) -> click.Option:
    flag = option.flag
    shown = option.default if option.default not in ("", None) else None
    text = option.description + (f"  [default: {shown}]" if shown is not None else "")
    if option.kind == "bool":
        return click.Option([option.key.replace(".", "_"), f"{flag}/--no-{flag[2:]}"], default=None, help=text)
    kind = click.Choice(option.choices) if option.choices else None
    return click.Option(
        [option.key.replace(".", "_"), flag],
        default=None,
        help=text,
        type=kind,
        metavar=None if kind else option.kind,
    )


def _add(name: str, summary: str, command: Command, starts_engines: bool = True) -> None:
    cli.add_command(_command(name, name, summary, command, starts_engines))


def _command(name: str, kind: str, summary: str, command: Command, starts_engines: bool) -> click.Command:
    """Return a command with the options of processes of `kind`."""
    table = [option for option in options() if kind in option.commands and option.kind != ENGINE_ARGS]
    keys = {option.key.replace(".", "_"): option.key for option in table}

    @click.pass_obj
    def run(words: tuple[str, ...], /, config: str | None, help_engine: bool = False, **flags: object) -> None:
        if words and not starts_engines:
            raise click.UsageError(f"`baton {name}` starts no engine: nothing can follow --")
        given = {keys[key]: value for key, value in flags.items()}
        if words:
            given["engine_args"] = words
        sys.exit(_guarded(_help_engine if help_engine else command, given, Path(config) if config else None))

    params: list[click.Parameter] = [
        click.Option(["--config"], metavar="FILE", help="YAML file with settings", envvar=None),
        *(_click_option(option) for option in table),
    ]
    if starts_engines:
        params.append(click.Option(["--help-engine"], is_flag=True, help="show what can follow --, and exit"))
    usage = "[OPTIONS] [-- ENGINE ARGS]" if starts_engines else "[OPTIONS]"
    return click.Command(name, callback=run, params=params, help=summary, options_metavar=usage)


def _help_engine(settings: Settings) -> int:
    from baton.engines.registry import words_help

    click.echo(words_help(settings))
    return 0


def _guarded(command: Command, flags: dict[str, object], file: Path | None) -> int:
    try:
        settings = load(flags, os.environ, file)
        start_logging(settings.log_level)
        return command(settings)
    except ConfigError as error:
        return _report(error.message, EXIT_CONFIG)
    except BatonError as error:
        return _report(error.message, EXIT_FAILED)


def _report(message: str, code: int) -> int:
    click.echo(f"baton: {message}", err=True)
    notify(f"STATUS={message}")
    return code


_add("serve", "Start an OpenAI endpoint with its workers, as processes on this machine.", _serve)
_add("worker", "Start one worker.", _worker)
_add("frontend", "Start the OpenAI endpoint alone; it finds its workers by discovery.", _frontend, False)
router.add_command(_command("run", "router", "Start a global router; it finds its pools by discovery.", _router, False))
cli.add_command(experts)
cli.add_command(ctl)
cli.add_command(router)


def main() -> None:
    """Run the command; what follows `--` is for the engine."""
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words and words[0] in TAKE_SETTINGS else len(words)
    try:
        cli(words[:cut], standalone_mode=False, obj=tuple(words[cut + 1 :]))
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(EXIT_CONFIG)
    except click.Abort:
        sys.exit(EXIT_FAILED)
    except click.ClickException as error:
        sys.exit(_report(f"{' '.join(error.format_message().split())}  (see `baton --help`)", EXIT_CONFIG))
