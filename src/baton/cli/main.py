"""The `baton` command: the group, and the split between our arguments and the engine's."""

import sys

import click

from baton import __version__
from baton.cli.exit_codes import EXIT_CONFIG, EXIT_FAILED, report_error
from baton.cli.lazy_group import LazyCommand, LazyGroup
from baton.errors import BatonError

SECTIONS = {
    "Serve": {
        "serve": LazyCommand("baton.cli.serve", "serve", "an OpenAI endpoint with its workers, on this machine"),
        "worker": LazyCommand("baton.cli.worker", "worker", "one worker"),
        "frontend": LazyCommand("baton.cli.frontend", "frontend", "the OpenAI endpoint alone"),
        "router": LazyCommand("baton.cli.router_run", "router", "check a topology file, or start a global router"),
    },
    "Use and watch": {
        "chat": LazyCommand("baton.cli.chat", "chat", "talk to a running server"),
        "top": LazyCommand("baton.cli.top", "top", "processes with their requests, throughput and latency"),
        "view": LazyCommand("baton.cli.view", "view", "the web view of a running deployment"),
        "logs": LazyCommand("baton.cli.logs", "logs", "logs of the processes of `baton serve`"),
    },
    "Change what runs": {
        "scale": LazyCommand("baton.cli.scale", "scale", "change the number of workers of `baton serve`"),
        "drain": LazyCommand("baton.cli.scale", "drain", "take a worker of `baton serve` out of service"),
        "ctl": LazyCommand("baton.cli.ctl", "ctl", "send a control command to one worker"),
        "experts": LazyCommand("baton.cli.experts", "experts", "plan an expert layout"),
    },
    "Set up": {
        "doctor": LazyCommand("baton.cli.doctor", "doctor", "what is wrong on this machine, and how to mend it"),
        "completion": LazyCommand("baton.cli.completions", "completion", "completion for bash, zsh or fish"),
    },
}
_TAKE_ENGINE_ARGS = ("serve", "worker", "frontend", "doctor")


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="baton")
def cli() -> None:
    """Serve language models as distributed workers."""


assert isinstance(cli, LazyGroup)
cli.sections = SECTIONS


def main() -> None:
    """Run the command; the arguments after `--` are the engine's."""
    args = sys.argv[1:]
    cut = args.index("--") if "--" in args and args[0] in _TAKE_ENGINE_ARGS else len(args)
    try:
        cli(args[:cut], standalone_mode=False, obj=tuple(args[cut + 1 :]), prog_name="baton")
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(EXIT_CONFIG)
    except click.Abort:
        sys.exit(EXIT_FAILED)
    except BatonError as error:
        sys.exit(report_error(error.message, EXIT_CONFIG))
    except click.ClickException as error:
        sys.exit(report_error(f"{' '.join(error.format_message().split())}  (see `baton --help`)", EXIT_CONFIG))
